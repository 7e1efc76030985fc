"""Slot: one flat, aligned byte arena that a batch is written into. Whose it is when, :mod:`~aioload.ring` tells."""

import enum
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from aioload.layout import ALIGNMENT

View: TypeAlias = Callable[[torch.dtype, int, int], torch.Tensor]
"""Gives a flat tensor of a dtype and a number of items at a byte offset of a slot, or of its device copy."""

NewMemory: TypeAlias = Callable[[int], torch.Tensor]
"""Gives uint8 memory of a number of bytes or more, aligned to :data:`~aioload.layout.ALIGNMENT`."""


class Foreign(Protocol):
    """Memory of other origin; see :class:`~aioload.engine.segments.Mapping`."""

    @property
    def memory(self) -> torch.Tensor:
        """All of it, uint8."""
        ...

    def before_unmapping(self, function: Callable[[], bool]) -> None:
        """Have ``function`` called before the memory is gone, which it stays from if that returns ``False``."""
        ...


class SlotState(enum.Enum):
    """Who may touch a slot's bytes."""

    FREE = "free"  # nobody
    FILLING = "filling"  # the threads that write rows
    READY = "ready"  # the engine, which only reads
    LENT = "lent"  # the consumer
    COPYING = "copying"  # a device, which reads
    DROPPED = "dropped"  # nobody, for ever: the ring let it go


class Slot:
    """One byte arena of the ring, ``arena`` being a uint8 array aligned to :data:`~aioload.layout.ALIGNMENT`.

    Attributes:
        home: Called when nobody uses the slot, if its memory is of other origin (``foreign``).
        is_locked: Whether that memory has been page-locked, and ``None`` before this was tried.
        watch: Of what the consumer sees, while it is lent.
    """

    __slots__ = ("_memory", "arena", "foreign", "home", "is_locked", "state", "watch")

    def __init__(self, num_bytes: int, new_memory: NewMemory | None) -> None:
        if new_memory is not None:
            self._memory: Any = new_memory(num_bytes)
            self.arena = self._memory.numpy()
        else:
            self._memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
            start = -self._memory.ctypes.data % ALIGNMENT
            self.arena = self._memory[start : start + num_bytes]
        self.state = SlotState.FREE
        self.home: Callable[[], object] | None = None
        self.foreign: Foreign | None = None
        self.is_locked: bool | None = None
        self.watch: Watch | None = None

    def __repr__(self) -> str:
        return f"<Slot {self.state.value} {self.arena.nbytes} bytes at {self.address:#x}>"

    @property
    def is_pinned(self) -> bool:
        """Whether it has the memory that the ring's slots should have."""
        return isinstance(self._memory, torch.Tensor) and self.foreign is None

    @property
    def address(self) -> int:
        """Where its memory is."""
        return self._memory.data_ptr() if isinstance(self._memory, torch.Tensor) else self.arena.ctypes.data

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """Return the first ``num_bytes`` as a uint8 tensor (page-locked if the slot is): borrowed, not lent."""
        if isinstance(self._memory, torch.Tensor):
            return self._memory[:num_bytes]
        return torch.from_numpy(self.arena[:num_bytes])

    def arrive(self, home: Callable[[], object]) -> None:
        """FREE -> READY: it has been filled elsewhere.

        Args:
            home: Called, once, under the ring's lock, when nobody uses it: it may be filled again. No function of
                Python, which an interrupt could cut short.
        """
        assert self.state is SlotState.FREE, self
        self.home, self.state = home, SlotState.READY

    def seal(self) -> None:
        """FILLING -> READY: the last row has been written."""
        assert self.state is SlotState.FILLING, self
        self.state = SlotState.READY


class Lent(np.ndarray[Any, Any]):
    """A view of an arena that lives exactly as long as any tensor or array made from it."""


class Watch(weakref.ref[Lent]):
    """Tells when a view is gone, and of which slot it was.

    It is what is told, so that what is told may be no function of Python: an interrupt could cut that short.
    """

    __slots__ = ("slot",)

    slot: Slot


def view_of_array(arena: "np.ndarray[Any, Any]", dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    """Return items of an array's bytes, as a tensor that keeps the array."""
    return torch.frombuffer(arena, dtype=dtype, count=count, offset=offset)


def view_of_tensor(memory: torch.Tensor, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    """Return items of a tensor's bytes."""
    return memory[offset : offset + count * dtype.itemsize].view(dtype)
