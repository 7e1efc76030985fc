"""Replay: over samplers that can only be passed over from the start, a pass that draws the same entries again."""

import contextlib
import copy
import enum
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

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

from aioload.engine.cursors import Cursor, Saved, SeekCursor, StatefulCursor, can_seek, has_state, present
from aioload.engine.epochs import batched_by_torch, links_of, seekable_in
from aioload.engine.generators import (
    StandIn,
    decoded,
    distinct,
    draw_base_seed,
    encoded,
    global_generator_in,
    in_state,
    put_back,
)
from aioload.engine.sharing import Sharing
from aioload.errors import ArgumentError, StateError
from aioload.samplers import Seekable, ShardedSampler
from aioload.samplers.fingerprints import checksum, length_of
from aioload.samplers.sharded import process_group

_DRAW_AT_FIRST = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAW_NOTHING = (list, tuple, range, SequentialSampler, DistributedSampler, _InfiniteConstantSampler)


class GlobalUse(enum.Enum):
    """When a sampler draws from torch's global generator."""

    NEVER = "never"
    AT_FIRST = "when its first entry is asked for"
    UNKNOWN = "unknown"


class ReplayCursor:
    """From the generators, epochs and states as they were at the start, the same entries are drawn again.

    Entries that had been drawn ahead are drawn again as well, since what a sampler draws later depends on it. torch's
    global generator is never left changed by that; whoever goes on elsewhere puts it back by other means.
    """

    def __init__(
        self, sampler: Any, generator: torch.Generator | None, *, epoch: int, seeds: bool, stand_in: StandIn | None
    ) -> None:
        self._sampler, self._loaders, self._epoch, self._seeds = sampler, generator, epoch, seeds
        self._stand_in = stand_in
        links = links_of(sampler)
        self._base = links[-1]
        self.generators = distinct([generator, *(getattr(link, "generator", None) for link in links)])
        self._global_use = _global_use_of(links)
        self._is_endless = type(self._base) is _InfiniteConstantSampler  # that of iterable datasets
        self._before: dict[str, Any] = {}
        self._global: torch.Tensor | None = None
        self._stateful: StatefulCursor | None = None
        self._sharing = Sharing(self.generators)
        self._draws_in_parts = _draws_in_parts(self._base)
        self._is_unknown = self._global_use is GlobalUse.UNKNOWN
        self._sums_up = self._is_unknown or self._draws_in_parts
        self._ranks = _ranks_of(links) if self._sums_up else []
        self._num_drawn = 0
        self._is_under_way = False  # whether an entry has been given
        self._sum = self._sum_at_begin = 0  # of the entries drawn, and of those before the pass went on here

    def begin(self, saved: Saved | None, done: int) -> Iterator[Any]:
        """See :class:`~aioload.engine.cursors.Cursor`."""
        if saved is not None:
            self._put_back(saved)
        self._before = self.state_at_start()
        if saved is not None and "num_asked" in saved:
            return self._watched(self._again(saved, done), max(0, saved["num_asked"] - done))
        if self._is_unknown:
            self._global = torch.default_generator.get_state()
        entries = self._open(self._sampler)
        if saved is not None and "state" in saved and not has_state(entries):
            message = (
                f"The state holds one of the sampler's iterator, and {type(entries).__name__} has no load_state_dict. "
                "Give the loader the sampler that it had when the state was saved."
            )
            raise StateError(message)
        if has_state(entries):
            self._stateful = StatefulCursor(self._sampler, self.generators)
            return self._stateful.follow(entries, saved if saved is not None and "state" in saved else None)
        return self._watched(self._noting(entries) if self._global_use is GlobalUse.AT_FIRST else entries, 0)

    @property
    def can_begin_again(self) -> bool:
        """See :class:`~aioload.engine.cursors.Cursor`."""
        if self._global_use is GlobalUse.AT_FIRST and not self._is_under_way:
            return False  # it cannot be told what has been drawn from the global generator
        return self._stateful is None and not self._is_unknown

    def seeded(self) -> None:
        """See :class:`~aioload.engine.cursors.Cursor`."""
        self._sharing.leave()

    def mark(self, entry: Any) -> Any:
        """See :class:`~aioload.engine.cursors.Cursor`."""
        self._is_under_way = True
        if self._stateful is not None:
            return self._stateful.mark(entry)
        if not self._sums_up:
            return None
        self._sum = checksum(entry, self._sum)
        return self._sum

    def state(self, done: int, num_asked: int, mark: Any) -> dict[str, Any]:
        """See :class:`~aioload.engine.cursors.Cursor`."""
        if self._stateful is not None:
            return self._stateful.state(done, num_asked, mark)
        state = {"num_asked": 0 if self._is_endless else num_asked, "seeds": self._seeds, **copy.deepcopy(self._before)}
        if self._global is not None:
            state["global_generator"] = encoded(self._global)
        if self._sums_up and done:
            state["drawn"] = {"sum": self._sum_at_begin if mark is None else mark, "ranks": self._ranks}
        return state | self._sharing.state()

    def state_at_start(self) -> dict[str, Any]:
        """See :class:`~aioload.engine.cursors.Cursor`."""
        links = links_of(self._sampler)
        epochs = epochs_of(self._sampler)
        states = [copy.deepcopy(link.state_dict()) if _has_own_state(link) else None for link in links]
        state = present(self.generators)
        if any(epoch is not None for epoch in epochs):
            state["epochs"] = epochs
        if any(each is not None for each in states):
            state["states"] = states
        return state

    def _open(self, sampler: Any) -> Iterator[Any]:
        if self._is_endless and type(sampler) in (BatchSampler, _InfiniteConstantSampler):
            # By no generator, which an interrupt would end.
            return itertools.repeat([None] * sampler.batch_size if type(sampler) is BatchSampler else None)
        if seekable_in(sampler) is None:
            return iter(sampler)
        return SeekCursor(sampler, None, self._epoch).begin(None, 0)  # draws, in its depth, from something else

    def _noting(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Note what torch's global generator, or its stand-in, is like when the first entry is asked for."""
        stand_in = None if self._stand_in is None else self._stand_in()
        generator = in_state(torch.default_generator.get_state()) if stand_in is None else stand_in
        if type(self._base) is RandomSampler:  # which draws a seed from it, and nothing else
            generator = torch.Generator().manual_seed(draw_base_seed(generator))
        self._global = generator.get_state()
        yield from entries if stand_in is None else self._open(_drawing_from(self._sampler, generator))

    def _put_back(self, saved: Saved) -> None:
        put_back(self.generators, saved.get("generators", []))
        self._seeds = saved.get("seeds", self._seeds)
        if "global_generator" in saved:
            self._global = decoded(saved["global_generator"])
        if "num_asked" in saved:
            put_back_epochs(self._sampler, saved)
        for link, state in zip(links_of(self._sampler), saved.get("states", ()), strict=False):
            if state is not None:
                link.load_state_dict(copy.deepcopy(state))

    def _watched(self, entries: Iterator[Any], num_known: int) -> Iterator[Any]:
        """Return ``entries``, of which so many have been drawn already, and see who else draws while they are drawn."""
        return self._watching(entries, num_known) if self.generators else entries

    def _watching(self, entries: Iterator[Any], num_known: int) -> Iterator[Any]:
        yield from itertools.islice(entries, num_known)
        always, last = self._is_unknown or self._draws_in_parts, length_of(self._sampler)
        for number in itertools.count(self._num_drawn):
            may_draw = always or number == 0 or last is None or number >= last - 1  # to find the end, some draw more
            if may_draw and self._sharing.has_moved():
                self._note_others(number)
            try:
                entry = next(entries)
            except StopIteration:
                return
            finally:
                if may_draw:
                    self._sharing.leave()
            yield entry

    def _note_others(self, number: int) -> None:
        self._sharing.is_shared = number > 0 or self._is_unknown
        if not self._sharing.is_shared:  # nothing has been drawn yet, so that the pass begins only now
            self._before |= present(self.generators)
            self._seeds = False

    def _again(self, saved: Saved, done: int) -> Iterator[Any]:
        """Return the entries after the first ``done`` of a pass that began elsewhere."""
        sampler = self._sampler
        if self._global is not None and self._global_use is GlobalUse.AT_FIRST and type(self._base) is RandomSampler:
            sampler = _drawing_from(sampler, in_state(self._global))
        with global_generator_in(self._global):
            entries = self._open(sampler)
            if self._seeds and (self._loaders is not None or self._global_use is GlobalUse.UNKNOWN):
                draw_base_seed(self._loaders)  # as it was drawn then, so that what follows is the same
            again = itertools.islice(entries, saved["num_asked"])
            for entry in itertools.islice(again, done):
                self.mark(entry)
            drawn = list(again)
            left = [each.get_state() for each in self.generators]  # the global one may be among them
        self._sum_at_begin, self._num_drawn = self._sum, saved["num_asked"]
        self._check_sum(saved)
        for generator, state in zip(self.generators, left, strict=True):
            generator.set_state(state)
        if "generators_now" in saved:
            put_back(self.generators, saved["generators_now"])
            self._note_others(self._num_drawn)
        if self._global is None and self._global_use is GlobalUse.AT_FIRST:
            return self._noting(entries)  # nothing had been drawn
        return itertools.chain(drawn, entries)

    def _check_sum(self, saved: Saved) -> None:
        drawn = saved.get("drawn", {"ranks": None})
        if drawn["ranks"] != self._ranks or drawn["sum"] == self._sum:  # a state fits any rank
            return
        message = (
            f"{type(self._base).__name__} draws other indices than before the state was saved, so the pass cannot go "
            "on. A sampler with random numbers of its own needs a state_dict and load_state_dict, or must draw from a "
            "torch.Generator that is its attribute 'generator', and from which nobody else draws during the pass."
        )
        raise StateError(message)


def cursor_for(
    sampler: Any,
    generator: torch.Generator | None,
    *,
    epoch: int = 0,
    seeds: bool = True,
    stand_in: StandIn | None = None,
) -> Cursor:
    """Return a cursor for a pass over ``sampler``.

    Args:
        sampler: The loader's batch sampler, or its sampler where samples are not batched.
        generator: The loader's generator.
        epoch: The number of the pass.
        seeds: Whether the pass draws a base seed for its workers.
        stand_in: Returns what torch's samplers are to draw from in place of the global generator, if anything.
    """
    if can_seek(sampler):
        return SeekCursor(sampler, generator, epoch)
    if seekable_in(sampler) is None and (has_state(sampler) or has_state(batched_by_torch(sampler))):
        return StatefulCursor(sampler, distinct([generator]))
    return ReplayCursor(sampler, generator, epoch=epoch, seeds=seeds, stand_in=stand_in)


def epochs_of(sampler: Any) -> list[int | None]:
    """Return the epochs that samplers keep for themselves."""
    return [_epoch_of(link) for link in links_of(sampler)]


def put_back_epochs(sampler: Any, saved: Saved) -> None:
    """Set the epochs that samplers keep for themselves to those that were saved."""
    set_epochs(sampler, saved.get("epochs", ()))


def set_epochs(sampler: Any, epochs: Sequence[int | None]) -> None:
    """Set the epochs that samplers keep for themselves, as :func:`epochs_of` has returned them."""
    for link, epoch in zip(links_of(sampler), epochs, strict=False):
        if epoch is not None:
            link.set_epoch(epoch)


def _draws_in_parts(sampler: Any) -> bool:
    """Whether one of torch's draws from its generator all through the pass."""
    if type(sampler) is not RandomSampler or sampler.generator is None:
        return False
    return sampler.replacement or sampler.num_samples > len(sampler.data_source)


def _ranks_of(links: list[Any]) -> list[int]:
    """Return what other ranks have other indices by: the sampler's own rank, and that of the process."""
    ranks = [rank for link in links if type(rank := getattr(link, "rank", None)) is int]
    with contextlib.suppress(ArgumentError):
        ranks.append(process_group(os.environ)[0])
    return ranks


def _epoch_of(sampler: Any) -> int | None:
    if not callable(getattr(sampler, "set_epoch", None)):
        return None
    epoch = getattr(sampler, "next_epoch" if isinstance(sampler, Seekable) else "epoch", None)
    return epoch if type(epoch) is int else None


def _has_own_state(sampler: Any) -> bool:
    return has_state(sampler) and not isinstance(sampler, Seekable)  # those have epochs


def _drawing_from(sampler: Any, generator: torch.Generator) -> Any:
    """Return a copy of a sampler that draws at first, or of samplers over one, which draws from ``generator``."""
    copied = copy.copy(sampler)
    if type(sampler) in _DRAW_AT_FIRST:
        copied.generator = generator
    else:
        copied.sampler = _drawing_from(sampler.sampler, generator)
    return copied


def _global_use_of(links: list[Any]) -> GlobalUse:
    *wrappers, base = links
    if not all(type(wrapper) in (BatchSampler, ShardedSampler) for wrapper in wrappers):
        return GlobalUse.UNKNOWN
    if type(base) in _DRAW_AT_FIRST:
        return GlobalUse.AT_FIRST if base.generator is None else GlobalUse.NEVER
    return GlobalUse.NEVER if isinstance(base, Seekable) or type(base) in _DRAW_NOTHING else GlobalUse.UNKNOWN
