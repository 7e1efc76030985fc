"""A simulated device: streams that work when a test lets them, and memory that is reused as soon as it may be.

It stands where a GPU would, as the ``device`` of a loader or under a copier, and goes by the rules that
:class:`~aioload.device.DeviceBackend` has for any device. Its tensors are CPU tensors over memory of its own, in which
poison lies wherever nothing has been written yet, or not any more: who reads too early, or too late, reads that.
"""

import contextlib
import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from aioload.layout import ALIGNMENT
from aioload.testing.gates import DEADLINE_S

_BLOCK_BYTES = 512
"""Memory is given out in multiples of this."""


class SimulatedEvent:
    """A place on a stream of a :class:`SimulatedDevice`."""

    def __init__(self, device: "SimulatedDevice") -> None:
        self._device = device
        self.has_passed = False

    def query(self) -> bool:
        """Return whether it has passed."""
        self._device.come("query")
        return self.has_passed

    def synchronize(self) -> None:
        """Return when it has passed.

        Raises:
            AssertionError: It took longer than :data:`~aioload.testing.gates.DEADLINE_S`.
        """
        self._device.wait_for(self)


class _Operation:
    """Something to be done on a stream, once an event, if any, has passed."""

    def __init__(self, function: Callable[[], object], event: SimulatedEvent | None = None) -> None:
        self.function, self.event = function, event


