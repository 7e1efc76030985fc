"""Structure: how the leaves of one sample are found in it: tuples, lists, dicts, named tuples and dataclasses.

A structure yields exactly the batch that ``torch.utils.data.default_collate`` makes of the same samples (which
has no answer for dataclasses; here the batch is the same dataclass). Whatever it cannot promise that for has no
structure, and takes the general path of :mod:`aioload.collate`.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from aioload.leaf import Column, Leaf, leaf_of


class Node(Protocol):
    """A place in the structure, which knows the leaves below it. Any thread may write, read and build."""

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any], /) -> bool:
        """Write the leaves of ``values`` from ``row`` on; ``False``, or an exception, when one does not fit."""
        ...

    def read(self, columns: Sequence[Column], row: int, /) -> Any:
        """Return a copy of what was written, in the types it had."""
        ...

    def build(self, tensors: Sequence[Any], /) -> Any:
        """Return this part of the batch, over ``tensors``, one per leaf of the whole."""
        ...


class _SequenceNode:
    """A tuple, list or named tuple. The batch of plain tuples is a list, as torch has it."""

    __slots__ = ("_children", "_type")

    def __init__(self, kind: type[Any], children: Sequence[Node]) -> None:
        self._type, self._children = kind, tuple(children)

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        for value in values:
            if type(value) is not self._type or len(value) != len(self._children):
                return False
        return _write(self._children, columns, row, zip(*values))  # noqa: B905  # they are equally long

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return self._make([child.read(columns, row) for child in self._children], self._type)

    def build(self, tensors: Sequence[Any]) -> Any:
        items = [child.build(tensors) for child in self._children]
        return self._make(items, list if self._type is tuple else self._type)

    @staticmethod
    def _make(items: list[Any], kind: type[Any]) -> Any:
        return kind(*items) if hasattr(kind, "_fields") else kind(items)


class _DictNode:
    """A plain dict."""

    __slots__ = ("_children", "_keys")

    def __init__(self, keys: Sequence[Any], children: Sequence[Node]) -> None:
        self._keys, self._children = tuple(keys), tuple(children)

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        for value in values:
            # Keys in another order are refused too: the batch has the order of its own first sample.
            if type(value) is not dict or tuple(value) != self._keys:
                return False
        return _write(self._children, columns, row, zip(*[value.values() for value in values]))  # noqa: B905

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return {key: child.read(columns, row) for key, child in zip(self._keys, self._children, strict=True)}

    def build(self, tensors: Sequence[Any]) -> Any:
        return {key: child.build(tensors) for key, child in zip(self._keys, self._children, strict=True)}


class _DataclassNode:
    """An instance of a dataclass, by its fields."""

    __slots__ = ("_children", "_names", "_type")

    def __init__(self, kind: type, names: Sequence[str], children: Sequence[Node]) -> None:
        self._type, self._names, self._children = kind, tuple(names), tuple(children)

    def write(self, columns: Sequence[Column], row: int, values: Sequence[Any]) -> bool:
        for value in values:
            if type(value) is not self._type:
                return False
        parts = [[getattr(value, name) for value in values] for name in self._names]
        return _write(self._children, columns, row, parts)

    def read(self, columns: Sequence[Column], row: int) -> Any:
        return build_dataclass(self._type, self._names, [child.read(columns, row) for child in self._children])

    def build(self, tensors: Sequence[Any]) -> Any:
        return build_dataclass(self._type, self._names, [child.build(tensors) for child in self._children])


def _write(children: Sequence[Node], columns: Sequence[Column], row: int, parts: Iterable[Sequence[Any]]) -> bool:
    # A plain loop: a generator in all() costs 0.3 us more.
    for child, part in zip(children, parts):  # noqa: B905, SIM110
        if not child.write(columns, row, part):
            return False
    return True


def structure_of(sample: Any) -> tuple[Node, list[Leaf]] | None:
    """Return the structure that ``sample`` shows and its leaves, or ``None`` if a part of it has none."""
    leaves: list[Leaf] = []
    root = _node_of(sample, leaves, in_sequence=False)
    return None if root is None else (root, leaves)


def is_dataclass_instance(value: Any) -> bool:
    """Whether ``value`` is batched field by field: a dataclass, and nothing that torch has an answer for."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, torch.Tensor | np.ndarray | Mapping | Sequence | int | float)
    )


