"""Layout: where every leaf of a batch lies in one flat slot, and how a sample is written into its row.

The first sample of a batch shows the structure: nested tuples, lists, dicts, named tuples and dataclasses of
arrays, tensors and numbers. From it follow the shape and dtype of each leaf of the batch, and, for a batch of
``n`` rows, the offset of each leaf in a slot. Strings and bytes are leaves too, but live in a list beside the
slot. Everything here decides; nothing is allocated, and no user code runs.

A layout yields exactly the batch that ``torch.utils.data.default_collate`` makes of the same samples (which has
no answer for dataclasses; here the batch is the same dataclass). Whatever it cannot promise that for has no
layout, and takes the general path of :mod:`aioload.collate`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; every leaf starts at a multiple of it, in a slot and in its copy on a device."""

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
"""All rows of one leaf: an array ``(n, *shape)`` over a slot, or a list of ``n`` strings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a batch: ``shape`` and ``dtype`` of a row. ``dtype`` is ``None`` for strings and bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 for strings, which do not live in the slot."""
        if self.dtype is None:
            return 0
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class Layout:
    """The structure, shapes and dtypes of a batch, whatever its number of rows. Immutable; any thread may use it."""

    def __init__(self, root: "_Node", leaves: Sequence[Leaf]) -> None:
        self._root = root
        self.leaves = tuple(leaves)

    @classmethod
    def of(cls, sample: Any) -> "Layout | None":
        """Return the layout that ``sample`` shows, or ``None`` where only the general path can batch it."""
        leaves: list[Leaf] = []
        root = _node_of(sample, leaves, in_sequence=False)
        return None if root is None else cls(root, leaves)

    def offsets(self, num_rows: int) -> tuple[list[int], int]:
        """Return the byte offset of each leaf in a slot of ``num_rows`` rows, and the bytes of the slot."""
        offsets, end = [], 0
        for leaf in self.leaves:
            offsets.append(end)
            size = leaf.row_bytes * num_rows
            end += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return offsets, end

    def columns(self, arena: "np.ndarray[Any, Any]", num_rows: int) -> list[Column]:
        """Return a column per leaf, the arrays being views of ``arena`` (uint8, at least ``offsets()[1]`` long)."""
        columns: list[Column] = []
        for leaf, offset in zip(self.leaves, self.offsets(num_rows)[0], strict=True):
            if leaf.dtype is None:
                columns.append([None] * num_rows)
            else:
                dtype = _STORAGE_DTYPES[leaf.dtype]
                columns.append(np.ndarray((num_rows, *leaf.shape), dtype, buffer=arena, offset=offset))
        return columns

    def write(self, columns: Sequence[Column], row: int, sample: Any) -> bool:
        """Write ``sample`` into ``row`` of the columns; ``False`` when it does not fit the layout.

        Any number of threads may write different rows at once. A row refused half way holds no sample.
        """
        return self._root.write(columns, row, sample)

    def read(self, columns: Sequence[Column], row: int) -> Any:
        """Return the sample written into ``row``, as its own copy, in the types that were written."""
        return self._root.read(columns, row)

    def batch(self, tensors: Sequence[Any]) -> Any:
        """Return the batch: ``tensors``, one per leaf (a list for strings), put into the structure."""
        return self._root.build(tensors)

    def tensors(
        self,
        columns: Sequence[Column],
        num_rows: int,
        view: Callable[[torch.dtype, int, int], torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> list[Any]:
        """Return the leaves of the batch, over memory that ``view(dtype, count, offset)`` gives out.

        Args:
            columns: The columns that were written; lists among them are handed on as they are.
            num_rows: Rows of the batch.
            view: Gives a flat tensor of ``count`` items at byte ``offset`` of the slot or its device copy.
            device: Where that memory is; leaves without bytes are made there.
        """
        tensors: list[Any] = []
        for column, leaf, offset in zip(columns, self.leaves, self.offsets(num_rows)[0], strict=True):
            if leaf.dtype is None:
                tensors.append(column)
            elif leaf.row_bytes * num_rows == 0:
                tensors.append(torch.empty((num_rows, *leaf.shape), dtype=leaf.dtype, device=device))
            else:
                count = leaf.row_bytes * num_rows // leaf.dtype.itemsize
                tensors.append(view(leaf.dtype, count, offset).view(num_rows, *leaf.shape))
        return tensors


class _Node:
    """A place in the structure: knows the leaves below it, by number."""

    __slots__ = ()

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        raise NotImplementedError

    def read(self, columns: Sequence[Column], row: int) -> Any:
        raise NotImplementedError

    def build(self, tensors: Sequence[Any]) -> Any:
        raise NotImplementedError


class _ArrayNode(_Node):
    __slots__ = ("dtype", "number", "shape")

    def __init__(self, number: int, array: "np.ndarray[Any, Any]") -> None:
        self.number, self.shape, self.dtype = number, array.shape, array.dtype

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        if not isinstance(value, np.ndarray) or value.shape != self.shape or value.dtype != self.dtype:
            return False
        columns[self.number][row] = value
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return np.array(columns[self.number][row])

    def build(self, tensors: Sequence[Any]) -> Any:
        return tensors[self.number]


class _TensorNode(_Node):
    __slots__ = ("bits", "dtype", "number", "shape")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number, self.shape, self.dtype = number, tensor.shape, tensor.dtype
        self.bits = _BIT_VIEWS.get(tensor.dtype)

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        if not _is_plain(value) or value.shape != self.shape or value.dtype is not self.dtype:
            return False
        columns[self.number][row] = value.numpy() if self.bits is None else storage_of(value)
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return torch.from_numpy(np.array(columns[self.number][row])).view(self.dtype)

    def build(self, tensors: Sequence[Any]) -> Any:
        return tensors[self.number]


class _NumberNode(_Node):
    """A Python ``bool``, ``int`` or ``float``, or a numpy scalar, of exactly one type."""

    __slots__ = ("number", "type")

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.type = number, type(value)

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        if type(value) is not self.type:
            return False
        try:
            columns[self.number][row] = value
        except OverflowError:
            return False
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return self.type(columns[self.number][row])

    def build(self, tensors: Sequence[Any]) -> Any:
        return tensors[self.number]


class _TextNode(_Node):
    """``str`` or ``bytes``. torch collates them to a tuple inside sequences and to a list elsewhere."""

    __slots__ = ("as_tuple", "number", "type")

    def __init__(self, number: int, value: Any, as_tuple: bool) -> None:
        self.number, self.type, self.as_tuple = number, type(value), as_tuple

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        if type(value) is not self.type:
            return False
        columns[self.number][row] = value
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return columns[self.number][row]

    def build(self, tensors: Sequence[Any]) -> Any:
        texts = tensors[self.number]
        return tuple(texts) if self.as_tuple else list(texts)


class _SequenceNode(_Node):
    """A tuple, list or named tuple. The batch of plain tuples is a list, as torch has it."""

    __slots__ = ("children", "type")

    def __init__(self, kind: type[Any], children: Sequence[_Node]) -> None:
        self.type, self.children = kind, tuple(children)

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        if type(value) is not self.type or len(value) != len(self.children):
            return False
        # A plain loop: a generator in all() costs 0.3 us more per sample.
        for child, item in zip(self.children, value):  # noqa: B905, SIM110
            if not child.write(columns, row, item):
                return False
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return self._make([child.read(columns, row) for child in self.children], self.type)

    def build(self, tensors: Sequence[Any]) -> Any:
        items = [child.build(tensors) for child in self.children]
        return self._make(items, list if self.type is tuple else self.type)

    @staticmethod
    def _make(items: list[Any], kind: type[Any]) -> Any:
        return kind(*items) if hasattr(kind, "_fields") else kind(items)


class _DictNode(_Node):
    __slots__ = ("children", "keys")

    def __init__(self, keys: Sequence[Any], children: Sequence[_Node]) -> None:
        self.keys, self.children = tuple(keys), tuple(children)

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        # Keys in another order are refused too: the batch has the order of its own first sample.
        if type(value) is not dict or tuple(value) != self.keys:
            return False
        for child, item in zip(self.children, value.values()):  # noqa: B905, SIM110
            if not child.write(columns, row, item):
                return False
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return {key: child.read(columns, row) for key, child in zip(self.keys, self.children, strict=True)}

    def build(self, tensors: Sequence[Any]) -> Any:
        return {key: child.build(tensors) for key, child in zip(self.keys, self.children, strict=True)}


class _DataclassNode(_Node):
    __slots__ = ("children", "names", "type")

    def __init__(self, kind: type, names: Sequence[str], children: Sequence[_Node]) -> None:
        self.type, self.names, self.children = kind, tuple(names), tuple(children)

    def write(self, columns: Sequence[Column], row: int, value: Any) -> bool:
        if type(value) is not self.type:
            return False
        for child, name in zip(self.children, self.names):  # noqa: B905, SIM110
            if not child.write(columns, row, getattr(value, name)):
                return False
        return True

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return build_dataclass(self.type, self.names, [child.read(columns, row) for child in self.children])

    def build(self, tensors: Sequence[Any]) -> Any:
        return build_dataclass(self.type, self.names, [child.build(tensors) for child in self.children])


def storage_of(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return ``tensor``'s memory as the array its rows are copied from; its dtype must have a layout."""
    bits = _BIT_VIEWS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def build_dataclass(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """Return an instance of the dataclass ``kind`` with these fields.

    Neither ``__init__`` nor ``__post_init__`` runs: they were written to check one sample, not a batch.
    """
    instance: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _node_of(value: Any, leaves: list[Leaf], *, in_sequence: bool) -> _Node | None:
    """Return the node for ``value`` and append its leaves, or ``None`` if there is no layout for it."""
    kind = type(value)
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        children = _children_of(value, leaves, in_sequence=True)
        return None if children is None else _SequenceNode(kind, children)
    if kind is dict:
        children = _children_of(value.values(), leaves, in_sequence=False)
        return None if children is None else _DictNode(list(value), children)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        children = _children_of([getattr(value, name) for name in names], leaves, in_sequence=False)
        return None if children is None else _DataclassNode(kind, names, children)
    return _leaf_of(value, leaves, in_sequence)


def _children_of(values: Any, leaves: list[Leaf], *, in_sequence: bool) -> list[_Node] | None:
    children = []
    for value in values:
        child = _node_of(value, leaves, in_sequence=in_sequence)
        if child is None:
            return None
        children.append(child)
    return children


def _leaf_of(value: Any, leaves: list[Leaf], in_sequence: bool) -> _Node | None:
    number = len(leaves)
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    node: _Node
    if isinstance(value, np.ndarray):
        dtype, shape, node = _TORCH_DTYPES.get(value.dtype), value.shape, _ArrayNode(number, value)
    elif _is_plain(value):
        dtype = value.dtype if value.dtype in _STORAGE_DTYPES else None
        shape, node = tuple(value.shape), _TensorNode(number, value)
    elif type(value) in _NUMBER_DTYPES:
        dtype, shape, node = _NUMBER_DTYPES[type(value)], (), _NumberNode(number, value)
    elif isinstance(value, np.bool_ | np.number) and not isinstance(value, np.uint64):
        # torch refuses np.uint64 scalars; the general path lets it say so.
        dtype, shape, node = _TORCH_DTYPES.get(value.dtype), (), _NumberNode(number, value)
    elif type(value) is str or type(value) is bytes:
        leaves.append(Leaf((), None))
        return _TextNode(number, value, as_tuple=in_sequence)
    else:
        return None
    if dtype is None:
        return None
    leaves.append(Leaf(shape, dtype))
    return node


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is a torch tensor whose bytes are all there is to it."""
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )
