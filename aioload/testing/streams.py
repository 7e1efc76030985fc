"""Streams of a simulated device: what is to be done there in a certain order, by and by."""

from collections import deque
from collections.abc import Callable

import torch


class SimulatedEvent:
    """A place on a stream of a :class:`~aioload.testing.SimulatedDevice`.

    Args:
        come: Called when somebody asks for it.
        wait: Returns when the event it is given has passed.
    """

    def __init__(self, come: Callable[[str], None], wait: Callable[["SimulatedEvent"], None]) -> None:
        self._come, self._wait = come, wait
        self.has_passed = False

    def query(self) -> bool:
        """Return whether it has passed."""
        self._come("query")
        return self.has_passed

    def synchronize(self) -> None:
        """Return when it has passed.

        Raises:
            AssertionError: It took longer than :data:`~aioload.testing.DEADLINE_S`.
        """
        self._wait(self)

    def settle(self) -> None:
        """Let it pass."""
        self.has_passed = True


class Operation:
    """Something to be done on a stream, once an event, if any, has passed."""

    def __init__(self, function: Callable[[], object], event: SimulatedEvent | None = None) -> None:
        self.function, self.event = function, event


class SimulatedStream:
    """Operations of a device, the first of which is the next to be done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending: deque[Operation] = deque()

    def __repr__(self) -> str:
        return f"<SimulatedStream {self.number} pending={len(self.pending)}>"

    @property
    def can_run(self) -> bool:
        """Whether there is something to do that need not wait for another stream."""
        return bool(self.pending) and (self.pending[0].event is None or self.pending[0].event.has_passed)


class Reading:
    """What a stream found in a tensor when it came to read it."""

    def __init__(self) -> None:
        self._value: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether the stream has been there."""
        return self._value is not None

    @property
    def value(self) -> torch.Tensor:
        """A tensor of its own. There must be one."""
        assert self._value is not None, "The stream has not come to it yet."
        return self._value

    def settle(self, value: torch.Tensor) -> None:
        """Note what the stream found."""
        self._value = value
