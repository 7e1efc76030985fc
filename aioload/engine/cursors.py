"""Cursors: how a pass over a sampler begins, and begins again in the middle, by kind of sampler.

A cursor belongs to one pass. It yields the sampler's entries (index batches, or indices), and tells what a new pass
needs to know to go on after any number of them.
"""

import base64
import copy
import enum
import itertools
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from aioload.engine.epochs import innermost
from aioload.errors import StateError
from aioload.samplers import Seekable

Saved = Mapping[str, Any]


class Cursor(Protocol):
    """A pass over a sampler."""

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """Return the entries, or those after the first ``done`` of them, by what :meth:`state` returned then."""
        ...

    def mark(self) -> Any:
        """Return what belongs to the place behind the entry that was drawn last, if that must be kept."""
        ...

    def state(self, done: int, num_drawn: int, mark: Any) -> dict[str, Any]:
        """Return, for JSON, what begins the pass again after ``done`` entries, of ``num_drawn`` drawn so far."""
        ...

    def state_at_start(self) -> dict[str, Any]:
        """Return, for JSON, what begins the pass, if it has not begun yet."""
        ...


class SeekCursor:
    """Over a sampler that can begin anywhere: our own ones and torch's sequential one."""

    def __init__(self, sampler: Any, epoch: int) -> None:
        self._seekable, self._epoch = innermost(sampler), epoch
        self._batches: BatchSampler | None = sampler if self._seekable is not sampler else None
        self._origin = self._done = 0

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """See :class:`Cursor`."""
        self._origin = self._position() if saved is None else saved["position"]
        self._done = done
        indices = self._from(self._origin)
        if self._batches is None:
            return indices
        return iter(BatchSampler(indices, self._batches.batch_size, self._batches.drop_last))

    def mark(self) -> None:
        """See :class:`Cursor`."""

    def state(self, done: int, num_drawn: int, mark: Any) -> dict[str, Any]:
        """See :class:`Cursor`."""
        step = 1 if self._batches is None else self._batches.batch_size
        return {"position": min(self._origin + step * (done - self._done), len(self._seekable))}

    def state_at_start(self) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {"position": self._position()}

    def _position(self) -> int:
        return self._seekable.next_position if isinstance(self._seekable, Seekable) else 0

    def _from(self, position: int) -> Iterator[Any]:
        if isinstance(self._seekable, Seekable):
            entries: Iterator[Any] = self._seekable.iter_from(self._epoch, position)
            return entries
        return _in_order(self._seekable, position)


class StatefulCursor:
    """Over a sampler that has a ``state_dict`` of its own, or whose iterator has."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._owner = next((each for each in (sampler, innermost(sampler)) if has_state(each)), None)
        self._first: Any = None

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """See :class:`Cursor`."""
        if saved is not None and self._owner is not None:
            self._owner.load_state_dict(copy.deepcopy(saved["state"]))
        return self.follow(iter(self._sampler), saved)

    def follow(self, entries: Iterator[Any], saved: Saved | None) -> Iterator[Any]:
        """Return ``entries``, and ask them for states if they have any."""
        if has_state(entries):
            self._owner = entries
            if saved is not None:
                entries.load_state_dict(copy.deepcopy(saved["state"]))  # type: ignore[attr-defined]
        self._first = self.mark()
        return entries

    def mark(self) -> Any:
        """See :class:`Cursor`."""
        assert self._owner is not None
        return copy.deepcopy(self._owner.state_dict())  # it may go on changing

    def state(self, done: int, num_drawn: int, mark: Any) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {"state": copy.deepcopy(self._first if mark is None else mark)}

    def state_at_start(self) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {"state": self.mark()}


class GlobalUse(enum.Enum):
    """When a sampler draws from torch's global generator."""

    NEVER = "never"
    AT_FIRST = "when its first entry is asked for"
    UNKNOWN = "unknown"