def build_dataclass(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """Return an instance of the dataclass ``kind`` with these fields.

    Neither ``__init__`` nor ``__post_init__`` runs: they were written to check one sample, not a batch.
    """
    instance: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def with_items(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping like ``original`` with other ``items``: of its type and properties, where that can be."""
    if type(original) is dict:
        return items
    try:
        if not isinstance(original, MutableMapping):
            return type(original)(items)  # type: ignore[call-arg]  # as torch does, with what follows
        clone = copy.copy(original)
        clone.update(items)
    except TypeError:
        return items
    return clone


def with_parts(original: Sequence[Any], parts: list[Any]) -> Any:
    """Return a sequence like ``original`` with other ``parts``: of its type and properties, where that can be."""
    if type(original) is list:
        return parts
    try:
        if isinstance(original, tuple) and hasattr(original, "_fields"):
            return type(original)(*parts)
        if not isinstance(original, MutableSequence):
            return type(original)(parts)  # type: ignore[call-arg]  # as torch does, with what follows
        clone = copy.copy(original)
        for number, part in enumerate(parts):
            clone[number] = part
    except TypeError:
        return parts
    return clone


def with_fields(original: Any, values: Sequence[Any]) -> Any:
    """Return a copy of a dataclass instance with other ``values`` in its fields, in their order."""
    clone = copy.copy(original)
    for field, value in zip(dataclasses.fields(original), values, strict=True):
        object.__setattr__(clone, field.name, value)
    return clone


def map_tensors(
    value: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    own: Callable[[Any], Any] | None = None,
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it; other leaves stay as they are.

    Args:
        value: Containers of any kind and depth. Those without a tensor are returned as they are, not copied.
        function: Maps a tensor.
        own: Maps an object that is no tensor but has a method ``to``, which is not looked into. Nor are those of
            other types, such as sets.
        other: Maps the leaves of other types.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, type | range):  # the one may have a ``to`` that is not its own, the other many parts
        return value
    if callable(getattr(value, "to", None)):
        return value if own is None else own(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function, own, other) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else _with_items(value, items)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        parts = [map_tensors(item, function, own, other) for item in value]
        unchanged = all(part is item for part, item in zip(parts, value, strict=True))
        return value if unchanged else with_parts(value, parts)
    if is_dataclass_instance(value):
        before = [getattr(value, field.name) for field in dataclasses.fields(value)]
        after = [map_tensors(item, function, own, other) for item in before]
        unchanged = all(one is then for one, then in zip(before, after, strict=True))
        return value if unchanged else with_fields(value, after)
    return value if other is None else other(value)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the host's, of torch's own class, and the bytes of its items are all there is to it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not getattr(tensor, "__dict__", None)
    )


def _with_items(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(original, Counter):
        return with_items(original, items)
    clone = copy.copy(original)
    dict.update(clone, items)  # its own would add them to what is there
    return clone


def _node_of(value: Any, leaves: list[Leaf], *, in_sequence: bool) -> Node | None:
    """Return the node for ``value`` and append its leaves, or ``None`` if it has no structure."""
    kind = type(value)
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        children = _children_of(value, leaves, in_sequence=True)
        return None if children is None else _SequenceNode(kind, children)
    if kind is dict:
        children = _children_of(value.values(), leaves, in_sequence=False)
        return None if children is None else _DictNode(list(value), children)
    leaf = leaf_of(value, len(leaves), in_sequence=in_sequence)
    if leaf is not None:
        leaves.append(leaf)
        return leaf
    if is_dataclass_instance(value):
        names = [field.name for field in dataclasses.fields(value)]
        children = _children_of([getattr(value, name) for name in names], leaves, in_sequence=False)
        return None if children is None else _DataclassNode(kind, names, children)
    return None


def _children_of(values: Any, leaves: list[Leaf], *, in_sequence: bool) -> list[Node] | None:
    children = []
    for value in values:
        child = _node_of(value, leaves, in_sequence=in_sequence)
        if child is None:
            return None
        children.append(child)
    return children
