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

from aioload.engine.appearance import Appearance
from aioload.errors import ErrorContext, annotate, safe_to_raise

_STATELESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class IndexStream:
    """The indices of one pass: one entry per batch, or per sample where samples are not batched.

    Args:
        sampler: The loader's batch sampler, or its sampler where samples are not batched.
        generator: The loader's generator.
        base_seed: That of workers which live already; new ones get theirs from the generator, as torch's do.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None, base_seed: int | None = None) -> None:
        try:
            self._entries: Iterator[Any] = iter(sampler)
        except BaseException as exc:
            annotate(exc, ErrorContext(None, None, "sampler"))
            raise
        if base_seed is None:
            base_seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
        self.base_seed = base_seed

    def draw(self, *, batched: bool) -> list[Any]:
        """Return the indices of the next batch; one where samples are not ``batched``.

        Raises:
            StopIteration: There are no more.
            BaseException: What the sampler raised.
        """
        entry = next(self._entries)
        if not batched:
            return [entry]
        try:
            return list(entry)
        except StopIteration as exc:
            raise safe_to_raise(exc) from exc


def can_run_ahead(sampler: Any) -> bool:
    """Whether a second pass over ``sampler`` may begin before the first is over.

    True for torch's own samplers, whose only state is the generator they draw from.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _STATELESS


class Lookahead:
    """What a pass that began early depends on, so that it can be dropped if any of it has changed since.

    Args:
        sampler: The loader's batch sampler, or its sampler.
        generator: The loader's generator.
        others: What else samples depend on: the dataset, and what makes batches of them.

    The generators are put back after drawing ahead, and moved on only when the pass is taken up. So whoever
    else draws from them, or seeds them, sees the numbers they would see without a look-ahead.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None, *others: Any) -> None:
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        own = getattr(inner, "generator", None)
        self._generators = [g for g in (torch.default_generator, generator, own) if g is not None]
        self._before = self._states()
        self._after = self._before
        self._objects = (sampler, *others)
        self._appearance = Appearance(*self._objects)

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
        if not self._appearance.is_still(*self._objects):
            return False
        self._restore(self._after)
        return True

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
