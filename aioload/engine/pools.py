"""Pools: threads that pull jobs from a shared queue, as many of them awake as is of use.

Handing a job over costs an append and, at most, one wake-up. There is no lock around the queue and no future
per job: ``deque`` and ``list`` operations are atomic, and a thread that finds nothing to do announces itself
before it looks once more and parks.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from aioload.context import HERE
from aioload.engine import limit, threads, tuner
from aioload.engine.regulator import Regulator
from aioload.engine.runnable import is_any_runnable
from aioload.stats import Ledger, Tally

Job: TypeAlias = "tuple[Callable[[Worker, Any, Any, Any], None], Any, Any, Any]"
"""A function and its arguments after the worker. It must not raise: errors belong to a batch."""

Rest: TypeAlias = "list[int | None]"
"""Positions of a batch that a job has yet to see to, the next one last, behind ``None``. Who takes one pops it."""

STUCK_AFTER_S = 0.003
"""A pool that has jobs queued and has finished none for this long has not enough threads awake ..."""

SURELY_STUCK_AFTER_S = 0.05
"""... unless one of them is computing, or would be if it had a processor, which goes on for less than this."""

LAST_LOOK_S = 1.0
"""Somebody looks after the first jobs from ``STUCK_AFTER_S`` on, at times that double, until this: on a busy machine a
thread that is about to wait for its read seems to compute at first."""

_PAUSE_S = 0.02
"""A thread that sleeps looks this often whether it should go on."""

HANGING_JOBS = 20
"""A thread that has been at one job for as long as so many usually take, at the least ``STUCK_AFTER_S``, does not count
among those awake: it waits for something else than the interpreter."""


class Worker:
    """One thread of a pool: its number, its tally and the lock it parks on.

    ``mark`` is the last reading of the clock, when the job or its last stage began, or the thread was to go to work; a
    job moves it on. ``num_units`` is the number of samples that the job is for, 1 unless it says otherwise; ``claimed``
    is for the job's own use.
    """

    __slots__ = (
        "_on_start",
        "_tokens",
        "attempt",
        "claimed",
        "mark",
        "num_units",
        "number",
        "park",
        "shared",
        "tally",
        "thread",
    )

    def __init__(self, on_start: Callable[[int], None] | None) -> None:
        self.number, self._on_start = -1, on_start
        self._tokens = [None]
        self.tally = Tally()  # the ledger's own while the thread lives
        self.mark = time.perf_counter()
        self.num_units = 1
        self.attempt: Any = None  # the read it is at, where somebody watches
        self.claimed = 0
        self.shared: tuple[Callable[[Worker, Any, Any, Any], None], Any, Rest] | None = None
        """What others may take over of the job that it is at: function, batch and positions."""
        self.park = threading.Lock()
        self.park.acquire()
        self.thread: threading.Thread | None = None

    def take(self) -> bool:
        """Return ``True``, once: to its thread, which then goes to work, or to who does not wait for that thread."""
        try:
            self._tokens.pop()  # atomic
        except IndexError:
            return False
        return True

    def begin(self) -> None:
        """Do what is to be done before the first job. The user's function is not kept."""
        on_start, self._on_start = self._on_start, None
        if on_start is not None:
            on_start(self.number)


class ThreadPool:
    """Daemon threads ``aioload-<name>-<number>`` over one queue of jobs. Any thread may call any method.

    Args:
        name: What the threads do.
        size: Number of threads. Each is started when it is first of use (that takes 0.1 to 1 ms), or by
            :meth:`start` if there is an ``on_start``.
        awake: Threads that may be awake to begin with; see :mod:`~aioload.engine.tuner`.
        ledger: Where each thread's tally is kept.
        num_spare: Threads beside those, to work in the places of some that are set aside.
        regulator: Bounds the threads that may be awake, below ``size``; ``None`` for no such bound.
        on_start: Called in each thread with its number before its first job.
        on_begun: Called once, by whichever thread is the last, when ``on_start`` has returned in all of them.
        on_park: Called by each thread that finds nothing to do, before it sleeps.
        on_crash: Told of an exception from ``on_start``, or from a job that broke its promise.
    """

    def __init__(
        self,
        name: str,
        size: int,
        ledger: Ledger,
        *,
        awake: int,
        num_spare: int = 0,
        regulator: Regulator | None = None,
        on_start: Callable[[int], None] | None = None,
        on_begun: Callable[[], None] | None = None,
        on_park: Callable[[], None] | None = None,
        on_crash: Callable[[BaseException, bool], None],
    ) -> None:
        self.name, self.size, self.num_spare, self._regulator = name, size, num_spare, regulator
        self.cap = size if regulator is None else min(size, regulator.limit)
        """Threads that may be awake, beside those that hang, as long as that is of use."""
        self.closed = False
        self._tuning = tuner.Tuning(min(awake, self.cap))
        self._tuning_lock = threading.Lock()
        self.limit = self._tuning.limit
        self._last_job_ended = time.perf_counter()
        self.is_calm = self.is_single
        """Whether one thread may be awake and no other is: else a job of several samples should be cut short."""
        self._begin_window(self._last_job_ended)
        self._usual_job_s = 0.0
        self._ledger, self._on_crash = ledger, on_crash
        self._queue: deque[Job] = deque()
        self._idle: list[Worker] = []
        self._workers: list[Worker] = []
        self._unused_numbers = list(reversed(range(size + num_spare)))  # of workers; taking one is atomic
        self._num_aside = 0
        self._aside_lock = threading.Lock()
        self._on_start = on_start
        self._on_begun, self._on_park = on_begun, on_park
        self._tokens = list(range(size))  # one per thread that has not begun

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.num_awake}/{self.limit} awake"
        return f"<ThreadPool {self.name} of {self.size}, {state}, {len(self._queue)} jobs queued>"

    def start(self) -> None:
        """Start the threads that have something to do before their first job.

        Raises:
            RuntimeError: Not one thread can be started.
        """
        on_start, self._on_start = self._on_start, None  # the user's function is not kept
        if on_start is not None:
            for _ in range(self.size):
                self._start_another(on_start)

    def submit(self, jobs: Iterable[Job], num_jobs: int) -> None:
        """Queue ``num_jobs`` jobs behind those there are, and wake up as many threads as are of use.

        Raises:
            RuntimeError: Not one thread can be started.
        """
        if not self._queue:
            self._last_job_ended = max(self._last_job_ended, time.perf_counter())  # it has not been stuck so far
        elif self.limit < self.cap:
            self.widen_if_stuck()
        self._queue.extend(jobs)
        if self.closed:  # perhaps since a moment ago
            self._queue.clear()
        self._wake(num_jobs)

    @property
    def num_awake(self) -> int:
        """Threads that have not found that there is nothing to do, beside those that are set aside."""
        return len(self._workers) - self._num_aside - len(self._idle)

    @property
    def workers(self) -> Sequence[Worker]:
        """The threads that have been started."""
        return self._workers

    def is_idle(self) -> bool:
        """Return whether no job is queued and no thread at one, though it be set aside."""
        return not self._queue and len(self._idle) >= len(self._workers)

    @property
    def num_spare_left(self) -> int:
        """How many more threads may be set aside."""
        return self.num_spare - self._num_aside

    def set_aside(self) -> None:
        """Count a thread, which waits for something outside, no more: another may be awake in its place."""
        with self._aside_lock:
            self._num_aside += 1

    def take_back(self) -> None:
        """Count it again: it has come back."""
        with self._aside_lock:
            self._num_aside -= 1

    @property
    def is_single(self) -> bool:
        """Whether there is but one thread, so that none can do what another does not get to."""
        return self.size == 1 and self.num_spare == 0

    @property
    def is_alone(self) -> bool:
        """Whether one thread does it all, because jobs are tiny: then handing them over singly is a waste."""
        return self.limit == 1

    def resume(self, jobs: Sequence[Job]) -> None:
        """Queue what is left of a job that was cut short, before all others."""
        self._queue.extendleft(reversed(jobs))
        if self.closed:  # perhaps since a moment ago
            self._queue.clear()
        self._wake(len(jobs))

    def take_queued(self) -> list[Job]:
        """Return the jobs that no thread has begun, which the caller is to see to now."""
        jobs: list[Job] = []
        with contextlib.suppress(IndexError):
            while True:
                jobs.append(self._queue.popleft())
        return jobs

    def widen_if_stuck(self) -> None:
        """Let every thread that may work do so if jobs are queued, and for a while none has been finished nor computed.

        After a longer while they do not count, and as many others may work.
        """
        now_s, ended_s = time.perf_counter(), self._last_job_ended
        stuck_s = now_s - ended_s
        if stuck_s <= STUCK_AFTER_S:
            return
        num_allowed, shares = self._num_allowed(stuck_s), self._shares(self._workers)
        if not (self._queue and self.limit < num_allowed) and not shares:
            return
        if stuck_s <= SURELY_STUCK_AFTER_S and is_any_runnable(self._awake_threads()):
            return
        with self._tuning_lock:  # not by acquire(): where an interrupt came behind that call, it would stay locked
            if self._last_job_ended != ended_s:
                return  # a thread has finished a job just now
            if self.limit < self.cap:
                self._tuning = tuner.widened(self._tuning, self.cap, self._window(now_s))
            if self.limit < num_allowed:
                self._set_limit(num_allowed, now_s)
        if shares and self.num_awake < self.limit:  # by a thread of the pool: an interrupt of ours would lose some
            self.resume([(self._take_over, shares, None, None)])
        self._wake(len(self._queue))

    def _shares(self, workers: Iterable[Worker]) -> list[Any]:
        """Return what is left of the jobs that some threads are at, where anything is."""
        there = [worker.shared for worker in tuple(workers)]
        return [shared for shared in there if shared is not None and len(shared[2]) > 1]

    def _take_over(self, worker: Worker, shares: Iterable[Any], _: None, __: None) -> None:
        """Queue what is left of jobs, before all others, a job for each position."""
        for function, batch, rest in shares:
            jobs: list[Job] = []
            with contextlib.suppress(IndexError):
                while True:  # the last ones first
                    position = rest.pop(1)
                    jobs.append((function, batch, position, position + 1))
            self.resume(jobs[::-1])
        worker.num_units = 0

    def _awake_threads(self) -> list[threading.Thread]:
        idle = set(self._idle)
        awake = [worker.thread for worker in tuple(self._workers) if worker not in idle]
        return [thread for thread in awake if thread is not None]

    def _num_allowed(self, stuck_s: float) -> int:
        if self._regulator is None or not limit.is_stall(stuck_s, self._regulator.usual_job_s or STUCK_AFTER_S):
            return self.cap
        return min(self.size, 2 * self.cap)

    def pause(self, seconds: float) -> bool:
        """Sleep for so long, or until the pool is closed; return whether it is still open. In any of its threads."""
        end = time.monotonic() + seconds
        # Not by an event: a garbage collection in the middle of its lock may run a finalizer that closes the pool.
        while not self.closed and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _PAUSE_S))
        return not self.closed

    def close(self) -> None:
        """Drop the queued jobs and let each thread end after the job it is on. Takes no lock and never waits."""
        self.closed = True
        self.is_calm = False  # a job of several samples is cut short
        self._queue.clear()
        self._idle.clear()
        for worker in self._workers:  # all: an interrupt may have come between choosing one and waking it up
            if worker.park.locked():  # else it has just been woken up
                with contextlib.suppress(RuntimeError):  # now it has
                    worker.park.release()

    def join(self, deadline: float) -> None:
        """Wait until the threads have ended, at most until ``deadline`` on the monotonic clock."""
        for worker in self._workers:
            thread = worker.thread
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _wake(self, wanted: int) -> None:
        while wanted > 0 and not self.closed and self.num_awake < self.limit:
            now_s = time.perf_counter()
            try:  # not by pop(): where an interrupt came behind that call, the thread would sleep for ever
                worker = self._idle[-1]
                del self._idle[-1]
                worker.mark = now_s  # it has not hung since its last job
            except IndexError:
                if not self._start_another(None):
                    return
            else:
                try:
                    worker.park.release()
                except RuntimeError:  # the pool was closed meanwhile, and has woken all
                    return
            wanted -= 1

    def _start_another(self, on_start: Callable[[int], None] | None) -> bool:
        """Start one more thread, unless there are as many as there may be; return whether that was so."""
        worker = Worker(on_start)
        try:
            worker.number = self._unused_numbers[-1]
            del self._unused_numbers[-1]
        except IndexError:
            return False
        try:
            self._workers.append(worker)
            self._start(worker)
        except BaseException as exc:
            if not isinstance(exc, RuntimeError) and worker.take():  # an interrupt, before the thread was there
                self._workers.remove(worker)
                self._unused_numbers.append(worker.number)
            raise
        return True

    def _start(self, worker: Worker) -> None:
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name=f"aioload-{self.name}-{worker.number}", daemon=True
        )
        try:
            threads.start(worker.thread)
        except RuntimeError:  # the system has no more threads to give, or the interpreter is about to exit
            self._workers.remove(worker)
            self.size -= 1
            self.cap = min(self.cap, self.size)
            if self._regulator is not None:
                self._regulator.maximum = self.size
            if not any(other.thread is not None and other.thread.is_alive() for other in self._workers):
                raise
            self._note_begun()  # nobody waits for it

    def _park(self, worker: Worker) -> None:
        self._idle.append(worker)
        self._note_awake()
        # A job may have come, or the pool may have been closed, before we were on the list.
        if self.closed or (self._queue and self.num_awake < self.limit):
            worker.mark = time.perf_counter()
            try:
                self._idle.remove(worker)
            except ValueError:
                pass  # somebody is waking us up already
            else:
                return
        if self._on_park is not None:
            self._on_park()
        HERE.set(None)  # a parked thread keeps nothing alive
        worker.park.acquire()

    def _work(self, worker: Worker) -> None:
        if not worker.take():
            return
        worker.tally = self._ledger.open()
        try:
            worker.begin()
        except BaseException as exc:
            self._on_crash(exc, True)
            del exc
        else:
            self._note_begun()
            self._pull(worker)
        self._ledger.close(worker.tally)

    def _note_begun(self) -> None:
        if self._on_begun is not None and self._tokens.pop() == 0:  # taking a token is atomic
            self._on_begun()

    def _pull(self, worker: Worker) -> None:
        clock, queue, idle, workers = time.perf_counter, self._queue, self._idle, self._workers
        while not self.closed:
            if len(workers) - self._num_aside - len(idle) > self.limit:
                self._park(worker)
                continue
            try:
                function, a, b, c = queue.popleft()
            except IndexError:
                self._saturated = False
                self._park(worker)
                continue
            worker.mark = started = clock()
            worker.num_units = 1
            try:
                function(worker, a, b, c)
            except BaseException as exc:
                self._on_crash(exc, False)
            ended = worker.mark
            if ended == started:
                ended = clock()
            self._last_job_ended = ended
            worker.shared = None
            del function, a, b, c
            # Several threads may add at once and lose a job: the mean does not suffer.
            self._num_jobs += worker.num_units
            self._jobs_s += ended - started
            if ended - self._window_started >= tuner.MIN_WINDOW_S:
                self._tune(ended)

    def _hanging(self, now_s: float) -> list[Worker]:
        idle, since_s = set(self._idle), now_s - max(STUCK_AFTER_S, HANGING_JOBS * self._usual_job_s)
        return [worker for worker in self._workers if worker not in idle and worker.mark < since_s]

    def _begin_window(self, now_s: float) -> None:
        self._num_jobs, self._jobs_s = 0, 0.0
        self._saturated = True
        self._window_started = math.inf if self.is_single else now_s  # for ever, where there is nothing to tune

    def _note_awake(self) -> None:
        self.is_calm = self.limit == 1 and self.num_awake <= 1

    def _window(self, now_s: float) -> tuner.Window:
        num_jobs = self._num_jobs
        mean_job_s = self._jobs_s / num_jobs if num_jobs else 0.0
        return tuner.Window(num_jobs, max(now_s - self._window_started, 1e-9), mean_job_s, self._saturated)

    def _set_limit(self, num_threads: int, now_s: float) -> None:
        self.limit = num_threads
        self._note_awake()
        self._begin_window(now_s)

    def _tune(self, now_s: float) -> None:
        if not self._tuning_lock.acquire(blocking=False):
            return  # another thread does it
        try:
            window, before = self._window(now_s), self.limit
            if not window.is_full:
                return
            self._usual_job_s = tuner.usual(self._usual_job_s, window.mean_job_s)
            hanging = self._hanging(now_s)
            num_hanging = max(0, len(hanging) - self._num_aside)  # those are not counted as awake
            if hanging and (shares := self._shares(hanging)):
                self.resume([(self._take_over, shares, None, None)])
            if self.num_awake > self.limit + num_hanging:
                self._begin_window(now_s)  # those that are to park have yet to end their jobs: it says nothing
                return
            if not self._has_regulated(window, now_s):
                self._tuning = tuner.step(self._tuning, self.cap, window, now_s)
            self._set_limit(min(self.size, self._tuning.limit + num_hanging), now_s)
        finally:
            self._tuning_lock.release()
        if self.limit > before:
            self._wake(len(self._queue))

    def _has_regulated(self, window: tuner.Window, now_s: float) -> bool:
        """Tell the regulator, if all that may be awake have been, and follow if it moves the bound."""
        regulator = self._regulator
        if regulator is None or self._tuning.limit < self.cap or not regulator.note(window, now_s):
            return False
        self.cap = min(self.size, regulator.limit)
        self._tuning = replace(self._tuning, limit=self.cap, rival_limit=0, num_slow=0)
        return True