class ReplayCursor:
    """Over any other sampler: from the generators as they were at the start, the same entries are drawn again.

    Entries that had been drawn ahead are drawn again as well, since what a sampler draws later depends on it. torch's
    global generator is never left changed by that; whoever goes on elsewhere puts it back by other means.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None, *, seeds: bool) -> None:
        inner = innermost(sampler)
        self._sampler, self._loaders, self._seeds = sampler, generator, seeds
        own = [generator, getattr(inner, "generator", None), getattr(sampler, "generator", None)]
        self._generators = list({id(g): g for g in own if isinstance(g, torch.Generator)}.values())
        self._global_use = _global_use_of(inner)
        self._is_endless = type(inner) is _InfiniteConstantSampler  # that of iterable datasets
        self._before: list[torch.Tensor] = []
        self._global: torch.Tensor | None = None
        self._epoch: int | None = None
        self._stateful: StatefulCursor | None = None

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """See :class:`Cursor`."""
        if saved is not None:
            self._put_back(saved)
        inner = innermost(self._sampler)
        epoch = getattr(inner, "epoch", None)
        self._epoch = epoch if type(epoch) is int and callable(getattr(inner, "set_epoch", None)) else None
        self._before = [generator.get_state() for generator in self._generators]
        if saved is not None and "num_drawn" in saved:
            return self._again(saved, done)
        if self._global_use is GlobalUse.UNKNOWN:
            self._global = torch.default_generator.get_state()
        entries: Iterator[Any] = iter(self._sampler)
        if has_state(entries):
            self._stateful = StatefulCursor(self._sampler)
            self._stateful.follow(entries, saved if saved is not None and "state" in saved else None)
        return self._noting(entries) if self._global_use is GlobalUse.AT_FIRST else entries

    def mark(self) -> Any:
        """See :class:`Cursor`."""
        return None if self._stateful is None else self._stateful.mark()

    def state(self, done: int, num_drawn: int, mark: Any) -> dict[str, Any]:
        """See :class:`Cursor`."""
        if self._stateful is not None:
            return self._stateful.state(done, num_drawn, mark)
        state: dict[str, Any] = {"num_drawn": 0 if self._is_endless else num_drawn, "seeds": self._seeds}
        if self._before:
            state["generators"] = [encoded(before) for before in self._before]
        if self._global is not None:
            state["global_generator"] = encoded(self._global)
        if self._epoch is not None:
            state["epoch"] = self._epoch
        return state

    def state_at_start(self) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {"generators": [encoded(generator.get_state()) for generator in self._generators]}

    def _noting(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Note what torch's global generator is like when the first entry is asked for."""
        self._global = torch.default_generator.get_state()
        if type(innermost(self._sampler)) is RandomSampler:  # which draws a seed from it, and nothing else
            generator = torch.Generator()
            generator.set_state(self._global)
            self._global = torch.Generator().manual_seed(draw_base_seed(generator)).get_state()
        yield from entries

    def _put_back(self, saved: Saved) -> None:
        states = saved.get("generators", ())
        if "state" not in saved and len(states) != len(self._generators):
            message = (
                f"The state is of a loader with {len(states)} generators, for its order and its own draws; this one "
                f"has {len(self._generators)}. Give it those that the other had."
            )
            raise StateError(message)
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(decoded(state))
        self._seeds = saved.get("seeds", self._seeds)
        if "global_generator" in saved:
            self._global = decoded(saved["global_generator"])
        if saved.get("epoch") is not None:
            innermost(self._sampler).set_epoch(saved["epoch"])

    def _again(self, saved: Saved, done: int) -> Iterator[Any]:
        """Return the entries after the first ``done`` of a pass that began elsewhere."""
        sampler = self._sampler
        if self._global is not None and type(innermost(sampler)) is RandomSampler:
            sampler = _reseeded(sampler, self._global)
        with _global_generator(self._global):
            entries: Iterator[Any] = iter(sampler)
            if self._seeds and (self._loaders is not None or self._global_use is GlobalUse.UNKNOWN):
                draw_base_seed(self._loaders)  # as it was drawn then, so that what follows is the same
            drawn = list(itertools.islice(itertools.islice(entries, saved["num_drawn"]), done, None))
        if self._global is None and self._global_use is GlobalUse.AT_FIRST:
            return self._noting(entries)  # nothing had been drawn
        return itertools.chain(drawn, entries)


def cursor_for(sampler: Any, generator: torch.Generator | None, *, epoch: int, seeds: bool) -> Cursor:
    """Return a cursor for a pass over ``sampler``.

    Args:
        sampler: The loader's batch sampler, or its sampler where samples are not batched.
        generator: The loader's generator.
        epoch: The number of the pass.
        seeds: Whether the pass draws a base seed for its workers.
    """
    inner = innermost(sampler)
    if (inner is sampler or type(sampler) is BatchSampler) and (
        isinstance(inner, Seekable) or type(inner) is SequentialSampler
    ):
        return SeekCursor(sampler, epoch)
    if has_state(sampler) or has_state(inner):
        return StatefulCursor(sampler)
    return ReplayCursor(sampler, generator, seeds=seeds)


def state_at_start(sampler: Any, generator: torch.Generator | None) -> dict[str, Any]:
    """Return, for JSON, what a pass that has not begun needs to know to begin elsewhere."""
    return cursor_for(sampler, generator, epoch=0, seeds=True).state_at_start()


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw the number that torch draws for its workers from the loader's generator, or the global one."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def has_state(thing: Any) -> bool:
    """Whether ``thing`` saves and loads a state of its own."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def encoded(state: torch.Tensor) -> int | str:
    """Return a generator's state for JSON: its seed, if nothing has been drawn yet, or about 3 KB of text."""
    generator = torch.Generator()
    generator.set_state(state)
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    if torch.equal(fresh.get_state(), state):
        return generator.initial_seed()
    return base64.b64encode(zlib.compress(bytes(state.numpy()))).decode()


def decoded(value: int | str) -> torch.Tensor:
    """Return the state that :func:`encoded` was given."""
    if isinstance(value, int):
        return torch.Generator().manual_seed(value).get_state()
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(value))), dtype=torch.uint8)


def _in_order(sampler: SequentialSampler, position: int) -> Iterator[int]:
    yield from range(len(sampler))[position:]  # not before it is asked for: the dataset may not know its length


@contextmanager
def _global_generator(state: torch.Tensor | None) -> Iterator[None]:
    """Let torch's global generator be in ``state``, and put it back afterwards."""
    present = torch.default_generator.get_state()
    if state is not None:
        torch.default_generator.set_state(state)
    try:
        yield
    finally:
        torch.default_generator.set_state(present)


def _reseeded(sampler: Any, state: torch.Tensor) -> Any:
    """Return a copy of a RandomSampler, or of a batch sampler over one, that draws from a generator in ``state``."""
    copied = copy.copy(sampler)
    if type(sampler) is RandomSampler:
        copied.generator = torch.Generator()
        copied.generator.set_state(state)
    else:
        copied.sampler = _reseeded(sampler.sampler, state)
    return copied


def _global_use_of(sampler: Any) -> GlobalUse:
    if type(sampler) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler):
        return GlobalUse.AT_FIRST if sampler.generator is None else GlobalUse.NEVER
    if isinstance(sampler, list | tuple | range):
        return GlobalUse.NEVER
    if type(sampler) in (SequentialSampler, DistributedSampler, _InfiniteConstantSampler):
        return GlobalUse.NEVER
    return GlobalUse.UNKNOWN
