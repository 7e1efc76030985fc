"""Demand: how long consumers wait for batches, and how long they take between one and asking for the next."""

from collections import deque

MAX_STEPS = 1000
"""Steps kept until somebody asks for them; of more, the latest."""


class Demand:
    """What consumers do, for those who decide how much to load. Any thread may call any method; none waits."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._waiting: dict[object, float] = {}  # since when
        self._steps: deque[float] = deque(maxlen=MAX_STEPS)

    def begin_wait(self, now_s: float) -> object:
        """Note that a consumer waits; return what :meth:`end_wait` needs."""
        wait = object()
        self._waiting[wait] = now_s
        return wait

    def end_wait(self, wait: object, now_s: float) -> None:
        """Note that it waits no longer."""
        self._waited_s += now_s - self._waiting.pop(wait, now_s)

    def note_step(self, step_s: float) -> None:
        """Note what a consumer took between one batch and asking for the next."""
        self._steps.append(step_s)

    def waited_s(self, now_s: float) -> float:
        """Return the seconds waited so far, those who wait still included."""
        return self._waited_s + sum(max(0.0, now_s - since_s) for since_s in list(self._waiting.values()))

    def take_steps(self) -> list[float]:
        """Return the steps since this was called last, and forget them."""
        steps = []
        while self._steps:
            steps.append(self._steps.popleft())
        return steps
