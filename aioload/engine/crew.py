"""Crew: the threads, tasks and loop that runs work with, started together and stopped together."""

import asyncio
import os
import time
import weakref
from collections.abc import Callable

from aioload.engine.pools import STUCK_AFTER_S, ThreadPool
from aioload.engine.portal import Portal
from aioload.engine.run import Run
from aioload.engine.source import Kind
from aioload.engine.tasks import TaskPool
from aioload.errors import EngineError, ErrorContext, annotate
from aioload.stats import Ledger


class Crew:
    """The workers of one pass, or of all passes where workers are persistent.

    Args:
        kind: The kind of dataset: it decides what is needed beside the decode pool.
        num_workers: Decode threads.
        num_concurrent_reads: Read threads, or tasks for an async dataset.
        worker_init_fn: Called with its number in each decode thread before its first job.
        portal: The loop; the crew counts as one user of it.
        ledger: Where the threads' tallies are kept.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        num_workers: int,
        num_concurrent_reads: int,
        worker_init_fn: Callable[[int], None] | None,
        portal: Portal,
        ledger: Ledger,
    ) -> None:
        self.portal = portal
        # A decode that runs on a read thread would run where worker_init_fn has not been called.
        self.may_inline = worker_init_fn is None
        self._pid = os.getpid()
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._closed = False
        self._crashed: BaseException | None = None
        portal.acquire()
        self.reads: ThreadPool | None = None
        self.tasks: TaskPool | None = None
        if kind is Kind.STAGED:
            self.reads = ThreadPool("read", num_concurrent_reads, ledger, awake=1, on_crash=self._crash)
        elif kind is Kind.ASYNC:
            self.tasks = TaskPool(num_concurrent_reads, portal, ledger)
        self.decode = ThreadPool(
            "decode", num_workers, ledger, awake=num_workers, on_start=worker_init_fn, on_crash=self._crash
        )

    def __repr__(self) -> str:
        return f"<Crew {'closed ' if self._closed else ''}{self.reads or self.tasks} {self.decode} {self.portal}>"

    @property
    def reads_limit(self) -> int:
        """Reads that may be under way at present."""
        if self._closed:
            return 0
        pool = self.reads or self.tasks or self.decode
        return pool.limit if isinstance(pool, ThreadPool) else pool.size

    @property
    def crashed(self) -> bool:
        """Whether a thread could not go on."""
        return self._crashed is not None

    def attach(self, run: Run) -> None:
        """Have ``run`` told if the crew breaks."""
        self._runs.add(run)
        if self._crashed is not None:
            run.break_(self._crashed)

    def begin(self) -> None:
        """See to it, in a few milliseconds, that a first read that takes long does not keep others waiting."""
        self.portal.call(self._watch_first_jobs)

    def widen_if_stuck(self) -> None:
        """Let every thread work where jobs wait and none gets done."""
        if self.reads is not None:
            self.reads.widen_if_stuck()
        self.decode.widen_if_stuck()

    def _watch_first_jobs(self) -> None:
        asyncio.get_running_loop().call_later(STUCK_AFTER_S, self.widen_if_stuck)

    def close(self) -> None:
        """Let each thread end after the job it is on. Takes no lock of its own and never waits."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self.reads is not None:
            self.reads.close()
        if self.tasks is not None:
            self.tasks.close()
        self.decode.close()
        self.portal.release()

    def join(self, timeout_s: float) -> None:
        """Wait until all threads have ended, at most ``timeout_s``: one may be stuck in a read for ever."""
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout_s
        if self.reads is not None:
            self.reads.join(deadline)
        self.decode.join(deadline)
        self.portal.join(deadline)

    def _crash(self, exc: BaseException, at_start: bool) -> None:
        if at_start:
            annotate(exc, ErrorContext(None, None, "worker_init_fn"))
        else:
            error = EngineError(f"A worker thread failed: {exc!r}.")
            error.__cause__ = exc
            exc = error
        self._crashed = exc
        for run in list(self._runs):
            self.portal.call(run.break_, exc)
