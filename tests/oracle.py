"""Oracle: torch's own DataLoader, and what it means that a batch of ours is the same as one of its."""

import asyncio
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.utils.data

from aioload import DataLoader

Outcomes: TypeAlias = "list[Any]"
"""Batches and exceptions, in the order in which one pass gave them."""

NUM_WORKERS = [0, 1, 3]


class Way(NamedTuple):
    """A number of workers and a face of the loader."""

    num_workers: int
    face: Callable[..., Outcomes]

    def __str__(self) -> str:
        return f"{self.face.__name__}, num_workers={self.num_workers}"


def outcomes(batches: Iterator[Any]) -> Outcomes:
    """Return what is still to come."""
    got: Outcomes = []
    while True:
        try:
            got.append(next(batches))
        except StopIteration:
            return got
        except Exception as exc:
            got.append(exc)


def by_for(loader: DataLoader[Any]) -> Outcomes:
    return outcomes(iter(loader))


def by_async_for(loader: DataLoader[Any]) -> Outcomes:
    got: Outcomes = []  # not what the task returns: asyncio.run writes that out, whatever it is, and drops the text

    async def drain() -> None:
        batches = aiter(loader)
        while True:
            try:
                got.append(await anext(batches))
            except StopAsyncIteration:
                return
            except Exception as exc:
                got.append(exc)

    asyncio.run(drain())
    return got


WAYS = [Way(num_workers, face) for num_workers in NUM_WORKERS for face in (by_for, by_async_for)]


def torch_loader(dataset: Any, **arguments: Any) -> "torch.utils.data.DataLoader[Any]":
    return torch.utils.data.DataLoader(dataset, **arguments)


def torch_outcomes(dataset: Any, **arguments: Any) -> Outcomes:
    """Return what torch's loader gives without workers, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcomes(iter(torch_loader(dataset, **arguments)))


def assert_parity(dataset: Any, **arguments: Any) -> None:
    """Load in every way and compare with torch."""
    expected = torch_outcomes(dataset, **arguments)
    for way in WAYS:
        with DataLoader(dataset, num_workers=way.num_workers, **arguments) as loader:
            assert_same(way.face(loader), expected, str(way))


def assert_same(ours: Any, theirs: Any, where: str = "batch") -> None:
    """Compare structure, exact types, dtypes, shapes and bits; of exceptions the builtin type."""
    if isinstance(theirs, BaseException):
        assert isinstance(ours, BaseException), (where, ours, theirs)
        kind = builtin_of(ours)  # torch's NotImplementedError may be a plain RuntimeError of ours
        assert kind is builtin_of(theirs) or (kind is RuntimeError and isinstance(theirs, kind)), (where, ours, theirs)
        return
    assert type(ours) is type(theirs), (where, ours, theirs)
    if isinstance(theirs, torch.Tensor):
        _assert_same_tensor(ours, theirs, where)
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, Sequence) and not isinstance(theirs, str | bytes):
        assert len(ours) == len(theirs), (where, ours, theirs)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif dataclasses.is_dataclass(theirs):
        for field in dataclasses.fields(theirs):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name), f"{where}.{field.name}")
    elif isinstance(theirs, np.ndarray | np.generic):
        np.testing.assert_array_equal(ours, theirs, where)
    else:
        assert ours == theirs or ours != ours, (where, ours, theirs)  # or NaN
    if isinstance(theirs, Mapping | Sequence) and hasattr(theirs, "__dict__"):
        assert_same(vars(ours), vars(theirs), f"vars({where})")


def builtin_of(exc: BaseException) -> type[BaseException]:
    """Return the most special builtin class of an exception."""
    return next(kind for kind in type(exc).__mro__ if kind.__module__ == "builtins")


def _assert_same_tensor(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    for name in ("dtype", "layout", "is_nested", "device", "requires_grad"):
        assert getattr(ours, name) == getattr(theirs, name), (where, name, ours, theirs)
    if theirs.is_nested:
        assert_same(list(ours.unbind()), list(theirs.unbind()), where)
        return
    assert ours.shape == theirs.shape, (where, ours, theirs)
    if theirs.device.type != "meta":
        np.testing.assert_array_equal(bits_of(ours), bits_of(theirs), where)


def bits_of(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return a copy of a tensor's bytes, in which NaNs and zeros of either sign are told apart."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.dequantize() if plain.is_quantized else plain.as_subclass(torch.Tensor)
    flat = torch.empty(plain.numel(), dtype=plain.dtype)
    flat.view(plain.shape).copy_(plain)
    return flat.view(torch.uint8).numpy()
