"""Memory of a simulated device, which is given out again as soon as it may be; poison lies where there is nothing."""

import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from aioload.layout import ALIGNMENT
from aioload.testing.streams import Operation, SimulatedEvent, SimulatedStream

_BLOCK_BYTES = 512
"""Memory is given out in multiples of this."""


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


class DeviceMemory:
    """An allocator that goes by streams. The device calls it under its lock.

    Args:
        mark: Returns an event behind all that is on a stream.
        poison: The byte in memory that holds nothing.
    """

    def __init__(self, mark: Callable[[SimulatedStream], SimulatedEvent], poison: int) -> None:
        self._mark, self._poison = mark, poison
        self.blocks: list[_Block] = []
        self._free: list[_Block] = []
        self._guarded: list[_Block] = []  # that nobody refers to any more, but a stream may still use
        self._dropped: deque[_Block] = deque()  # as reported by the garbage collector, which may come at any time

    @property
    def num_in_use(self) -> int:
        """Blocks that somebody refers to, or that a stream may still use."""
        return len(self.blocks) - len(self._free)

    def allocate(self, like: torch.Tensor, stream: SimulatedStream) -> torch.Tensor:
        """Return a tensor with the shape and dtype of ``like``, and its strides if it is dense."""
        num_bytes = like.numel() * like.element_size()
        if num_bytes == 0:
            return torch.empty_like(like)
        block = self._block_for(num_bytes, stream)
        owned, dropped = block.memory.view(_Owned), self._dropped
        block.watch = weakref.ref(owned, lambda _: dropped.append(block))
        flat = torch.frombuffer(owned, dtype=like.dtype, count=like.numel())
        return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())

    def take_in(self) -> None:
        """Make memory free that nobody refers to and no stream that was recorded uses any more."""
        while self._dropped:
            block = self._dropped.popleft()
            block.guards = [self._mark(stream) for stream in block.used_on]
            block.used_on, block.watch = set(), None
            self._guarded.append(block)
        for block in [block for block in self._guarded if all(guard.has_passed for guard in block.guards)]:
            self._guarded.remove(block)
            # Its own stream may still be using it, in that order.
            block.stream.pending.append(Operation(functools.partial(block.memory.fill, self._poison)))
            self._free.append(block)

    def record(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        block = self._block_of(tensor)
        if block is not None:
            block.used_on.add(stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies here."""
        return self._block_of(tensor) is not None

    def raw(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
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

    def _block_for(self, num_bytes: int, stream: SimulatedStream) -> _Block:
        for block in reversed(self._free):
            if block.stream is stream and block.memory.nbytes >= num_bytes:
                self._free.remove(block)
                return block
        block = _Block(-(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES, stream)
        block.memory.fill(self._poison)
        self.blocks.append(block)
        return block

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        address = tensor.data_ptr()
        return next((block for block in self.blocks if block.holds(address)), None)


class HostMemory:
    """Memory of the host that copies are made from when a stream comes to them.

    Attributes:
        max_bytes: The most that were referred to at once.
    """

    def __init__(self) -> None:
        self.max_bytes = 0
        self._sizes: dict[int, int] = {}  # by address
        self._num_reading: dict[int, int] = {}  # of memory that was locked: copies from it that have not been made

    @property
    def num_bytes(self) -> int:
        """Bytes that are referred to."""
        return sum(tuple(self._sizes.values()))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory."""
        memory = _aligned(num_bytes).view(_Owned)
        address, sizes = int(memory.ctypes.data), self._sizes
        sizes[address] = num_bytes
        self.max_bytes = max(self.max_bytes, self.num_bytes)
        weakref.finalize(memory, sizes.pop, address, None).atexit = False
        return torch.from_numpy(memory)

    def lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Take in memory of other origin; return what gives it up."""
        address = memory.untyped_storage().data_ptr()
        assert address not in self._sizes, "it was locked before, and then unmapped, but not unlocked"
        self._sizes[address], self._num_reading[address] = memory.untyped_storage().nbytes(), 0
        self.max_bytes = max(self.max_bytes, self.num_bytes)

        def unlock() -> bool:
            assert self._num_reading.pop(address) == 0, "memory is unlocked before copies from it have been made"
            del self._sizes[address]
            return True

        return unlock

    def source_of(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what gives, once, the tensor that a copy is to be made from, when that is made."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._sizes:
            source = tensor.detach().clone()
            return lambda: source
        if address not in self._num_reading:
            source = tensor.detach()
            return lambda: source
        self._num_reading[address] += 1
        shape, stride, dtype, start = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()

        def read() -> torch.Tensor:
            count = _span(shape, stride)
            memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(start)  # which keeps nothing mapped
            source = torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride).clone()
            self._num_reading[address] -= 1
            return source

        return read


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many items lie from the first item of a tensor to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _aligned(num_bytes: int) -> "np.ndarray[Any, Any]":
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
