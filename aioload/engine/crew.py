"""Crew: the threads, tasks and loop that runs work with, started together and stopped together."""

import asyncio
import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from aioload.engine import aside
from aioload.engine.pace import Pace
from aioload.engine.pools import LAST_LOOK_S, STUCK_AFTER_S, ThreadPool
from aioload.engine.portal import Portal
from aioload.engine.regulator import Regulator
from aioload.engine.source import Kind
from aioload.engine.tasks import TaskPool
from aioload.engine.watch import Watch
from aioload.errors import EngineError, ErrorContext, annotate, safe_to_raise
from aioload.stats import Ledger, Tally

MOST_SPARE = 64
"""Threads that work in the places of stuck ones, where the number of reads is found by itself."""

EXIT_TIMEOUT_S = 1.0
"""Seconds that the interpreter's exit waits for threads, all of them together."""


class Entrance:
    """The way onto the loop for what passes have to say; it opens when every worker has begun.

    So what a ``worker_init_fn`` raises is known before the first batch is handed over, however late it comes, and
    reaches who asks for that batch. (torch reports it in place of the first batch given to that worker, and never if
    there are fewer batches than workers.) Loading goes on meanwhile. Any thread may call any method.
    """

    def __init__(self, portal: Portal, *, opened: bool) -> None:
        self._portal = portal
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that stops the crew.
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] | None = None if opened else deque()
        self._closed = False
        # Not an Event: where an interrupt came in the middle of that, whoever asked next would wait for ever.
        self._settled = threading.Lock()
        self._settled.acquire()

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the loop call ``function(*args)``; ``False`` if it never will."""
        if self._waiting is not None:
            with self._lock:
                if self._closed:
                    return False
                if self._waiting is not None:
                    self._waiting.append((function, args))
                    return True
        return self._portal.call(function, *args)

    def pass_through(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` in this thread, or, as long as not every worker has begun, as :meth:`call` does."""
        if self._waiting is None:
            function(*args)
        else:
            self.call(function, *args)

    def open(self) -> None:
        """Let in those who wait, in the order they came in, and all who come later."""
        with self._lock:
            waiting, self._waiting = self._waiting or deque(), None
            for function, args in waiting:
                self._portal.call(function, *args)
        self._settle()

    def close(self) -> None:
        """Send away those who wait, and all who come later, unless it is open already."""
        with self._lock:
            if self._waiting is not None:
                self._closed = True
                self._waiting.clear()
        self._settle()

    def wait(self) -> None:
        """Wait until it is open or closed."""
        self._settled.acquire()
        self._settle()

    def _settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been released
            self._settled.release()


class Runs(Protocol):
    """What works with a crew, to be told when it breaks or is closed."""

    def break_(self, exc: BaseException) -> None:
        """Have the consumer raise ``exc``: threads, loop or processes cannot go on."""
        ...

    def close(self) -> None:
        """Let all batches go. Any thread; never waits."""
        ...


class Ends(Protocol):
    """What has to end before the interpreter does."""

    def stop_at_exit(self) -> None:
        """Begin to end, for good. Never waits."""
        ...

    def end_at_exit(self, deadline: float) -> None:
        """Wait for the end until ``deadline`` (monotonic), and never again."""
        ...


class Crew:
    """The workers of one pass, or of all passes where workers are persistent.

    It refers to nothing of the user's, save through the jobs that its threads have to do: so a loader that its own
    dataset refers to can be collected although threads live. ``crashed`` says that a thread could not go on.

    Args:
        kind: The kind of dataset: it decides what is needed beside the decode pool.
        num_workers: Decode threads.
        reads: Read threads, or tasks for an async dataset or reader; or what decides on their number.
        worker_init_fn: Called with its number in each decode thread before its first job; waited for, unless an
            event loop runs here.
        portal: The loop; the crew counts as one user of it. Runs reach it by way of the :class:`Entrance`.
        ledger: Where the threads' tallies are kept.
        tally: One that outlives the crew.
        pace: What the loader's reads have shown.
        loop_at_once: Whether the loop's thread is started before the first thread of the others.
        on_park: Called by each thread that finds nothing to do, before it sleeps.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        num_workers: int,
        reads: int | Regulator,
        worker_init_fn: Callable[[int], None] | None,
        portal: Portal,
        ledger: Ledger,
        tally: Tally,
        pace: Pace,
        loop_at_once: bool = True,
        on_park: Callable[[], None] | None = None,
    ) -> None:
        self._loop, self.portal = portal, Entrance(portal, opened=worker_init_fn is None)
        # A decode that runs on a read thread would run where worker_init_fn has not been called.
        self.may_inline = worker_init_fn is None
        self._pid = os.getpid()
        self._runs: weakref.WeakKeyDictionary[Runs, None] = weakref.WeakKeyDictionary()
        self._closed = self._is_exit = self._given_up = False
        self.crashed = False
        self._untold: BaseException | None = None  # an error that no run has been told of
        self._loop_at_once = loop_at_once or kind in (Kind.AWAITED, Kind.ASYNC)
        self._gathers = kind is Kind.TAKE  # and so may load all batches by itself, past the entrance
        self.regulator = reads if isinstance(reads, Regulator) else None
        num_reads = reads.maximum if isinstance(reads, Regulator) else reads
        self.reads: ThreadPool | None = None
        self.watch: Watch | None = None
        self.tasks: TaskPool | None = None
        self.pace = pace
        if kind is Kind.STAGED:
            num_spare = num_reads if self.regulator is None else min(num_reads, MOST_SPARE)
            self.reads = ThreadPool(
                "read",
                num_reads,
                ledger,
                awake=1,
                num_spare=num_spare,
                regulator=self.regulator,
                on_park=on_park,
                on_crash=self._crash,
            )
        elif kind in (Kind.AWAITED, Kind.ASYNC):
            on_crash = functools.partial(self._crash, at_start=False)
            self.tasks = TaskPool(num_reads, portal, ledger, on_crash, self.regulator)
        self.decode = ThreadPool(
            "decode",
            num_workers,
            ledger,
            awake=num_workers,
            on_start=worker_init_fn,
            on_begun=None if worker_init_fn is None else self.portal.open,
            on_park=on_park,
            on_crash=self._crash,
        )
        if self.reads is not None:
            self.watch = Watch(self.reads, self.decode, portal.call, pace, tally)

    def start(self) -> None:
        """Start what cannot wait for the first job, and wait for ``worker_init_fn``. Whoever calls it closes the crew.

        Raises:
            RuntimeError: The system has no thread to give.
            BaseException: What ``worker_init_fn`` raised, if the workers are not needed for batches to come.
        """
        end_at_exit(self)
        self._loop.acquire(self._loop_crashed, at_once=self._loop_at_once)
        self.decode.start()
        if not self.may_inline and not aside.in_event_loop():
            self.portal.wait()  # the consumer must not draw random numbers that are not its own
            if self._gathers:
                self._raise_untold()

    def __repr__(self) -> str:
        return f"<Crew {'closed ' if self._closed else ''}{self.reads or self.tasks} {self.decode} {self._loop}>"

    @property
    def decode_limit(self) -> int:
        """Decode threads that may be awake at present."""
        return self.decode.limit

    @property
    def is_single(self) -> bool:
        """Whether there is but one thread to load with, so that none can sleep beside one that is stuck."""
        return self.reads is None and self.tasks is None and self.decode.is_single

    @property
    def num_awake(self) -> int:
        """Threads that have not found that there is nothing to do."""
        return self.decode.num_awake + (0 if self.reads is None else self.reads.num_awake)

    @property
    def reads_limit(self) -> int:
        """Reads that may be under way at present."""
        if self._closed:
            return 0
        pool = self.reads or self.tasks or self.decode
        return pool.limit

    def attach(self, run: Runs) -> None:
        """Have ``run`` told when the crew breaks or is closed, or at once if it is."""
        self._runs[run] = None
        if self.crashed:
            error, self._untold = self._untold, None
            run.break_(error or _engine_error("A worker", None))
        elif self._closed:
            run.close()

    def begin(self) -> None:
        """See to it, from a few milliseconds on, that a first read that takes long does not keep others waiting."""
        self._loop.call(self._look_later, STUCK_AFTER_S)

    def widen_if_stuck(self) -> None:
        """Let every thread work where jobs wait and none gets done."""
        if self.reads is not None:
            self.reads.widen_if_stuck()
        self.decode.widen_if_stuck()

    def _raise_untold(self) -> None:
        if self.crashed:
            error = self._untold
            assert error is not None
            try:
                raise error
            finally:
                del error

    def _look_later(self, after_s: float) -> None:
        if after_s < LAST_LOOK_S and not self._closed:
            asyncio.get_running_loop().call_later(after_s, self._look, after_s)

    def _look(self, after_s: float) -> None:
        self.widen_if_stuck()
        self._look_later(2 * after_s)

    def close(self) -> None:
        """Let each thread end after the job it is on, and close all runs. Any thread, any time; never waits.

        Again, it does what is left to do: an interrupt may have cut it short. At exit it wakes nobody.
        """
        if self._is_exit or self._pid != os.getpid():
            return
        self.stop()
        for run in self._living_runs():
            run.close()

    def stop(self) -> None:
        """Let each thread end after the job it is on. Whoever waits for a batch goes on waiting."""
        if self._pid != os.getpid():
            return
        self._closed = True
        self.portal.close()
        if self.reads is not None:
            self.reads.close()
        if self.watch is not None:
            self.watch.close()
        if self.tasks is not None:
            self.tasks.close()
        self.decode.close()
        self._loop.release(self._loop_crashed)

    def join(self, timeout_s: float) -> None:
        """Wait until all threads have ended, at most ``timeout_s``: one may be stuck in a read for ever."""
        if self._given_up or self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout_s
        if self.reads is not None:
            self.reads.join(deadline)
        self.decode.join(deadline)
        self._loop.join(deadline)

    def stop_at_exit(self) -> None:
        """As :meth:`stop`, for good: a daemon thread that woke up now would be killed at whatever it does."""
        self._is_exit = True
        self.stop()

    def end_at_exit(self, deadline: float) -> None:
        """Wait for the threads until ``deadline`` (monotonic), and never again."""
        self.join(max(0.0, deadline - time.monotonic()))
        self._given_up = True
        self._loop.give_up()

    def _living_runs(self) -> list[Runs]:
        # keyrefs() takes a copy in one step: another thread may attach a run at any time.
        return [run for ref in self._runs.keyrefs() if (run := ref()) is not None]

    def _crash(self, exc: BaseException, at_start: bool) -> None:
        exc = safe_to_raise(exc) if at_start else _engine_error("A worker", exc)
        if at_start:
            annotate(exc, ErrorContext(None, None, "worker_init_fn"))
        self._untold, self.crashed = exc, True
        self._loop.call(self._tell, exc)  # after what has been reported to the loop
        self.stop()

    def _loop_crashed(self, exc: BaseException) -> None:
        self.crashed = True
        self._tell(_engine_error("The loop's", exc))
        self.stop()

    def _tell(self, exc: BaseException) -> None:
        runs = self._living_runs()
        # Not kept when it has been told: its traceback comes to refer to the iterator that raises it.
        self._untold = None if runs else exc
        for run in runs:
            run.break_(exc)


_crews: "weakref.WeakKeyDictionary[Ends, None]" = weakref.WeakKeyDictionary()


def end_at_exit(crew: Ends) -> None:
    """Have ``crew`` end before the interpreter does, if it lives until then."""
    _crews[crew] = None
    _end_crews_at_exit()


@functools.cache
def _end_crews_at_exit() -> None:
    """Arrange it, once in a process and those forked from it."""
    atexit.register(_end_crews)


def _end_crews() -> None:
    """End all threads, also of iterators that are gone.

    A thread that wants the interpreter's lock while the interpreter ends is killed where it stands (before Python
    3.14). In torch's C++ code that aborts the process, in a write to stderr it leaves a lock behind:
    https://github.com/python/cpython/issues/87135, https://github.com/python/cpython/issues/129536.
    """
    crews = [crew for ref in _crews.keyrefs() if (crew := ref()) is not None]
    for crew in crews:
        crew.stop_at_exit()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for crew in crews:
        crew.end_at_exit(deadline)


def _engine_error(whose: str, cause: BaseException | None) -> EngineError:
    error = EngineError(f"{whose} thread failed{'' if cause is None else f': {cause!r}'}.")
    error.__cause__ = cause
    return error
