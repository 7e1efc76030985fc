"""Cursors: how a pass over a sampler begins, and begins again in the middle, by kind of sampler.

A cursor belongs to one pass. It yields the sampler's entries (index batches, or indices), and tells what a new pass
needs to know to go on after any number of them.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from aioload.engine.epochs import batched_by_torch, seekable_in
from aioload.engine.generators import distinct, encoded, put_back
from aioload.samplers import Seekable

Saved = Mapping[str, Any]


class Cursor(Protocol):
    """A pass over a sampler.

    Attributes:
        generators: Those whose states it keeps.
    """

    generators: list[torch.Generator]

    @property
    def can_begin_again(self) -> bool:
        """Whether the sampler is certain to give the same entries to another cursor, by :meth:`state`."""
        ...

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """Return the entries, or those after the first ``done`` of them, by what :meth:`state` returned then."""
        ...

    def seeded(self) -> None:
        """Note that the base seed has been drawn, if one is: from now on only the sampler draws."""
        ...

    def mark(self, entry: Any) -> Any:
        """Return what belongs to the place behind ``entry``, the one drawn last, if that must be kept."""
        ...

    def state(self, done: int, num_asked: int, mark: Any) -> dict[str, Any]:
        """Return, for JSON, what begins the pass again after ``done`` entries, of ``num_asked`` asked for so far."""
        ...

    def state_at_start(self) -> dict[str, Any]:
        """Return, for JSON, what begins the pass, if it has not begun yet."""
        ...


class SeekCursor:
    """Over a sampler that can begin anywhere: our own ones and torch's sequential one."""

    can_begin_again = True

    def __init__(self, sampler: Any, generator: torch.Generator | None, epoch: int) -> None:
        self.generators = distinct([generator])
        self._batches: BatchSampler | None = sampler if type(sampler) is BatchSampler else None
        self._seekable = batched_by_torch(sampler)
        self._epoch = epoch
        self._origin = self._done = 0

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """See :class:`Cursor`."""
        if saved is None:
            self._origin = self._position()
        else:
            put_back(self.generators, saved.get("generators", []))
            self._origin = saved["position"]
        self._done = done
        if isinstance(self._seekable, Seekable):
            indices: Any = self._seekable.iter_from(self._epoch, self._origin)
        else:
            indices = _InOrder(self._seekable, self._origin)
        if self._batches is None:
            return _lazily(indices)
        return iter(BatchSampler(indices, self._batches.batch_size, self._batches.drop_last))

    def seeded(self) -> None:
        """See :class:`Cursor`."""

    def mark(self, entry: Any) -> None:
        """See :class:`Cursor`."""

    def state(self, done: int, num_asked: int, mark: Any) -> dict[str, Any]:
        """See :class:`Cursor`."""
        step = 1 if self._batches is None else self._batches.batch_size
        position = min(self._origin + step * (done - self._done), len(self._seekable))
        return {"position": position, **present(self.generators)}

    def state_at_start(self) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {"position": self._position(), **present(self.generators)}

    def _position(self) -> int:
        return self._seekable.next_position if isinstance(self._seekable, Seekable) else 0


class StatefulCursor:
    """Over a sampler that has a ``state_dict`` of its own, or whose iterator has.

    Args:
        sampler: The sampler, or torch's batch sampler over it.
        generators: Those whose states are kept beside the sampler's own, as they are when its state is asked for.
    """

    can_begin_again = False

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.generators = generators
        self._sampler, self._inner = sampler, batched_by_torch(sampler)
        self._owner = next((each for each in (sampler, self._inner) if has_state(each)), None)
        self._first: Any = None
        self._ended = False

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """See :class:`Cursor`."""
        if saved is not None:
            put_back(self.generators, saved.get("generators", []))
            if self._owner is not None:
                self._owner.load_state_dict(copy.deepcopy(saved["state"]))
            self._ended = saved.get("ended", False)
        return self.follow(iter(()) if self._ended else self._opened(), saved)

    def follow(self, entries: Iterator[Any], saved: Saved | None) -> Iterator[Any]:
        """Return ``entries``, and ask them for states if they have any."""
        if has_state(entries):
            self._owner = entries
            if saved is not None:
                entries.load_state_dict(copy.deepcopy(saved["state"]))  # type: ignore[attr-defined]
        self._first = self.own_state()
        return entries

    def seeded(self) -> None:
        """See :class:`Cursor`."""

    def mark(self, entry: Any) -> Any:
        """See :class:`Cursor`."""
        return self.own_state()

    def own_state(self) -> dict[str, Any]:
        """Return the state as it is."""
        assert self._owner is not None
        mark = {"state": copy.deepcopy(self._owner.state_dict())}  # it may go on changing
        return {**mark, "ended": True} if self._ended else mark

    def state(self, done: int, num_asked: int, mark: Any) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {**copy.deepcopy(self._first if mark is None else mark), **present(self.generators)}

    def state_at_start(self) -> dict[str, Any]:
        """See :class:`Cursor`."""
        return {**self.own_state(), **present(self.generators)}

    def _opened(self) -> Iterator[Any]:
        if self._owner is self._sampler or type(self._sampler) is not BatchSampler:
            return iter(self._sampler)
        return iter(BatchSampler(self._until_end(), self._sampler.batch_size, self._sampler.drop_last))

    def _until_end(self) -> Iterator[Any]:
        """Yield the indices and note the end, which a short last batch brings: the state is of the next pass then."""
        yield from self._inner
        self._ended = True


def has_state(thing: Any) -> bool:
    """Whether ``thing`` saves and loads a state of its own."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def can_seek(sampler: Any) -> bool:
    """Whether a pass over ``sampler``, or a torch batch sampler over one, can begin anywhere, and draws nothing."""
    inner = batched_by_torch(sampler)
    if type(inner) is SequentialSampler:
        return True
    seekable = seekable_in(sampler)
    return seekable is not None and _is_pure(seekable)


def present(generators: list[torch.Generator]) -> dict[str, Any]:
    """Return, for JSON, the states of generators, if there are any."""
    return {"generators": [encoded(each.get_state()) for each in generators]} if generators else {}


def _is_pure(sampler: Any) -> bool:
    """Whether the items are those of the epoch and position alone, also those that a sharded sampler passes on."""
    base = getattr(sampler, "sampler", None)
    if base is None or isinstance(base, list | tuple | range) or type(base) is SequentialSampler:
        return True
    return isinstance(base, Seekable) and _is_pure(base)


def _lazily(entries: Iterable[Any]) -> Iterator[Any]:
    yield from entries


class _InOrder:
    """The indices from a position on. How many there are is not asked before the first: the dataset may not know."""

    def __init__(self, sampler: SequentialSampler, position: int) -> None:
        self._sampler, self._position = sampler, position

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._sampler))[self._position :])
