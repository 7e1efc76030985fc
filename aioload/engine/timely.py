"""Timely: calls of an async reader that are raced or given up when they last too long, as the policy says."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aioload.engine.pace import Pace
from aioload.errors import read_timeout
from aioload.readers.policy import ReadPolicy
from aioload.stats import Tally


class TimelyReads:
    """How the fetcher of one pass awaits reads where the policy has a time-out, or hedges. On one loop.

    Args:
        read: The reader's coroutine function.
        policy: What is done about reads that last long.
        pace: What the loader's reads have shown.
        tally: Where it is counted how many were raced and given up.
    """

    def __init__(self, read: Callable[[Any], Awaitable[Any]], policy: ReadPolicy, pace: Pace, tally: Tally) -> None:
        self._read_once, self._pace, self._tally = read, pace, tally
        self._timeout_s, self._hedge = policy.timeout_s, policy.hedge_or_none
        self._losers: set[asyncio.Task[Any]] = set()  # the loop itself holds tasks weakly

    async def read(self, location: Any) -> Any:
        """Return what is at ``location``.

        Raises:
            ReadTimeoutError: It has lasted too long.
            Exception: As the reader.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                return await self._read(location)
        except TimeoutError:
            if not timeout.expired():  # the reader's own
                raise
        assert self._timeout_s is not None
        self._tally.read_timeouts += 1
        raise read_timeout(location, self._timeout_s)

    async def _read(self, location: Any) -> Any:
        if self._hedge is None:
            return await self._read_once(location)
        quantile_s = self._pace.quantile_s(self._hedge.quantile)
        if quantile_s is None:
            return await self._noted(location)
        return await self._raced(location, self._hedge.delay_s(quantile_s), self._hedge.max_share)

    async def _noted(self, location: Any) -> Any:
        started = time.perf_counter()
        data = await self._read_once(location)
        self._pace.note(time.perf_counter() - started)
        return data

    async def _raced(self, location: Any, delay_s: float, max_share: float) -> Any:
        first = asyncio.create_task(self._noted(location))
        runners = [first]
        try:
            await asyncio.wait(runners, timeout=delay_s)
            if not first.done() and self._pace.take(max_share):
                self._tally.hedges += 1
                runners.append(asyncio.create_task(self._noted(location)))
                await asyncio.wait(runners, return_when=asyncio.FIRST_COMPLETED)
                if any(runner.done() and _failed(runner) for runner in runners):
                    await asyncio.wait(runners)  # the other may still succeed
            good = [runner for runner in runners if runner.done() and not _failed(runner)]
            winner = (good or runners)[0]
            self._tally.hedges_won += winner is not first
            return await winner
        finally:
            for runner in runners:
                self._let_go(runner)

    def _let_go(self, runner: "asyncio.Task[Any]") -> None:
        if not runner.done():
            runner.cancel()
            self._losers.add(runner)
            runner.add_done_callback(self._losers.discard)
        runner.add_done_callback(_retrieve)


def _failed(runner: "asyncio.Task[Any]") -> bool:
    return runner.cancelled() or runner.exception() is not None


def _retrieve(runner: "asyncio.Task[Any]") -> None:
    """Have asyncio not report an error that nobody waits for."""
    if not runner.cancelled():
        runner.exception()
