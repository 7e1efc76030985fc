"""Collation: a list of samples to a batch, for whatever has no layout, and what to say when it cannot be done.

torch's own rules are used as they are, so registered types, subclasses and new torch releases come along. One
thing is added: a batch of dataclass instances is an instance of the same dataclass.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from aioload.errors import CollateError, SampleTypeError
from aioload.layout import build_dataclass

_STOCK_RULES = dict(default_collate_fn_map)

Describe = Callable[[int], str]
"""Names a sample by its position in the batch, such as ``"index 7 ('a.png')"``."""


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
        CollateError: Samples that ``default_collate`` cannot stack, saying which two differ, where and how.
        SampleTypeError: A value it cannot put into a batch, saying in which sample and field.
        BaseException: Whatever the user's ``collate_fn`` raises, as it is.
    """
    if collate_fn is not default_collate:
        return collate_fn(samples)
    rules: dict[Any, Any] = {**default_collate_fn_map, _AnyDataclass: _collate_dataclasses}
    try:
        return collate([_writable(sample) for sample in samples], collate_fn_map=rules)
    except Exception as exc:
        problem = _find_problem(samples, describe)
        if problem is None:
            raise
        if isinstance(exc, RuntimeError):
            raise CollateError(_join(exc, problem)) from exc
        if isinstance(exc, TypeError):
            raise SampleTypeError(_join(exc, problem)) from exc
        exc.add_note(problem)
        raise


def convert_sample(collate_fn: Callable[[Any], Any], sample: Any) -> Any:
    """Return the sample as ``batch_size=None`` yields it: arrays made tensors by default."""
    return collate_fn(_writable(sample) if collate_fn is default_convert else sample)


class _DataclassMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return dataclasses.is_dataclass(instance) and not isinstance(instance, type)


class _AnyDataclass(metaclass=_DataclassMeta):
    """Stands for every dataclass among torch's collate rules, which go by ``isinstance``."""


def _collate_dataclasses(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    names = [field.name for field in dataclasses.fields(samples[0])]
    values = [collate([getattr(s, name) for s in samples], collate_fn_map=collate_fn_map) for name in names]
    return build_dataclass(type(samples[0]), names, values)


def _writable(value: Any) -> Any:
    """Return ``value`` with read-only arrays copied: a tensor over them could be written through."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else np.array(value)
    if type(value) is tuple or type(value) is list:
        return type(value)([_writable(item) for item in value])
    if type(value) is dict:
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_writable(item) for item in value])
    return value


def _join(exc: Exception, problem: str) -> str:
    return f"{exc}\n{problem}"


def _find_problem(samples: Sequence[Any], describe: Describe) -> str | None:
    """Return a sentence on the first sample that does not go with the first one, or ``None`` if all do."""
    if not samples:
        return None
    first = dict(_leaves_of(samples[0], ""))
    for path, value in first.items():
        if not _can_be_collated(value):
            return f"Sample {describe(0)} holds a {type(value).__name__} at {_place(path)}; " + _ADVICE_TYPE
    for position, sample in enumerate(samples[1:], start=1):
        other = dict(_leaves_of(sample, ""))
        for path in [*first, *(path for path in other if path not in first)]:
            mine, theirs = _kind_of(first, path), _kind_of(other, path)
            if mine != theirs:
                return (
                    f"Samples {describe(0)} and {describe(position)} differ at {_place(path)}: "
                    f"{mine} against {theirs}. " + _ADVICE_SHAPE
                )
    return None


_ADVICE_TYPE = "return tensors, arrays, numbers, strings or containers of them, or pass a collate_fn."
_ADVICE_SHAPE = "Give all samples one shape and structure (in the dataset or its transform), or pass a collate_fn."


def _leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves_of(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield from _leaves_of(item, f"{path}.{name}")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        for number, item in enumerate(value):
            yield from _leaves_of(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves_of(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def _kind_of(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return "nothing there"
    value = leaves[path]
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"shape {tuple(value.shape)}"
    # Numbers go together whatever their type.
    return "a number" if isinstance(value, bool | int | float | np.number) else f"a {type(value).__name__}"


def _can_be_collated(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return any(isinstance(value, kind) for kind in default_collate_fn_map) or isinstance(value, Mapping | Sequence)


def _place(path: str) -> str:
    return path or "the sample itself"
