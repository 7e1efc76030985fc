"""Rhythm: how long the consumers of one pass wait for batches, and how long their steps are."""

import time

from aioload.engine.demand import Demand
from aioload.stats import Tally

_QUICK_S = 2e-4
"""A step that is shorter has little to lose from what other threads do meanwhile."""


class Rhythm:
    """Waits and steps of consumers. They call it from their threads; none waits for another.

    Args:
        tally: Where waits are counted.
        demand: Who decides by them how much is loaded, if anybody.

    Attributes:
        is_quick: Whether the latest step was no step to speak of.
    """

    def __init__(self, tally: Tally, demand: Demand | None) -> None:
        self.is_quick = False
        self._tally, self._demand = tally, demand
        self._step_began_s = 0.0
        self._starved_since_s: float | None = None  # when a consumer first found nothing, since the latest batch

    def __repr__(self) -> str:
        return f"<Rhythm {'quick' if self.is_quick else 'steady'}>"

    def begin_step(self) -> None:
        """Note that a consumer is about to get a batch."""
        self._step_began_s = time.perf_counter()

    def end_step(self) -> None:
        """Note that it is back, for another."""
        if self._step_began_s:
            step_s, self._step_began_s = time.perf_counter() - self._step_began_s, 0.0
            self.is_quick = step_s < _QUICK_S
            if self._demand is not None:
                self._demand.note_step(step_s)

    def begin_wait(self) -> tuple[object, float]:
        """Note that there is no batch yet; return what :meth:`end_wait` needs: the second is when it began."""
        started_s = time.perf_counter()
        return None if self._demand is None else self._demand.begin_wait(started_s), started_s

    def end_wait(self, wait: tuple[object, float]) -> None:
        """Note that it waits no longer."""
        token, started_s = wait
        now_s = time.perf_counter()
        waited_s = now_s - started_s
        self._tally.wait_s += waited_s
        if self._demand is not None:
            self._demand.end_wait(token, now_s)

    def starved_s(self) -> float:
        """Return how long ago a consumer first asked this and there was nothing, since the latest batch."""
        now_s = time.perf_counter()
        if self._starved_since_s is None:
            self._starved_since_s = now_s
        return now_s - self._starved_since_s

    def feed(self) -> None:
        """Note that there was a batch."""
        self._starved_since_s = None
