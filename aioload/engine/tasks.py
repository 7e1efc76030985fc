"""Tasks: coroutines that pull jobs from a queue on the loop, for datasets that are awaited."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from aioload.engine.portal import Portal
from aioload.stats import Ledger

AsyncJob: TypeAlias = "tuple[Callable[[Any, Any], Awaitable[None]], Any, Any]"
"""A coroutine function and its two arguments. It must not raise: errors belong to a batch."""


class TaskPool:
    """``size`` tasks over one queue of jobs, all on the portal's loop; each job's tally is ``tally``."""

    def __init__(self, size: int, portal: Portal, ledger: Ledger) -> None:
        self.size = size
        self.tally = ledger.open()
        self._portal, self._ledger = portal, ledger
        self._queue: deque[AsyncJob] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        portal.call(self._start)

    def submit(self, jobs: Iterable[AsyncJob]) -> None:
        """Queue jobs behind those there are. Any thread."""
        self._portal.call(self._accept, list(jobs))

    def close(self) -> None:
        """Drop the queued jobs and cancel the running ones. Any thread; never waits."""
        self._portal.call(self._cancel)

    def _start(self) -> None:
        self._tasks = [self._portal.spawn(self._pull()) for _ in range(self.size)]

    def _accept(self, jobs: list[AsyncJob]) -> None:
        self._queue.extend(jobs)
        for _ in range(min(len(jobs), len(self._idle))):
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)

    def _cancel(self) -> None:
        self._closed = True
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._ledger.close(self.tally)

    async def _pull(self) -> None:
        while not self._closed:
            if not self._queue:
                idle = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                await idle
                continue
            function, batch, position = self._queue.popleft()
            await function(batch, position)
            del batch
