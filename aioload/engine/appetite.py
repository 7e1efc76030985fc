"""Appetite: what a consumer in another process does, as far as can be seen from when batches are finished and taken."""

import threading
import time

from aioload.engine.demand import Demand


class Appetite:
    """Tells a :class:`~aioload.engine.demand.Demand` that the consumer waits while nothing is there that it could take.

    Args:
        demand: Who wants to know.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._lock = threading.Lock()
        self._num_ready = 0
        self._wait: object | None = None
        self._taken_s: float | None = None  # when it took a batch and left others
        self._ended = False

    def __repr__(self) -> str:
        return f"<Appetite {self._num_ready} ready>"

    def begin(self) -> None:
        """Note that batches are wanted from now on."""
        with self._lock:
            self._look(time.perf_counter())

    def note_done(self) -> None:
        """Note that a batch is there. Any thread."""
        with self._lock:
            self._num_ready += 1
            self._look(time.perf_counter())

    def note_taken(self) -> None:
        """Note that a batch has been taken."""
        now_s = time.perf_counter()
        with self._lock:
            if self._taken_s is not None:
                self._demand.note_step(now_s - self._taken_s)
            self._num_ready -= 1
            self._taken_s = now_s if self._num_ready > 0 else None
            self._look(now_s)

    def end(self) -> None:
        """Note that no more batches are wanted."""
        with self._lock:
            self._ended = True
            self._look(time.perf_counter())

    def _look(self, now_s: float) -> None:
        waits = self._num_ready <= 0 and not self._ended
        if waits and self._wait is None:
            self._wait = self._demand.begin_wait(now_s)
        elif not waits and self._wait is not None:
            wait, self._wait = self._wait, None
            self._demand.end_wait(wait, now_s)
