"""Layout: where every leaf of a batch lies in one flat slot.

The first sample of a batch shows the structure. From it follow the shape and dtype of each leaf of the batch,
and, for a batch of ``n`` rows, the offset of each leaf in a slot. Everything here decides; nothing is allocated.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from aioload.leaf import Column, Leaf
from aioload.structure import Node, structure_of

_View: TypeAlias = tuple[torch.dtype | None, int, int, tuple[int, ...]]
"""Of a leaf: dtype, number of items, byte offset and shape."""

ALIGNMENT = 64
"""Bytes; every leaf starts at a multiple of it, in a slot and in its copy on a device."""


class Layout:
    """The structure, shapes and dtypes of a batch, whatever its number of rows. Immutable; any thread may use it."""

    def __init__(self, root: Node, leaves: Sequence[Leaf]) -> None:
        self._root = root
        self.leaves = tuple(leaves)
        self.is_light = all(leaf.is_light for leaf in leaves)
        """Whether samples are numbers alone, and may be kept until they are written: that takes next to no memory."""
        self.has_texts = any(leaf.dtype is None for leaf in leaves)
        """Whether any leaves are strings or bytes, which lie beside the slot."""
        self._latest: tuple[int, tuple[list[int], int]] = (-1, ([], 0))  # most batches have equally many rows
        self._views: tuple[int, list[_View]] = (-1, [])

    @classmethod
    def of(cls, sample: Any) -> "Layout | None":
        """Return the layout that ``sample`` shows, or ``None`` where only the general path can batch it."""
        try:
            found = structure_of(sample)
        except Exception:  # the sample's own code, such as a field that cannot be read: collation will say so
            return None
        return None if found is None else cls(*found)

    def offsets(self, num_rows: int) -> tuple[list[int], int]:
        """Return the byte offset of each leaf in a slot of ``num_rows`` rows, and the bytes of the slot."""
        latest_rows, latest = self._latest
        if num_rows == latest_rows:
            return latest
        offsets, end = [], 0
        for leaf in self.leaves:
            offsets.append(end)
            size = leaf.row_bytes * num_rows
            end += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self._latest = num_rows, (offsets, end)
        return offsets, end

    def columns(self, arena: "np.ndarray[Any, Any]", num_rows: int) -> list[Column]:
        """Return a column per leaf, for :meth:`write`; arrays are views of ``arena`` (uint8, ``offsets()[1]`` long)."""
        offsets = self.offsets(num_rows)[0]
        return [leaf.column(arena, num_rows, offset) for leaf, offset in zip(self.leaves, offsets, strict=True)]

    def rows(self, columns: Sequence[Column]) -> "list[np.ndarray[Any, Any]]":
        """Return the columns, none of which may be of strings, as arrays ``(n, *shape)``."""
        return [leaf.rows(column) for leaf, column in zip(self.leaves, columns, strict=True)]

    def write(self, columns: Sequence[Column], row: int, samples: Sequence[Any]) -> bool:
        """Write ``samples`` into the columns, from ``row`` on; ``False`` when one does not fit the layout.

        Any number of threads may write different rows at once. Rows refused half way hold no samples.
        """
        try:
            return self._root.write(columns, row, samples)
        except Exception:  # what numpy or torch refuses, or the sample's own code
            return False

    def read(self, columns: Sequence[Column], row: int) -> Any:
        """Return the sample written into ``row``, as its own copy, in the types that were written."""
        return self._root.read(columns, row)

    def batch(self, tensors: Sequence[Any]) -> Any:
        """Return the batch: ``tensors``, one per leaf (a list for strings), put into the structure."""
        return self._root.build(tensors)

    def texts(self, columns: Sequence[Column]) -> dict[int, list[Any]] | None:
        """Return the columns that are lists, by the numbers of their leaves, if there are any."""
        if not self.has_texts:
            return None
        return {leaf.number: list(columns[leaf.number]) for leaf in self.leaves if leaf.dtype is None}

    def tensors(
        self,
        columns: Sequence[Column],
        num_rows: int,
        view: Callable[[torch.dtype, int, int], torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> list[Any]:
        """Return the leaves of the batch, over memory that ``view(dtype, count, offset)`` gives out.

        Args:
            columns: The columns that were written. Lists among them are handed on as they are; where there are no such,
                none are needed.
            num_rows: Rows of the batch.
            view: Gives a flat tensor of ``count`` items at byte ``offset`` of the slot or its device copy.
            device: Where that memory is; leaves without bytes are made there.
        """
        latest_rows, views = self._views
        if num_rows != latest_rows:
            views = [_view_of(*each, num_rows) for each in zip(self.leaves, self.offsets(num_rows)[0], strict=True)]
            self._views = num_rows, views
        tensors: list[Any] = []
        for number, (dtype, count, offset, shape) in enumerate(views):
            if dtype is None:
                tensors.append(columns[number])
            elif count == 0:
                tensors.append(torch.empty(shape, dtype=dtype, device=device))
            else:
                tensors.append(view(dtype, count, offset).view(shape))
        return tensors


def _view_of(leaf: Leaf, offset: int, num_rows: int) -> "_View":
    count = 0 if leaf.dtype is None else leaf.row_bytes * num_rows // leaf.dtype.itemsize
    return leaf.dtype, count, offset, (num_rows, *leaf.shape)
