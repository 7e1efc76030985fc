"""Hedge: when a read that lasts long gets a second one beside it, and how many of those there may be."""

from dataclasses import dataclass
from typing import Any

from aioload.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Hedge:
    """When a slow read is raced by a second read of the same location; the first to succeed counts.

    That is after ``factor`` times as long as the share ``quantile`` of the latest reads took, and not before forty
    reads have shown how long that is. A blocking read cannot be called back: it keeps its thread until it ends, and
    another works in its place meanwhile. An async one is cancelled.

    Attributes:
        quantile: Share of the latest reads, between 0 and 1, that must have been quicker than the base of the delay.
        factor: How many times as long as that a read must have lasted, from 1 up.
        min_delay_s: The shortest delay, in seconds: below, a second read would cost more than it brings.
        max_share: Second reads there may be for each read, above 0 and up to 1.

    Raises:
        ArgumentError: A value cannot work.
    """

    quantile: float = 0.95
    factor: float = 2.0
    min_delay_s: float = 0.01
    max_share: float = 0.05

    def __post_init__(self) -> None:
        _check("quantile", self.quantile, "between 0 and 1", lambda value: 0 < value < 1)
        _check("factor", self.factor, "from 1 up", lambda value: 1 <= value < float("inf"))
        _check("min_delay_s", self.min_delay_s, "of seconds from 0 up", lambda value: 0 <= value < float("inf"))
        _check("max_share", self.max_share, "above 0 and up to 1", lambda value: 0 < value <= 1)

    def delay_s(self, quantile_s: float) -> float:
        """Return after how many seconds a read is raced, if reads take ``quantile_s`` or less as a rule."""
        return max(self.min_delay_s, self.factor * quantile_s)


def _check(name: str, value: Any, what: str, is_good: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_good(value):
        message = f"{name} must be a number {what}; got {value!r}."
        raise ArgumentError(message)


def hedge_or_none(hedge: Any) -> Hedge | None:
    """Return a policy's hedge: the default one for ``True``, none for ``None`` and ``False``.

    Raises:
        ArgumentError: It is something else.
    """
    if hedge is None or hedge is False:
        return None
    if hedge is True:
        return Hedge()
    if isinstance(hedge, Hedge):
        return hedge
    message = f"hedge must be True, False or a Hedge; got {hedge!r}."
    raise ArgumentError(message)
