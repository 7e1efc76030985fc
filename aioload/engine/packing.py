"""Packing: a batch without a layout as pickled bytes and, beside them, the memory of its arrays and tensors."""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from aioload.layout import ALIGNMENT
from aioload.structure import is_plain

Span: TypeAlias = tuple[int, int]
"""Where the bytes of an array lie in a slot: offset and length."""


class Packed:
    """A batch, pickled, whose arrays and tensors are still where they were.

    Args:
        value: The batch.

    Attributes:
        pickled: All of it but the bytes of arrays and tensors.
        spans: Where these belong in a slot.
        num_bytes: Bytes of the slot, 0 if none is needed.

    Raises:
        Exception: What pickling raises.
    """

    def __init__(self, value: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=self._buffers.append).dump(value)
        self.pickled = stream.getvalue()
        self.spans: list[Span] = []
        self.num_bytes = 0
        for buffer in self._buffers:
            length = buffer.raw().nbytes
            self.spans.append((self.num_bytes, length))
            self.num_bytes += (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT

    def write(self, arena: "np.ndarray[Any, Any]") -> None:
        """Copy the arrays and tensors to their places in a slot, and let them go."""
        for buffer, (start, length) in zip(self._buffers, self.spans, strict=True):
            arena[start : start + length] = np.frombuffer(buffer.raw(), np.uint8)
        self._buffers.clear()


def unpack(pickled: bytes, spans: Sequence[Span], view: Callable[[torch.dtype, int, int], torch.Tensor] | None) -> Any:
    """Return the batch, over memory that ``view(dtype, count, offset)`` gives out; it is as writable as that is."""
    buffers: list[Any] = []
    for start, length in spans:
        if length == 0:
            buffers.append(bytearray())
        else:
            assert view is not None
            buffers.append(view(torch.uint8, length, start).numpy())
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Has plain tensors keep their bytes beside the pickle, as arrays do; torch's own way copies them into it."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not is_plain(obj):
            return NotImplemented
        return reduce_plain(obj)


def reduce_plain(tensor: torch.Tensor, *, copies: bool = True) -> Any:
    """Return how a plain tensor is pickled with its bytes in a buffer; ``None`` if that would need a copy of them.

    Args:
        tensor: See :func:`~aioload.structure.is_plain`.
        copies: Whether it may be copied.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # so that a transposed one stays transposed
    turned = tensor.permute(order)
    if not copies and not turned.is_contiguous():
        return None
    dense = turned.contiguous()
    # Not by view(): where there are one or no items, any stride is as good, and may be there.
    array: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return _tensor, (
        pickle.PickleBuffer(array),
        tensor.dtype,
        dense.shape,
        [order.index(dim) for dim in range(len(order))],
    )


def _tensor(memory: Any, dtype: torch.dtype, shape: torch.Size, order: list[int]) -> torch.Tensor:
    if len(memory) == 0:
        return torch.empty(shape, dtype=dtype).permute(order)
    return torch.frombuffer(memory, dtype=dtype).view(shape).permute(order)
