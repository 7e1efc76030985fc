"""Collation: a list of samples to a batch, for whatever has no layout.

torch's own rules are used as they are, so registered types, subclasses and new torch releases come along. Two
things are added: a batch of dataclass instances is an instance of the same dataclass, and an array that torch
cannot share memory with (read-only, or with strides of another kind than its own) is copied first.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from aioload.diagnosis import Describe, diagnose
from aioload.errors import CollateError, SampleKeyError, SampleTypeError, SampleValueError
from aioload.structure import build_dataclass, is_dataclass_instance, with_items, with_parts

_STOCK_RULES = dict(default_collate_fn_map)

_MOST_DEPTH, _MOST_ITEMS = 5, 128  # that are looked into to see how large a sample is; items halved at each level

_ERRORS: dict[type[Exception], Callable[[str], Exception]] = {
    RuntimeError: CollateError,
    TypeError: SampleTypeError,
    ValueError: SampleValueError,
    KeyError: SampleKeyError,
}


def collation_rules() -> Mapping[Any, Any]:
    """Return torch's collation rules, which a user may add to or replace at any time."""
    return default_collate_fn_map


def rows_allowed(collate_fn: Callable[[Any], Any]) -> bool:
    """Whether samples may be written straight into rows: the default collation, with torch's own rules."""
    return collate_fn is default_collate and default_collate_fn_map == _STOCK_RULES


def collate_samples(collate_fn: Callable[[Any], Any], samples: Sequence[Any], describe: Describe) -> Any:
    """Return the batch that ``collate_fn`` makes of the samples, which it then owns.

    Args:
        collate_fn: torch's ``default_collate`` or the user's own.
        samples: One entry per sample, in the order of the batch.
        describe: Names a sample for an error message.

    Raises:
        CollateError: Samples that ``default_collate`` cannot stack, saying which two differ, where and how, or which
            one it is. This and the next three are the errors of torch, with its kind and message.
        SampleTypeError: A value it cannot put into a batch, saying in which sample and field.
        SampleKeyError: A field that one sample has and another has not.
        SampleValueError: What else torch finds wrong with a value.
        BaseException: Whatever the user's ``collate_fn`` raises, as it is; with a note, what is raised while
            rules of the user's own are registered with torch.
    """
    if collate_fn is not default_collate:
        return collate_fn(samples)
    try:
        return _collate_by_rules(samples)
    except Exception as exc:
        finding = diagnose(samples, describe, _collate_by_rules, tuple(default_collate_fn_map))
        if finding is None:
            raise
        make = _ERRORS.get(_builtin_of(exc))
        if make is None or default_collate_fn_map != _STOCK_RULES:
            exc.add_note(finding)
            raise
        message = f"{exc}\n{finding}"
        raise make(message) from exc


def convert_sample(collate_fn: Callable[[Any], Any], sample: Any) -> Any:
    """Return the sample as ``batch_size=None`` yields it: arrays made tensors by default."""
    return collate_fn(_shareable_parts(sample) if collate_fn is default_convert else sample)


def _collate_by_rules(samples: Sequence[Any]) -> Any:
    rules: dict[Any, Any] = {**default_collate_fn_map, _AnyDataclass: _collate_dataclasses}
    if rules.get(np.ndarray) is _STOCK_RULES[np.ndarray]:
        rules[np.ndarray] = _collate_arrays
    return collate(samples, collate_fn_map=rules)


def _collate_arrays(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    return _STOCK_RULES[np.ndarray]([_shareable(sample) for sample in samples], collate_fn_map=collate_fn_map)


class _DataclassMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return is_dataclass_instance(instance)


class _AnyDataclass(metaclass=_DataclassMeta):
    """Stands for every dataclass among torch's collate rules, which go by ``isinstance``."""


def _collate_dataclasses(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    kind = type(samples[0])
    for sample in samples:
        if type(sample) is not kind:
            message = f"each element in list of batch should be of one type, but got {kind} and {type(sample)}"
            raise TypeError(message)
    names = [field.name for field in dataclasses.fields(kind)]
    values = [collate([getattr(s, name) for s in samples], collate_fn_map=collate_fn_map) for name in names]
    return build_dataclass(kind, names, values)


def _shareable(value: Any) -> Any:
    """Return ``value``, or a copy of an array that no tensor could, or should, share the memory of."""
    if not isinstance(value, np.ndarray):
        return value
    whole = all(stride >= 0 and stride % value.itemsize == 0 for stride in value.strides) if value.itemsize else True
    return value if value.flags.writeable and whole else np.array(value)


def _shareable_parts(value: Any) -> Any:
    """Return ``value`` with the arrays in it made shareable, in containers that are copied only where needed."""
    if isinstance(value, np.ndarray):
        return _shareable(value) if type(value).__module__ == "numpy" else value  # as default_convert asks
    if isinstance(value, Mapping):
        items = {key: _shareable_parts(item) for key, item in value.items()}
        unchanged = all(items[key] is item for key, item in value.items())
        return value if unchanged else with_items(value, items)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = [_shareable_parts(item) for item in value]
        unchanged = all(part is item for part, item in zip(parts, value, strict=True))
        return value if unchanged else with_parts(value, parts)
    return value


def _builtin_of(exc: Exception) -> type[Exception]:
    return next((kind for kind in _ERRORS if isinstance(exc, kind)), Exception)


def visible_bytes(value: Any, depth: int = 0) -> int:
    """Return the bytes of the tensors, arrays, bytes and texts in a sample or batch, as far as they can be seen.

    Never fails, and runs no code of the user's: nobody has asked to look. Of a long list the first items stand for all.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor:
            return _tensor_bytes(value)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # torch's own way around a subclass's code
            return _tensor_bytes(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, str):
        return len(value) if str.isascii(value) else str.__sizeof__(value)
    if depth == _MOST_DEPTH:  # it may contain itself
        return 0
    if isinstance(value, dict):
        return _bytes_of_all(dict.values(value), dict.__len__(value), depth)
    if isinstance(value, list):
        return _bytes_of_all(list.__iter__(value), list.__len__(value), depth)
    if isinstance(value, tuple):
        return _bytes_of_all(tuple.__iter__(value), tuple.__len__(value), depth)
    if dataclasses.is_dataclass(type(value)):
        fields = _stored(value)
        return _bytes_of_all(fields, len(fields), depth)
    return 0


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0  # sparse ones do not say


def _bytes_of_all(values: Iterable[Any], num_values: int, depth: int) -> int:
    most = _MOST_ITEMS >> depth
    num_bytes = sum(visible_bytes(value, depth + 1) for value in itertools.islice(values, most))
    return num_bytes if num_values <= most else num_bytes * num_values // most


def _stored(value: Any) -> list[Any]:
    """Return what an instance of a dataclass holds, past its properties."""
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:  # it has slots
        members = [getattr(type(value), field.name, None) for field in dataclasses.fields(value)]
    stored = []
    for member in members:
        if isinstance(member, MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # not set
                stored.append(member.__get__(value))
    return stored
