"""Patience: what a consumer does as its wait grows longer."""

import threading
from collections.abc import Callable


class Patience:
    """Actions at given lengths of one wait."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Callable[[], None]]] = []

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        """Have ``action`` done, once, when the wait has lasted ``after_s`` seconds."""
        self._events.append((after_s, action))
        self._events.sort(key=lambda event: event[0])

    def at_each_doubling(self, after_s: float, action: Callable[[], None]) -> None:
        """Have ``action`` done when the wait has lasted ``after_s`` seconds, and each time it is twice as long."""

        def act() -> None:
            action()
            self.at_each_doubling(2 * after_s, action)

        self.at(after_s, act)

    def wait_s(self, elapsed_s: float) -> float | None:
        """Do what is due and return the seconds to sleep until the next action, ``None`` if there is none."""
        while self._events and self._events[0][0] <= elapsed_s:
            self._events.pop(0)[1]()
        # The system refuses to sleep longer.
        return min(self._events[0][0] - elapsed_s, threading.TIMEOUT_MAX) if self._events else None
