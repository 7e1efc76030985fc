"""Tasks: coroutines that pull jobs from a queue on the loop, for datasets that are awaited."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from aioload.engine import tuner
from aioload.engine.portal import Portal
from aioload.engine.regulator import Regulator
from aioload.stats import Ledger

AsyncJob: TypeAlias = "tuple[Callable[[Any, Any], Awaitable[None]], Any, Any]"
"""A coroutine function and its two arguments. It must not raise, unless the pool is closed: errors belong to a batch.
"""


class TaskPool:
    """Up to ``size`` tasks over one queue of jobs, all on the portal's loop; each job's tally is ``tally``.

    Args:
        size: Number of tasks. Each is started when it is first of use.
        portal: The loop, in use.
        ledger: Where the tally is kept.
        on_crash: Told of an exception from a job that broke its promise.
        regulator: Bounds the tasks that work at once, below ``size``; ``None`` for no such bound.
    """

    def __init__(
        self,
        size: int,
        portal: Portal,
        ledger: Ledger,
        on_crash: Callable[[BaseException], None],
        regulator: Regulator | None = None,
    ) -> None:
        self.size, self._regulator = size, regulator
        self.limit = size if regulator is None else min(size, regulator.limit)
        """Tasks that may be at work."""
        self.tally = ledger.open()
        self.closed = False
        self._portal, self._ledger, self._on_crash = portal, ledger, on_crash
        self._queue: deque[AsyncJob] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._num_working = self._num_jobs = 0
        self._jobs_s = self._window_started = 0.0
        self._saturated = True

    def submit(self, jobs: Iterable[AsyncJob]) -> None:
        """Queue jobs behind those there are. Any thread."""
        self._portal.call(self._accept, list(jobs))

    def close(self) -> None:
        """Drop the queued jobs and cancel the running ones. Any thread; never waits."""
        self.closed = True
        self._queue.clear()
        self._portal.call(self._cancel)

    def _accept(self, jobs: list[AsyncJob]) -> None:
        if self.closed:
            return
        self._queue.extend(jobs)
        self._wake(len(jobs))

    def _wake(self, wanted: int) -> None:
        for _ in range(min(wanted, self.limit - self._num_working)):
            self._num_working += 1
            while self._idle:
                idle = self._idle.pop()
                if not idle.done():
                    idle.set_result(None)
                    break
            else:
                self._tasks.append(self._portal.spawn(self._pull()))

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._ledger.close(self.tally)

    async def _pull(self) -> None:
        while not self.closed:
            try:
                await self._pull_one()
            except asyncio.CancelledError:
                # While we are open it is the dataset that has cancelled the task it ran in; its jobs are settled.
                if self.closed:
                    raise
            except BaseException as exc:
                self._on_crash(exc)

    async def _pull_one(self) -> None:
        if not self._queue or self._num_working > self.limit:
            await self._rest()
            return
        function, batch, position = self._queue.popleft()
        if self._regulator is None:
            await function(batch, position)
            return
        started = time.perf_counter()
        try:
            await function(batch, position)
        finally:
            ended = time.perf_counter()
            self._num_jobs += 1
            self._jobs_s += ended - started
            if ended - self._window_started >= tuner.MAX_WINDOW_S:
                self._regulate(self._regulator, ended)

    async def _rest(self) -> None:
        self._saturated = self._saturated and bool(self._queue)
        self._num_working -= 1
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        try:
            await idle  # who ends it has counted us
        except asyncio.CancelledError:
            if not idle.done() or idle.cancelled():
                self._num_working += 1
            raise

    def _begin_window(self, now_s: float) -> None:
        self._num_jobs, self._jobs_s, self._saturated, self._window_started = 0, 0.0, True, now_s

    def _regulate(self, regulator: Regulator, now_s: float) -> None:
        mean_job_s, elapsed_s = self._jobs_s / self._num_jobs, now_s - self._window_started
        window = tuner.Window(self._num_jobs, elapsed_s, mean_job_s, self._saturated)
        if self._window_started > 0 and regulator.note(window, now_s):
            self.limit = min(self.size, regulator.limit)
            self._wake(len(self._queue))
        self._begin_window(now_s)
