"""Tasks: coroutines that pull jobs from a queue on the loop, for datasets that are awaited."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from aioload.engine.portal import Portal
from aioload.stats import Ledger

AsyncJob: TypeAlias = "tuple[Callable[[Any, Any], Awaitable[None]], Any, Any]"
"""A coroutine function and its two arguments. It must not raise, unless the pool is closed: errors belong to a batch.
"""


class TaskPool:
    """``size`` tasks over one queue of jobs, all on the portal's loop; each job's tally is ``tally``.

    Args:
        size: Number of tasks.
        portal: The loop, in use.
        ledger: Where the tally is kept.
        on_crash: Told of an exception from a job that broke its promise.
    """

    def __init__(self, size: int, portal: Portal, ledger: Ledger, on_crash: Callable[[BaseException], None]) -> None:
        self.size = size
        self.tally = ledger.open()
        self.closed = False
        self._portal, self._ledger, self._on_crash = portal, ledger, on_crash
        self._queue: deque[AsyncJob] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        portal.call(self._start)

    def submit(self, jobs: Iterable[AsyncJob]) -> None:
        """Queue jobs behind those there are. Any thread."""
        self._portal.call(self._accept, list(jobs))

    def close(self) -> None:
        """Drop the queued jobs and cancel the running ones. Any thread; never waits."""
        self.closed = True
        self._queue.clear()
        self._portal.call(self._cancel)

    def _start(self) -> None:
        if not self.closed:
            self._tasks = [self._portal.spawn(self._pull()) for _ in range(self.size)]

    def _accept(self, jobs: list[AsyncJob]) -> None:
        if self.closed:
            return
        self._queue.extend(jobs)
        for _ in range(min(len(jobs), len(self._idle))):
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)

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
        try:
            function, batch, position = self._queue.popleft()
        except IndexError:
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle
        else:
            await function(batch, position)
