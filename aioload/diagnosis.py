"""Diagnosis: which samples made a collation fail, where in them, and how they differ.

The search goes through the samples in the order in which torch's ``collate`` does, and tries the values at each
place by themselves. It runs only once something has failed.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from aioload.structure import is_dataclass_instance

Describe: TypeAlias = Callable[[int], str]
"""Names a sample by its position in the batch, such as ``"index 7 ('a.png')"``."""

Collate: TypeAlias = Callable[[Sequence[Any]], Any]

_ADVICE_TYPE = "return tensors, arrays, numbers, strings or containers of them, or pass a collate_fn."
_ADVICE_SHAPE = "Give all samples one shape and structure (in the dataset or its transform), or pass a collate_fn."


def diagnose(samples: Sequence[Any], describe: Describe, collate: Collate, leaf_types: tuple[Any, ...]) -> str | None:
    """Return why the samples cannot be collated, in a sentence or two, or ``None`` if the reason cannot be found.

    Args:
        samples: The samples of the batch.
        describe: Names a sample.
        collate: What failed; it is tried on parts of the samples.
        leaf_types: Types that have a collation rule of their own.
    """
    try:
        place = _search(samples, "", collate, leaf_types)
        return None if place is None else _explain(place, describe)
    except Exception:  # the samples' own code, such as a field that cannot be read: what it raised is out already
        return None


class _Nothing:
    """Stands for a field that is not there."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where it failed. ``other`` is the sample to blame, by itself if ``alone``, else beside the first one."""

    path: str
    column: Sequence[Any]
    other: int | None
    alone: bool = False


def _search(column: Sequence[Any], path: str, collate: Collate, leaf_types: tuple[Any, ...]) -> _Place | None:
    first = column[0]
    is_container = isinstance(first, Mapping | Sequence) or is_dataclass_instance(first)
    if not is_container or isinstance(first, leaf_types):
        return _search_leaf(column, path, collate)
    for position, value in enumerate(column):
        if not _goes_with(first, value):
            return _Place(path, column, position)
    for step, values in _children_of(column):
        for position, value in enumerate(values):
            if value is _Nothing:
                return _Place(path + step, values, position)
        place = _search(values, path + step, collate, leaf_types)
        if place is not None:
            return place
    return None


def _search_leaf(column: Sequence[Any], path: str, collate: Collate) -> _Place | None:
    if not _fails(collate, column):
        return None
    for position, value in enumerate(column):
        if _fails(collate, [value]):
            return _Place(path, column, position, alone=True)
    for position, value in enumerate(column):
        if position > 0 and _fails(collate, [column[0], value]):
            return _Place(path, column, position)
    return _Place(path, column, None)


def _fails(collate: Collate, values: Sequence[Any]) -> bool:
    try:
        collate(values)
    except Exception:
        return True
    return False


def _goes_with(first: Any, value: Any) -> bool:
    if isinstance(first, Mapping):
        return isinstance(value, Mapping)
    if is_dataclass_instance(first):
        return type(value) is type(first)
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == len(first)


def _children_of(column: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    first = column[0]
    if isinstance(first, Mapping):
        for key in first:
            yield f"[{key!r}]", [_item(value, key) for value in column]
    elif is_dataclass_instance(first):
        for field in dataclasses.fields(first):
            yield f".{field.name}", [getattr(value, field.name) for value in column]
    else:
        names = getattr(first, "_fields", None) if isinstance(first, tuple) else None
        for number, values in enumerate(zip(*column, strict=True)):
            yield f"[{number}]" if names is None else f".{names[number]}", list(values)


def _item(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except KeyError:
        return _Nothing


def _explain(place: _Place, describe: Describe) -> str:
    where = place.path or "the sample itself"
    first, other = place.column[0], place.other
    if other is None:
        return f"It failed at {where}, where sample {describe(0)} holds {_kind_of(first)}."
    if place.alone:
        return f"Sample {describe(other)} holds {_kind_of(place.column[other])} at {where}; {_ADVICE_TYPE}"
    mine, theirs = _brief_kind_of(first), _brief_kind_of(place.column[other])
    if mine == theirs:
        mine, theirs = _kind_of(first), _kind_of(place.column[other])
    return f"Samples {describe(0)} and {describe(other)} differ at {where}: {mine} against {theirs}. {_ADVICE_SHAPE}"


def _brief_kind_of(value: Any) -> str:
    """Return what usually makes the difference."""
    if value is _Nothing:
        return "nothing there"
    if isinstance(value, torch.Tensor | np.ndarray) and not _is_nested(value):
        return f"shape {tuple(value.shape)}"
    # Numbers go together whatever their type.
    if isinstance(value, bool | int | float | np.bool_ | np.number):
        return "a number"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def _kind_of(value: Any) -> str:
    """Return all that may matter."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    if isinstance(value, torch.Tensor):
        shape = "nested" if _is_nested(value) else f"of shape {tuple(value.shape)}"
        return f"a {type(value).__name__} of {value.dtype}, {shape}, {value.layout}, on {value.device}"
    if isinstance(value, bool | int | float | np.bool_ | np.number):
        return f"a {type(value).__name__}, {reprlib.repr(value)}"
    return f"a {type(value).__name__}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested
