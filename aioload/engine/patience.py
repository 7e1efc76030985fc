"""Patience: what a consumer does as its wait grows longer."""

from collections.abc import Callable


class Patience:
    """Actions at given lengths of one wait, each done once."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Callable[[], None]]] = []

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        """Have ``action`` done when the wait has lasted ``after_s`` seconds."""
        self._events.append((after_s, action))
        self._events.sort(key=lambda event: event[0])

    def wait_s(self, elapsed_s: float) -> float | None:
        """Do what is due and return the seconds to sleep until the next action, ``None`` if there is none."""
        while self._events and self._events[0][0] <= elapsed_s:
            self._events.pop(0)[1]()
        return self._events[0][0] - elapsed_s if self._events else None
