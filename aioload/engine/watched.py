"""Watched: reads on a pool's threads that are tried again, raced or given up, as the policy says."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from aioload.engine.pools import ThreadPool, Worker
from aioload.engine.race import Attempt, Overtaken, Race
from aioload.engine.watch import Watch
from aioload.errors import read_timeout
from aioload.readers.policy import ReadPolicy, Tries

Again: TypeAlias = "Callable[[Worker, Any, int, tuple[Race, float]], None]"
"""A job that reads a sample once more, as part of a race, after a pause in seconds."""


class WatchedReads:
    """How the fetcher of one pass reads where the policy has a time-out, or hedges.

    Args:
        read: The reader's function.
        policy: What is done about reads that fail or last long.
        reads: The threads.
        watch: Looks after them.
        again: Reads a sample once more.
        fail: Settles the sample of a race in which it could not be read, from any thread.
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        policy: ReadPolicy,
        reads: ThreadPool,
        watch: Watch,
        *,
        again: Again,
        fail: Callable[[Race, BaseException], None],
    ) -> None:
        self._read, self._policy, self._reads, self._watch = read, policy, reads, watch
        self._again, self._fail = again, fail
        self._pace, self._hedge = watch.pace, policy.hedge_or_none
        self.timeout_s = policy.timeout_s

    def begin(self, batch: Any, position: int, location: Any, claimed: int) -> Race:
        """Return the race of one sample's read, which the caller is to run in.

        Args:
            batch: The sample's batch.
            position: Its position there.
            location: What is read.
            claimed: Bytes that have been counted for it.
        """
        return Race(self, batch, position, location, Tries(self._policy), claimed)

    def run(self, worker: Worker, race: Race) -> Any:
        """Return what is at the race's location. Blocks, in a thread of the pool.

        Raises:
            Overtaken: The caller is not the one to settle the sample.
            Exception: It cannot be read.
        """
        while True:
            attempt = worker.attempt = Attempt(race, time.perf_counter())
            try:
                data = self._read(race.location)
            except Exception as exc:
                self._end(worker, attempt)
                pause_s = self._next_pause_s(race, attempt, exc)
                if not self._pause(worker, pause_s):
                    raise
            except BaseException:
                self._end(worker, attempt)
                if race.win():
                    raise
                raise Overtaken from None
            else:
                self._end(worker, attempt)
                self._pace.note(time.perf_counter() - attempt.started_s)
                if race.win():
                    return data
                raise Overtaken

    def pause(self, worker: Worker, race: Race, seconds: float) -> None:
        """Wait before an attempt of a race that the caller takes up."""
        if seconds > 0 and not self._pause(worker, seconds):
            raise Overtaken

    def arm(self) -> None:
        """Have the reads that have been queued watched."""
        self._watch.arm()

    def _end(self, worker: Worker, attempt: Attempt) -> None:
        worker.attempt = None
        if attempt.race.end(attempt):
            self._reads.take_back()

    def _pause(self, worker: Worker, seconds: float) -> bool:
        worker.tally.retries += 1
        return self._reads.pause(seconds)

    def _next_pause_s(self, race: Race, attempt: Attempt, exc: Exception) -> float:
        if race.is_over or attempt.is_given_up:
            raise Overtaken from None
        try:
            return race.pause_s(exc)
        except Exception:
            if race.leave():
                raise
            raise Overtaken from None

    # What the watch asks for, on the loop.

    def delay_s(self) -> float | None:
        """Return how long a read may last before it is raced, ``None`` for any time."""
        if self._hedge is None:
            return None
        quantile_s = self._pace.quantile_s(self._hedge.quantile)
        return None if quantile_s is None else self._hedge.delay_s(quantile_s)

    def may_race(self) -> bool:
        """Whether one more read may be raced; if so, that is counted."""
        return self._hedge is not None and self._pace.take(self._hedge.max_share)

    def race(self, race: Race) -> None:
        """Start a second attempt, which has entered the race."""
        self._reads.resume([(self._again, race.batch, race.position, (race, 0.0))])

    def time_out(self, race: Race, *, is_replaced: bool) -> None:
        """Try again in place of an attempt that has been given up, or fail."""
        assert self.timeout_s is not None
        exc: BaseException = read_timeout(race.location, self.timeout_s)
        try:
            if is_replaced:
                pause_s = race.pause_s(exc)  # type: ignore[arg-type]
                self._reads.resume([(self._again, race.batch, race.position, (race, pause_s))])
                return
            with contextlib.suppress(Exception):
                num_stuck = self._reads.num_spare
                exc.add_note(f"{num_stuck} reads are stuck already, and no more threads are started in their places.")
        except Exception as other:  # no try is left
            exc = other
        if race.leave():
            self._fail(race, exc)
