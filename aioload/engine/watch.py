"""Watch: what is done, by the loop, about reads of a pool that last long."""

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any, Protocol

from aioload.context import HERE, Stage
from aioload.engine.batch import Batch
from aioload.engine.fetchers import settle
from aioload.engine.pace import Pace
from aioload.engine.pools import ThreadPool, Worker
from aioload.engine.race import Attempt, Race
from aioload.errors import ReadTimeoutError
from aioload.stats import Tally

_UNDECIDED_S = 0.05
"""The watch looks again after so long where nothing says when: too few reads have been seen, or none more may be raced.
"""

_LEAST_S = 0.002


class Owner(Protocol):
    """Who reads, and says what is slow; see :mod:`aioload.engine.watched`."""

    timeout_s: float | None

    def delay_s(self) -> float | None:
        """Return how long a read may last before it is raced, ``None`` for any time."""
        ...

    def may_race(self) -> bool:
        """Whether one more read may be raced; if so, that is counted."""
        ...

    def race(self, race: Race) -> None:
        """Start a second attempt, which has entered the race."""
        ...

    def time_out(self, race: Race, *, is_replaced: bool) -> None:
        """Go on without an attempt that has been given up; ``is_replaced``: a thread works in its thread's place."""
        ...


class Watch:
    """Looks after the reads of a pool: each that lasts too long is raced, or given up.

    It sleeps until the first moment at which one could be due, and for good while the pool has nothing to do. All but
    :meth:`arm` and :meth:`close`, which any thread may call, happens on the loop.

    Args:
        reads: The pool.
        decode: Another pool, for what may not be done on the loop.
        call: Has the loop call a function.
        pace: What the loader's reads have shown.
        tally: Where it is counted how many were raced and given up. It is not the watch's own: closing that would take
            a lock, in the middle of which an interrupt may come.
    """

    def __init__(
        self,
        reads: ThreadPool,
        decode: ThreadPool,
        call: Callable[[Callable[[], None]], bool],
        pace: Pace,
        tally: Tally,
    ) -> None:
        self.pace, self.tally = pace, tally
        self._reads, self._decode, self._call = reads, decode, call
        self._is_armed = self._is_closed = False

    def arm(self) -> None:
        """Watch from now on, if it does not: there is something to read."""
        if not self._is_armed:
            self._is_armed = True
            self._call(self._look)

    def close(self) -> None:
        """Look no more."""
        self._is_closed = True

    def _look(self) -> None:
        if self._is_closed:
            return
        if self._reads.is_idle():
            self._is_armed = False
            if self._reads.is_idle():  # else jobs have come before it was said that nobody watches
                return
            self._is_armed = True
        now_s = time.perf_counter()
        self._reads.widen_if_stuck()  # perhaps nobody waits for a batch just now
        self._fail_what_nobody_can_read()
        next_s = min((self._look_at(worker, now_s) for worker in self._reads.workers), default=now_s + _UNDECIDED_S)
        asyncio.get_running_loop().call_later(max(_LEAST_S, next_s - now_s), self._look)

    def _look_at(self, worker: Worker, now_s: float) -> float:
        """Do what is due about a worker's read; return when to look again."""
        attempt: Attempt | None = worker.attempt
        if attempt is None or attempt.is_given_up:
            return now_s + _UNDECIDED_S
        owner: Owner = attempt.race.owner
        timeout_s, delay_s = owner.timeout_s, owner.delay_s()
        age_s, wait_s = now_s - attempt.started_s, _UNDECIDED_S
        if timeout_s is not None:
            if age_s >= timeout_s:
                self._give_up(worker, attempt, owner)
                return now_s + _UNDECIDED_S
            wait_s = min(wait_s, timeout_s - age_s)
        if delay_s is not None and not attempt.race.is_hedged:
            if age_s < delay_s:
                wait_s = min(wait_s, delay_s - age_s)
            elif self._reads.num_spare_left > 0 and owner.may_race() and attempt.race.enter():
                attempt.race.is_hedged = True
                self._set_aside(worker, attempt)
                self.tally.hedges += 1
                owner.race(attempt.race)
        return now_s + wait_s

    def _give_up(self, worker: Worker, attempt: Attempt, owner: Owner) -> None:
        if not attempt.race.give_up(attempt):
            return
        self.tally.read_timeouts += 1
        is_replaced = attempt.is_set_aside or self._reads.num_spare_left > 0
        if is_replaced:
            self._set_aside(worker, attempt)
        owner.time_out(attempt.race, is_replaced=is_replaced)

    def _fail_what_nobody_can_read(self) -> None:
        attempts = [worker.attempt for worker in self._reads.workers]
        num_lost = sum(attempt is not None and attempt.is_given_up for attempt in attempts)
        if self._reads.num_spare_left > 0 or num_lost < self._reads.num_spare + self._reads.limit:
            return
        jobs = [(_fail_unread, *rest) for _, *rest in self._reads.take_queued()]
        self._decode.submit(jobs, len(jobs))

    def _set_aside(self, worker: Worker, attempt: Attempt) -> None:
        if attempt.race.set_aside(attempt):
            self._reads.set_aside()


def _fail_unread(worker: Worker, batch: Batch, position: int, race_or_granted: Any) -> None:
    """Settle a sample whose read no thread is left to begin: the first, for which bytes may be granted, or another."""
    if isinstance(race_or_granted, tuple):
        race = race_or_granted[0]
        if not race.leave():
            return
        race.give_back()
    elif race_or_granted:
        batch.claim.give_raw(race_or_granted)
    context = batch.recipe.context
    HERE.set([context, batch.indices[position], Stage.LOCATION, worker.number % context.num_workers, None])
    exc = ReadTimeoutError(errno.ETIMEDOUT, "All threads that read are stuck in reads that the storage does not answer")
    settle(batch, batch.fail(position, exc, "read"), worker)
