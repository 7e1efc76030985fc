"""A simulated device: streams that work when a test lets them, and memory that is reused as soon as it may be.

It stands where a GPU would, as the ``device`` of a loader or under a copier, and goes by the rules that
:class:`~aioload.device.DeviceBackend` has for any device. Its tensors are CPU tensors over memory of its own, in which
poison lies wherever nothing has been written yet, or not any more: who reads too early, or too late, reads that.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Self

import torch

from aioload.testing.gates import DEADLINE_S
from aioload.testing.memory import DeviceMemory, HostMemory
from aioload.testing.streams import Operation, Reading, SimulatedEvent, SimulatedStream


class SimulatedDevice:
    """A device without hardware: see :class:`~aioload.device.DeviceBackend`. Any thread may call any method.

    By default it does nothing until the test says :meth:`run` or :meth:`step`. With ``pace`` it goes on by itself, a
    few random operations on random streams whenever anything is asked of it, and as far as need be for a thread that
    waits; so nothing needs to be run, and the same calls have the same outcome.

    At the end of ``with`` it does all that is left, and from then on everything at once: so no thread waits for ever.

    Args:
        pace: Decides how far it goes at each call; ``None``: only the test does.
        poison: The byte in memory that holds nothing.

    Attributes:
        num_copies: Copies that have been asked for.
        num_copied: Copies that have been done.
        max_copying: The most that were asked for and not done at once.
    """

    def __init__(self, *, pace: random.Random | None = None, poison: int = 0xDB) -> None:
        self.device = torch.device("cpu")
        self.num_copies = self.num_copied = self.max_copying = 0
        self.default_stream = SimulatedStream(0)
        self.streams = [self.default_stream]
        self._pace, self._is_free = pace, False
        self._here = threading.local()  # the current stream of each thread
        # Re-entrant: what an operation does may drop the last reference to memory of the device.
        self._changed = threading.Condition(threading.RLock())
        self._memory, self._host = DeviceMemory(self._mark, poison), HostMemory()
        self._errors: dict[str, list[BaseException | None]] = {}
        self._num_waiting = 0

    def __repr__(self) -> str:
        return f"<SimulatedDevice {self.streams} blocks={self.num_blocks} in_use={self.num_blocks_in_use}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_free = True
        self.run()

    # For the test.

    @property
    def num_blocks(self) -> int:
        """Pieces of device memory that have been made; those that are free are used again."""
        return len(self._memory.blocks)

    @property
    def num_blocks_in_use(self) -> int:
        """Pieces of device memory that somebody refers to, or that a stream may still use."""
        with self._changed:
            self._memory.take_in()
            return self._memory.num_in_use

    @property
    def host_bytes(self) -> int:
        """Bytes of :meth:`host_memory` that are referred to."""
        return self._host.num_bytes

    @property
    def max_host_bytes(self) -> int:
        """The most bytes of :meth:`host_memory` that were referred to at once."""
        return self._host.max_bytes

    def step(self, stream: SimulatedStream) -> bool:
        """Do the next thing on ``stream``; ``False`` if there is none, or it has to wait for another stream."""
        with self._changed:
            self._memory.take_in()
            if not stream.can_run:
                return False
            operation = stream.pending.popleft()
            operation.function()
            self._memory.take_in()
            self._changed.notify_all()
            return True

    def run(self, stream: SimulatedStream | None = None) -> int:
        """Do all that can be done, on ``stream`` or on all; return how many operations that were."""
        with self._changed:
            self._memory.take_in()
            count = 0
            while runnable := [each for each in self.streams if each.can_run and stream in (None, each)]:
                count += self.step(runnable[0])
            return count

    def read(self, tensor: torch.Tensor) -> Reading:
        """Read ``tensor`` on the current stream, when that comes to it, as a kernel would.

        Nobody is kept by this from using its memory for something else: as on a device, it is for those who drop the
        last reference to see to that.
        """
        reading = Reading()
        with self._changed:
            look = self._memory.raw(tensor)
            self._issue(self.current_stream(), lambda: reading.settle(look().clone()))
        return reading

    def launch(self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like ``tensor``, which is ``function`` of it when the current stream has come to that."""
        stream = self.current_stream()
        with self._changed:
            look, made = self._memory.raw(tensor), self._memory.allocate(tensor, stream)
            put = self._memory.raw(made)
            self._issue(stream, lambda: put().copy_(function(look())))
        return made

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Make ``stream`` this thread's current one."""
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def fail(self, call: str, error: BaseException, *, after: int = 0) -> None:
        """Have the method ``call`` raise ``error``, once, when it has been called ``after`` times more.

        ``"copied"`` is a copy that has been issued, and ``"query"`` an event's.
        """
        with self._changed:
            self._errors.setdefault(call, []).extend([*[None] * after, error])

    def wait_num_copies(self, count: int) -> None:
        """Wait until ``count`` copies have been asked for.

        Raises:
            AssertionError: It took longer than :data:`~aioload.testing.gates.DEADLINE_S`; so in all that wait.
        """
        self._wait(lambda: self.num_copies >= count, f"{count} copies")

    def wait_waiting(self) -> None:
        """Wait until a thread sleeps in ``synchronize`` of an event."""
        self._wait(lambda: self._num_waiting > 0, "somebody to wait for an event")

    # For the code under test.

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory of the host that copies are made from when a stream comes to them."""
        self._come("host_memory")
        with self._changed:
            return self._host.allocate(num_bytes)

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Have copies from other memory made when a stream comes to them; return what undoes that.

        Nothing keeps the memory until then. To undo it too early is an :class:`AssertionError`.
        """
        self._come("page_lock")
        with self._changed:
            return self._host.lock(memory)

    def new_stream(self) -> SimulatedStream:
        """Return a stream beside all others."""
        self._come("new_stream")
        with self._changed:
            stream = SimulatedStream(len(self.streams))
            self.streams.append(stream)
        return stream

    def current_stream(self) -> SimulatedStream:
        """Return the calling thread's current stream."""
        stream: SimulatedStream = getattr(self._here, "stream", self.default_stream)
        return stream

    def copy(self, tensor: torch.Tensor, stream: SimulatedStream | None = None) -> torch.Tensor:
        """Return a tensor into which ``tensor`` is copied when ``stream``, or the current one, comes to it."""
        self._come("copy")
        stream = self.current_stream() if stream is None else stream
        with self._changed:
            if self._memory.holds(tensor):
                return tensor
            source = self._host.source_of(tensor)
            copied = self._memory.allocate(tensor, stream)
            look = self._memory.raw(copied)

            def do() -> None:
                look().copy_(source())
                self.num_copied += 1

            self.num_copies += 1
            self.max_copying = max(self.max_copying, self.num_copies - self.num_copied)
            self._issue(stream, do)
        self._come("copied")
        copied = copied if type(copied) is type(tensor) else copied.as_subclass(type(tensor))
        return copied.requires_grad_(tensor.requires_grad)

    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        """Return an event behind all that is on ``stream``."""
        self._come("record_event")
        with self._changed:
            event = self._mark(stream)
            if self._is_free:
                self.run()
        return event

    def wait_event(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Have all that comes onto ``stream`` from now on wait for ``event``."""
        self._come("wait_event")
        self._issue(stream, _nothing, event)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        self._come("record_stream")
        with self._changed:
            self._memory.record(tensor, stream)

    def _come(self, call: str) -> None:
        """Let some time pass on the device, and raise what :meth:`fail` was given for this call."""
        with self._changed:
            self._memory.take_in()
            if self._pace is not None:
                for _ in range(self._pace.randrange(4)):
                    self._step_anywhere()
            errors = self._errors.get(call)
            error = errors.pop(0) if errors else None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _wait_for(self, event: SimulatedEvent) -> None:
        """Return when ``event`` has passed."""
        self._come("synchronize")
        with self._changed:
            while self._pace is not None and not event.has_passed and self._step_anywhere():
                pass
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                self._wait(lambda: event.has_passed, "an event to pass")
            finally:
                self._num_waiting -= 1

    def _step_anywhere(self) -> bool:
        assert self._pace is not None
        runnable = [stream for stream in self.streams if stream.can_run]
        return bool(runnable) and self.step(self._pace.choice(runnable))

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, DEADLINE_S):
                message = f"Waited {DEADLINE_S:g} s for {what}: {self!r}."
                raise AssertionError(message)

    def _issue(
        self, stream: SimulatedStream, function: Callable[[], object], event: SimulatedEvent | None = None
    ) -> None:
        with self._changed:
            self._memory.take_in()
            stream.pending.append(Operation(function, event))
            if self._is_free:
                self.run()
            self._changed.notify_all()

    def _mark(self, stream: SimulatedStream) -> SimulatedEvent:
        event = SimulatedEvent(self._come, self._wait_for)
        stream.pending.append(Operation(event.settle))
        return event


def _nothing() -> None:
    pass