class SimulatedStream:
    """What is to be done in a certain order, by and by."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending: deque[_Operation] = deque()

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


class _Owned(np.ndarray[Any, Any]):
    """A view of memory that lives exactly as long as any tensor made from it."""


class _Block:
    """Device memory for one tensor, allocated for use on one stream."""

    def __init__(self, num_bytes: int, stream: SimulatedStream) -> None:
        self.memory = _aligned(num_bytes)
        self.stream = stream
        self.used_on: set[SimulatedStream] = set()
        self.guards: list[SimulatedEvent] = []
        self.watch: weakref.ref[_Owned] | None = None

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        start = int(self.memory.ctypes.data)
        return start <= address < start + self.memory.nbytes


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
        max_host_bytes: The most bytes of :meth:`host_memory` that were referred to at once.
    """

    def __init__(self, *, pace: random.Random | None = None, poison: int = 0xDB) -> None:
        self.device = torch.device("cpu")
        self.poison = poison
        self.num_copies = self.num_copied = self.max_copying = self.max_host_bytes = 0
        self.default_stream = SimulatedStream(0)
        self.streams = [self.default_stream]
        self._pace, self._is_free = pace, False
        self._here = threading.local()  # the current stream of each thread
        # Re-entrant: what an operation does may drop the last reference to memory of the device.
        self._changed = threading.Condition(threading.RLock())
        self._blocks: list[_Block] = []
        self._free: list[_Block] = []
        self._guarded: list[_Block] = []  # that nobody refers to any more, but a stream may still use
        self._dropped: deque[_Block] = deque()  # as reported by the garbage collector, which may come at any time
        self._host: dict[int, int] = {}  # memory of the host that copies are made from: address and bytes
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
        return len(self._blocks)

    @property
    def num_blocks_in_use(self) -> int:
        """Pieces of device memory that somebody refers to, or that a stream may still use."""
        with self._changed:
            self._take_in()
            return len(self._blocks) - len(self._free)

    @property
    def host_bytes(self) -> int:
        """Bytes of :meth:`host_memory` that are referred to."""
        return sum(tuple(self._host.values()))

    def step(self, stream: SimulatedStream) -> bool:
        """Do the next thing on ``stream``; ``False`` if there is none, or it has to wait for another stream."""
        with self._changed:
            self._take_in()
            if not stream.can_run:
                return False
            operation = stream.pending.popleft()
            operation.function()
            self._take_in()
            self._changed.notify_all()
            return True

    def run(self, stream: SimulatedStream | None = None) -> int:
        """Do all that can be done, on ``stream`` or on all; return how many operations that were."""
        with self._changed:
            self._take_in()
            count = 0
            while runnable := [each for each in self.streams if each.can_run and stream in (None, each)]:
                count += self.step(runnable[0])
            return count

    def read(self, tensor: torch.Tensor) -> Reading:
        """Read ``tensor`` on the current stream, when that comes to it, as a kernel would.

        Nobody is kept by this from using its memory for something else: as on a device, it is for those who drop the
        last reference to see to that.
        """
        reading, look = Reading(), self._raw(tensor)
        self._issue(self.current_stream(), lambda: reading.settle(look().clone()))
        return reading

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
        self.come("host_memory")
        memory = _aligned(num_bytes).view(_Owned)
        address, host = int(memory.ctypes.data), self._host
        host[address] = num_bytes
        self.max_host_bytes = max(self.max_host_bytes, self.host_bytes)
        weakref.finalize(memory, host.pop, address, None).atexit = False
        return torch.from_numpy(memory)

    def new_stream(self) -> SimulatedStream:
        """Return a stream beside all others."""
        self.come("new_stream")
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
        self.come("copy")
        stream = self.current_stream() if stream is None else stream
        if self._block_of(tensor) is not None:
            return tensor
        source = tensor.detach()
        if source.untyped_storage().data_ptr() not in self._host:
            source = source.clone()
        copied = self._allocate(source, stream)
        look = self._raw(copied)

        def do() -> None:
            look().copy_(source)
            self.num_copied += 1

        with self._changed:
            self.num_copies += 1
            self.max_copying = max(self.max_copying, self.num_copies - self.num_copied)
            self._issue(stream, do)
        self.come("copied")
        copied = copied if type(copied) is type(tensor) else copied.as_subclass(type(tensor))
        return copied.requires_grad_(tensor.requires_grad)

    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        """Return an event behind all that is on ``stream``."""
        self.come("record_event")
        with self._changed:
            event = self._mark(stream)
            if self._is_free:
                self.run()
        return event

    def wait_event(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Have all that comes onto ``stream`` from now on wait for ``event``."""
        self.come("wait_event")
        self._issue(stream, _nothing, event)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        self.come("record_stream")
        block = self._block_of(tensor)
        if block is not None:
            block.used_on.add(stream)

    # For events.

    def come(self, call: str) -> None:
        """Let some time pass on the device, and raise what :meth:`fail` was given for this call."""
        with self._changed:
            self._take_in()
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

    def wait_for(self, event: SimulatedEvent) -> None:
        """Return when ``event`` has passed."""
        self.come("synchronize")
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
            self._take_in()
            stream.pending.append(_Operation(function, event))
            if self._is_free:
                self.run()
            self._changed.notify_all()

    def _mark(self, stream: SimulatedStream) -> SimulatedEvent:
        event = SimulatedEvent(self)

        def pass_() -> None:
            event.has_passed = True

        stream.pending.append(_Operation(pass_))
        return event

    # Memory.

    def _allocate(self, like: torch.Tensor, stream: SimulatedStream) -> torch.Tensor:
        """Return a tensor of the device's with the shape, strides and dtype of ``like``."""
        num_bytes = like.numel() * like.element_size()
        if num_bytes == 0:
            return torch.empty_like(like)
        block = self._block_for(num_bytes, stream)
        owned, dropped = block.memory.view(_Owned), self._dropped
        block.watch = weakref.ref(owned, lambda _: dropped.append(block))
        flat = torch.frombuffer(owned, dtype=like.dtype, count=like.numel())
        return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())

    def _block_for(self, num_bytes: int, stream: SimulatedStream) -> _Block:
        with self._changed:
            self._take_in()
            for block in reversed(self._free):
                if block.stream is stream and block.memory.nbytes >= num_bytes:
                    self._free.remove(block)
                    return block
            block = _Block(-(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES, stream)
            block.memory.fill(self.poison)
            self._blocks.append(block)
            return block

    def _take_in(self) -> None:
        """Make memory free that nobody refers to and no stream that was recorded uses any more."""
        while self._dropped:
            block = self._dropped.popleft()
            block.guards = [self._mark(stream) for stream in block.used_on]
            block.used_on, block.watch = set(), None
            self._guarded.append(block)
        for block in [block for block in self._guarded if all(guard.has_passed for guard in block.guards)]:
            self._guarded.remove(block)
            # Its own stream may still be using it, in that order.
            block.stream.pending.append(_Operation(functools.partial(block.memory.fill, self.poison)))
            self._free.append(block)

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        address = tensor.data_ptr()
        with self._changed:
            return next((block for block in self._blocks if block.holds(address)), None)

    def _raw(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what gives the tensor that lies where ``tensor`` does, and does not keep its memory in use."""
        block = self._block_of(tensor)
        if block is None:  # it is not the device's, or has no bytes
            return lambda: tensor
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        memory, offset = block.memory, tensor.data_ptr() - int(block.memory.ctypes.data)

        def look() -> torch.Tensor:
            flat = torch.frombuffer(memory, dtype=dtype, count=_span(shape, stride), offset=offset)
            return flat.as_strided(shape, stride)

        return look


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many items lie from the first item of a tensor to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _aligned(num_bytes: int) -> "np.ndarray[Any, Any]":
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def _nothing() -> None:
    pass
