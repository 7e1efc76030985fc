"""Patience: what a consumer does as its wait grows longer."""

import logging
import threading
from collections.abc import Callable, Sequence

from aioload.engine.batch import Batch
from aioload.engine.settings import Settings
from aioload.errors import LoaderTimeoutError

logger = logging.getLogger("aioload")

WIDEN_AFTER_S = 0.010
"""A consumer that has waited this long, or twice as long as when it last did, makes sure that no thread sleeps
while reads are stuck."""


class Patience:
    """Actions at given lengths of one wait."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Callable[[], None], bool]] = []

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        """Have ``action`` done, once, when the wait has lasted ``after_s`` seconds."""
        self._add(after_s, action, again=False)

    def at_each_doubling(self, after_s: float, action: Callable[[], None]) -> None:
        """Have ``action`` done when the wait has lasted ``after_s`` seconds, and each time it is twice as long."""
        self._add(after_s, action, again=True)

    def wait_s(self, elapsed_s: float) -> float | None:
        """Do what is due and return the seconds to sleep until the next action, ``None`` if there is none."""
        while self._events and self._events[0][0] <= elapsed_s:
            after_s, action, again = self._events.pop(0)
            if again:
                self._add(2 * after_s, action, again=True)
            action()
        # The system refuses to sleep longer.
        return min(self._events[0][0] - elapsed_s, threading.TIMEOUT_MAX) if self._events else None

    def _add(self, after_s: float, action: Callable[[], None], *, again: bool) -> None:
        self._events.append((after_s, action, again))
        self._events.sort(key=lambda event: event[0])


def patience_for(
    settings: Settings,
    *,
    widen: Callable[[], None] | None,
    waited_for: Callable[[], tuple[Batch | None, Sequence[int]]],
) -> Patience:
    """Return the patience of a consumer.

    Args:
        settings: After how long it logs what it waits for, and after how long it gives up.
        widen: Lets every thread work if jobs wait and none gets done; ``None`` where there is but one.
        waited_for: Returns the batch that it waits for, and the positions of the samples that this lacks, or that are
            being loaded, as far as one knows.

    Raises:
        LoaderTimeoutError: From ``wait_s``, after ``settings.timeout_s`` seconds.
    """

    def log() -> None:
        message = "A batch has been loading for %.3g s; still waiting for %s."
        logger.warning(message, settings.slow_after_s, _names(*waited_for()))

    def give_up() -> None:
        message = f"DataLoader timed out after {settings.timeout_s} seconds, waiting for {_names(*waited_for())}."
        raise LoaderTimeoutError(message)

    patience = Patience()
    if widen is not None:
        patience.at_each_doubling(WIDEN_AFTER_S, widen)
    patience.at(settings.slow_after_s, log)
    if settings.timeout_s > 0:
        patience.at(settings.timeout_s, give_up)
    return patience


def _names(batch: Batch | None, positions: Sequence[int]) -> str:
    if batch is None:
        return "its first indices"
    names = [batch.describe(position) for position in positions[:4]]
    more = f" and {len(positions) - 4} more" if len(positions) > 4 else ""
    return f"batch {batch.number}: {', '.join(names) or 'its collation'}{more}"
