"""Bundle: a batch without a layout, its tensors brought together in a slot, so that it takes one copy as well."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aioload.layout import ALIGNMENT
from aioload.ring import Ring
from aioload.slot import Slot
from aioload.structure import is_plain, map_tensors


@dataclass(frozen=True, slots=True)
class Bundle:
    """A batch of which tensors lie in a slot.

    Attributes:
        value: The batch; it is the slot's owner's, as long as the slot is.
        storage: The address of the slot's memory ...
        start: ... and where in it the slot begins.
        num_bytes: How much of it is used.
    """

    value: Any
    storage: int
    start: int
    num_bytes: int

    def moved(
        self,
        arena: torch.Tensor,
        other: Callable[[torch.Tensor], torch.Tensor],
        own: Callable[[Any], Any] | None = None,
        /,
    ) -> Any:
        """Return the batch, over a copy of what is used of the slot.

        Args:
            arena: The copy, uint8, on any device.
            other: Maps the tensors that are not in the slot.
            own: As for :func:`~aioload.structure.map_tensors`.
        """

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor) or tensor.untyped_storage().data_ptr() != self.storage:
                return other(tensor)
            return _like(tensor, arena, tensor.data_ptr() - self.start)

        return map_tensors(self.value, move, own)


def bundle(value: Any, ring: Ring) -> tuple[Bundle, Slot] | None:
    """Copy the tensors of ``value`` into a slot, which is the caller's (READY); ``None`` if there are none to copy.

    Left as they are: tensors on a device or in page-locked memory, parts of an autograd graph, and those whose memory
    is not plainly that of their items (sparse, nested, quantized, of a subclass).
    """
    found: dict[int, torch.Tensor] = {}

    def find(tensor: torch.Tensor) -> torch.Tensor:
        if is_plain(tensor) and tensor.nbytes > 0 and not tensor.is_pinned():
            found[id(tensor)] = tensor
        return tensor

    map_tensors(value, find)
    if not found:
        return None
    offsets, end = dict[int, int](), 0
    for key, tensor in found.items():
        offsets[key] = end
        end += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
    slot = ring.acquire(end)
    try:
        memory = slot.tensor(end)

        def put(tensor: torch.Tensor) -> torch.Tensor:
            offset = offsets.get(id(tensor))
            return tensor if offset is None else _like(tensor, memory, offset).copy_(tensor)

        bundled = map_tensors(value, put)
    except BaseException:
        ring.release(slot)
        raise
    slot.seal()
    return Bundle(bundled, memory.untyped_storage().data_ptr(), memory.data_ptr(), end), slot


def _like(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a tensor at a byte offset of ``memory``, with the dtype, shape and strides ``tensor.to()`` would give."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return memory[offset : offset + tensor.nbytes].view(tensor.dtype).as_strided(tensor.size(), strides)
