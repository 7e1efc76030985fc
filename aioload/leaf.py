"""Leaf: one array, tensor, number or text of a sample, and how it is written into its row of a batch.

A leaf knows its number in the structure, and the shape and dtype of a row. Strings and bytes are leaves too,
but live in a list beside the slot.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

# The numpy dtype under which a row of each torch dtype is written. numpy lacks bfloat16 and the 8-bit floats:
# their bits are moved as unsigned integers.
_STORAGE_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float8_e4m3fn: np.dtype(np.uint8),
    torch.float8_e5m2: np.dtype(np.uint8),
}
_BIT_VIEWS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_TORCH_DTYPES = {dtype: t for t, dtype in _STORAGE_DTYPES.items() if t not in _BIT_VIEWS}
_NUMBER_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}

Column: TypeAlias = "np.ndarray[Any, Any] | list[Any]"
"""All rows of a leaf: an array ``(n, *shape)`` over a slot, one ``(n,)`` of whole rows, or a list of ``n`` strings."""

# numpy gives the interpreter lock up to copy more than so many items, and threads that read then take it. To win it
# back takes longer than copying this many bytes: so such a row is one item.
_GIVES_UP_ABOVE_ITEMS, _WHOLE_UP_TO_BYTES = 500, 64 << 10


class Leaf:
    """One leaf of a batch: ``shape`` and ``dtype`` of a row; ``dtype`` is ``None`` for strings and bytes."""

    __slots__ = ("dtype", "number", "shape")

    is_light = False
    """Whether a value of it takes next to no memory: it is a number, and no text or array, nor part of a large one."""

    def __init__(self, number: int, shape: Sequence[int], dtype: torch.dtype | None) -> None:
        self.number, self.shape, self.dtype = number, tuple(shape), dtype

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} {self.shape} {self.dtype}>"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 for strings, which do not live in the slot."""
        if self.dtype is None:
            return 0
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def column(self, arena: "np.ndarray[Any, Any]", num_rows: int, offset: int) -> Column:
        """Return the leaf's rows, as a view of ``arena`` where they are bytes."""
        if self.dtype is None:
            return [None] * num_rows
        return np.ndarray((num_rows, *self.shape), _STORAGE_DTYPES[self.dtype], buffer=arena, offset=offset)

    def rows(self, column: Column) -> "np.ndarray[Any, Any]":
        """Return a column of anything but strings as an array ``(n, *shape)``."""
        assert isinstance(column, np.ndarray)
        return column

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        """Write ``values`` into the rows from ``row`` on; ``False``, or an exception, when one does not fit."""
        raise NotImplementedError

    def read(self, columns: Sequence[Column], row: int) -> Any:
        """Return a copy of what was written, in the type it had."""
        raise NotImplementedError

    def build(self, tensors: Sequence[Any]) -> Any:
        """Return the leaf of the batch."""
        return tensors[self.number]


class _BufferLeaf(Leaf):
    """An array or tensor, whose rows are copied whole where they are neither large nor of few items."""

    __slots__ = ("_whole",)

    def __init__(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(number, shape, dtype)
        num_items = self.row_bytes // dtype.itemsize
        is_whole = num_items > _GIVES_UP_ABOVE_ITEMS and self.row_bytes <= _WHOLE_UP_TO_BYTES
        self._whole = np.dtype((np.void, self.row_bytes)) if is_whole else None

    def column(self, arena: "np.ndarray[Any, Any]", num_rows: int, offset: int) -> Column:
        """Return the leaf's rows as a view of ``arena``."""
        if self._whole is None:
            return super().column(arena, num_rows, offset)
        return np.ndarray((num_rows,), self._whole, buffer=arena, offset=offset)

    def rows(self, column: Column) -> "np.ndarray[Any, Any]":
        """Return a column as an array ``(n, *shape)``."""
        rows = super().rows(column)
        assert self.dtype is not None
        return rows if self._whole is None else rows.view(_STORAGE_DTYPES[self.dtype]).reshape(-1, *self.shape)

    def _put(self, columns: Sequence[Column], row: int, arrays: "Sequence[np.ndarray[Any, Any]]") -> None:
        column = columns[self.number]
        for number, array in enumerate(arrays, row):
            if self._whole is None:
                column[number] = array
            elif array.flags.c_contiguous:
                column[number] = array.data
            else:
                self.rows(column)[number] = array


class _ArrayLeaf(_BufferLeaf):
    """A numpy array, or an instance of a subclass, whose data torch takes too."""

    __slots__ = ("_dtype",)

    def __init__(self, number: int, array: "np.ndarray[Any, Any]", dtype: torch.dtype) -> None:
        super().__init__(number, array.shape, dtype)
        self._dtype = array.dtype

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        shape, dtype = self.shape, self._dtype
        for value in values:
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
                return False
        self._put(columns, row, values)
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return np.array(self.rows(columns[self.number])[row])


class _TensorLeaf(_BufferLeaf):
    """A plain torch tensor."""

    __slots__ = ("_bits",)

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        super().__init__(number, tensor.shape, tensor.dtype)
        self._bits = _BIT_VIEWS.get(tensor.dtype)

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        arrays = []
        for value in values:
            if type(value) is not torch.Tensor or value.dtype is not self.dtype:
                return False
            if self._bits is None:
                # Raises for what is not plain: 0.6 us of 3.3 us a sample cheaper than asking.
                array = value.numpy()
            elif _is_plain(value):
                array = value.view(self._bits).numpy()
            else:
                return False
            if array.shape != self.shape:
                return False
            arrays.append(array)
        self._put(columns, row, arrays)
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        assert self.dtype is not None
        return torch.from_numpy(np.array(self.rows(columns[self.number])[row])).view(self.dtype)


class _NumberLeaf(Leaf):
    """A Python ``bool``, ``int`` or ``float``, or a numpy scalar, of exactly one type."""

    __slots__ = ("_type",)

    is_light = True

    def __init__(self, number: int, value: Any, dtype: torch.dtype) -> None:
        super().__init__(number, (), dtype)
        self._type = type(value)

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        for value in values:
            if type(value) is not self._type:
                return False
        columns[self.number][row : row + len(values)] = values  # OverflowError: an int of more than 64 bits
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return self._type(columns[self.number][row])


class _TextLeaf(Leaf):
    """``str`` or ``bytes``. torch collates them to a tuple inside sequences and to a list elsewhere."""

    __slots__ = ("_as_tuple", "_type")

    def __init__(self, number: int, value: Any, *, as_tuple: bool) -> None:
        super().__init__(number, (), None)
        self._type, self._as_tuple = type(value), as_tuple

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        for value in values:
            if type(value) is not self._type:
                return False
        columns[self.number][row : row + len(values)] = values  # of as many: other threads write others meanwhile
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return columns[self.number][row]

    def build(self, tensors: Sequence[Any]) -> Any:
        texts = tensors[self.number]
        return tuple(texts) if self._as_tuple else list(texts)


def leaf_of(value: Any, number: int, *, in_sequence: bool) -> Leaf | None:
    """Return the leaf that ``value`` is, or ``None`` if it cannot be written into a row."""
    if isinstance(value, np.ndarray):
        # torch refuses np.ulonglong, which is np.uint64 by another name.
        dtype = _TORCH_DTYPES.get(value.dtype) if value.dtype.char != "Q" else None
        return None if dtype is None else _ArrayLeaf(number, value, dtype)
    if isinstance(value, torch.Tensor):
        return _TensorLeaf(number, value) if _is_plain(value) and value.dtype in _STORAGE_DTYPES else None
    if type(value) in _NUMBER_DTYPES:
        return _NumberLeaf(number, value, _NUMBER_DTYPES[type(value)])
    # torch refuses np.uint64 scalars; the general path lets it say so.
    if isinstance(value, np.bool_ | np.number) and value.dtype != np.uint64:
        dtype = _TORCH_DTYPES.get(value.dtype)
        return None if dtype is None else _NumberLeaf(number, value, dtype)
    if type(value) is str or type(value) is bytes:
        return _TextLeaf(number, value, as_tuple=in_sequence)
    return None


def storage_of(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return ``tensor``'s memory as the array its rows are copied from; its dtype must have a layout."""
    bits = _BIT_VIEWS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def _is_plain(value: torch.Tensor) -> bool:
    """Whether ``value``'s bytes are all there is to it."""
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )
