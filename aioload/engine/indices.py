"""Indices: the stream of indices of one pass, drawn from the sampler in the consumer's thread.

Samplers draw from generators that the training step may use as well. Drawing a batch's indices only inside
``iter()`` and ``next()`` makes the interleaving, and so the order, the same in every run, and torch's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_STATELESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class IndexStream:
    """The indices of one pass: one entry per batch, or per sample where samples are not batched.

    Args:
        sampler: The loader's batch sampler, or its sampler where samples are not batched.
        generator: The loader's generator. One number is drawn from it, as torch draws its workers' base seed.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        self._entries: Iterator[Any] = iter(sampler)
        self.base_seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())

    def __iter__(self) -> "IndexStream":
        return self

    def __next__(self) -> Any:
        return next(self._entries)


def can_run_ahead(sampler: Any) -> bool:
    """Whether a second pass over ``sampler`` may begin before the first is over.

    True for torch's own samplers, whose only state is the generator they draw from.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _STATELESS


class Lookahead:
    """What a pass that began early depends on, so that it can be dropped if any of it has changed since.

    The generators are put back after drawing ahead, and moved on only when the pass is taken up. So whoever
    else draws from them, or seeds them, sees the numbers they would see without a look-ahead.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        own = getattr(inner, "generator", None)
        self._generators = [g for g in (torch.default_generator, generator, own) if g is not None]
        self._before = self._states()
        self._after = self._before
        self._dataset = dataset
        self._fields = _fields_of(dataset)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw for the pass that began early; nobody else sees the generators move."""
        present = self._states()
        self._restore(self._after)
        try:
            yield
        finally:
            self._after = self._states()
            self._restore(present)

    def take_up(self) -> bool:
        """Make the draws count and return True, or return False if something has changed."""
        if not all(torch.equal(a, b) for a, b in zip(self._states(), self._before, strict=True)):
            return False
        if not _same_fields(self._fields, _fields_of(self._dataset)):
            return False
        self._restore(self._after)
        return True

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _fields_of(dataset: Any) -> dict[str, Any]:
    return dict(getattr(dataset, "__dict__", {}))


def _same_fields(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(other[name] is value for name, value in one.items())
