"""Pools: threads that pull jobs from a shared queue, as many of them awake as is of use.

Handing a job over costs an append and, at most, one wake-up. There is no lock around the queue and no future
per job: ``deque`` and ``list`` operations are atomic, and a thread that finds nothing to do announces itself
before it looks once more and parks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from aioload.engine import tuner
from aioload.stats import Ledger, Tally

Job: TypeAlias = "tuple[Callable[[Worker, Any, Any, Any], None], Any, Any, Any]"
"""A function and its arguments after the worker. It must not raise: errors belong to a batch."""

STUCK_AFTER_S = 0.003
"""A pool that has jobs queued and has finished none for this long has not enough threads awake."""


class Worker:
    """One thread of a pool: its number, its tally and the lock it parks on."""

    __slots__ = ("number", "park", "tally", "thread")

    def __init__(self, number: int, tally: Tally) -> None:
        self.number, self.tally = number, tally
        self.park = threading.Lock()
        self.park.acquire()
        self.thread: threading.Thread | None = None


class ThreadPool:
    """Daemon threads ``aioload-<name>-<number>`` over one queue of jobs. Any thread may call any method.

    Args:
        name: What the threads do.
        size: Number of threads, all started at once.
        awake: Threads that may be awake to begin with; see :mod:`~aioload.engine.tuner`.
        ledger: Where each thread's tally is kept.
        on_start: Called in each thread with its number before its first job.
        on_crash: Told of an exception from ``on_start``, or from a job that broke its promise.
    """

    def __init__(
        self,
        name: str,
        size: int,
        ledger: Ledger,
        *,
        awake: int,
        on_start: Callable[[int], None] | None = None,
        on_crash: Callable[[BaseException, bool], None],
    ) -> None:
        self.name, self.size = name, size
        self.closed = False
        self._tuning = tuner.Tuning(min(awake, size))
        self._tuning_lock = threading.Lock()
        self.limit = self._tuning.limit
        self._last_job_ended = time.perf_counter()
        self._begin_window(self._last_job_ended)
        self._ledger, self._on_start, self._on_crash = ledger, on_start, on_crash
        self._queue: deque[Job] = deque()
        self._idle: list[Worker] = []
        self._workers = [Worker(number, ledger.open()) for number in range(size)]
        for worker in self._workers:
            worker.thread = threading.Thread(
                target=self._work, args=(worker,), name=f"aioload-{name}-{worker.number}", daemon=True
            )
            worker.thread.start()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.size - len(self._idle)}/{self.limit} awake"
        return f"<ThreadPool {self.name} of {self.size}, {state}, {len(self._queue)} jobs queued>"

    def submit(self, jobs: Iterable[Job], num_jobs: int) -> None:
        """Queue ``num_jobs`` jobs behind those there are, and wake up as many threads as are of use."""
        self._queue.extend(jobs)
        self._wake(num_jobs)

    def widen_if_stuck(self) -> None:
        """Let every thread work if jobs are queued and none has been finished for a while."""
        if self._queue and time.perf_counter() - self._last_job_ended > STUCK_AFTER_S:
            self._tuning = tuner.Tuning(self.size)
            self.limit = self.size
            self._wake(len(self._queue))

    def close(self) -> None:
        """Drop the queued jobs and let each thread end after the job it is on. Takes no lock and never waits."""
        self.closed = True
        self._queue.clear()
        while self._idle:
            try:
                self._idle.pop().park.release()
            except IndexError:
                break

    def join(self, deadline: float) -> None:
        """Wait until the threads have ended, at most until ``deadline`` on the monotonic clock."""
        for worker in self._workers:
            thread = worker.thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _wake(self, wanted: int) -> None:
        while wanted > 0 and self.size - len(self._idle) < self.limit:
            try:
                self._idle.pop().park.release()
            except IndexError:
                return
            wanted -= 1

    def _park(self, worker: Worker) -> None:
        self._idle.append(worker)
        # A job may have come, or the pool may have been closed, before we were on the list.
        if self.closed or (self._queue and self.size - len(self._idle) < self.limit):
            try:
                self._idle.remove(worker)
            except ValueError:
                pass  # somebody is waking us up already
            else:
                return
        worker.park.acquire()

    def _work(self, worker: Worker) -> None:
        try:
            if self._on_start is not None:
                self._on_start(worker.number)
        except BaseException as exc:
            self._on_crash(exc, True)
            del exc
        else:
            self._pull(worker)
        self._ledger.close(worker.tally)

    def _pull(self, worker: Worker) -> None:
        clock, queue, idle = time.perf_counter, self._queue, self._idle
        while not self.closed:
            if self.size - len(idle) > self.limit:
                self._park(worker)
                continue
            try:
                function, a, b, c = queue.popleft()
            except IndexError:
                self._saturated = False
                self._park(worker)
                continue
            started = clock()
            try:
                function(worker, a, b, c)
            except BaseException as exc:
                self._on_crash(exc, False)
            self._last_job_ended = ended = clock()
            del function, a, b, c  # a parked thread keeps nothing alive
            # Several threads may add at once and lose a job: the mean does not suffer.
            self._num_jobs += 1
            self._jobs_s += ended - started
            if ended - self._window_started >= tuner.MIN_WINDOW_S:
                self._tune(ended)

    def _begin_window(self, now_s: float) -> None:
        self._num_jobs, self._jobs_s = 0, 0.0
        self._saturated = True
        self._window_started = now_s

    def _tune(self, now_s: float) -> None:
        if not self._tuning_lock.acquire(blocking=False):
            return  # another thread does it
        try:
            elapsed_s, num_jobs = now_s - self._window_started, self._num_jobs
            if elapsed_s <= 0 or num_jobs == 0:
                return
            window = tuner.Window(num_jobs, elapsed_s, self._jobs_s / num_jobs, self._saturated)
            if not window.is_full:
                return
            before = self.limit
            self._tuning = tuner.step(self._tuning, self.size, window, now_s)
            self.limit = self._tuning.limit
            self._begin_window(now_s)
        finally:
            self._tuning_lock.release()
        if self.limit > before:
            self._wake(len(self._queue))
