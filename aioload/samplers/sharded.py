"""ShardedSampler: one rank's part of what another sampler yields."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any, Literal, get_args

import torch.distributed
import torch.utils.data

from aioload.arguments import whole_number
from aioload.errors import ArgumentError
from aioload.samplers.arguments import size_of
from aioload.samplers.base import SeekableSampler, growing
from aioload.samplers.fingerprints import fingerprint_of
from aioload.samplers.seekable import JSON, Seekable

Uneven = Literal["drop", "pad", "error"]


class InOrder(SeekableSampler[int]):
    """The indices of a dataset, one after the other.

    Args:
        data_source: The number of samples, or something that has it as its length.
    """

    def __init__(self, data_source: int | Sized) -> None:
        super().__init__()
        self.num_samples = size_of(data_source)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def blocks(self, epoch: int, positions: range) -> Iterator[list[int]]:
        """Yield the positions."""
        return map(list, growing(positions))

    def fingerprint(self) -> dict[str, JSON]:
        """Return the number of samples."""
        return {"name": "InOrder", "num_samples": self.num_samples}


class ShardedSampler(SeekableSampler[Any]):
    """Every ``world_size``-th item of a sampler, beginning with item number ``rank``.

    Together the ranks have all items, and each rank has equally many. Items are passed on as they come, batches of
    a batch sampler too. A saved state fits any rank: all are equally far.

    Epochs and positions are counted here, from 0 on; those of a sampler of ours are neither used nor moved, and
    beginning anywhere takes no longer than it does there. Any other sampler is passed over from its start to its end,
    after ``set_epoch`` if it has that; it must yield the same items on each rank, which torch's ``RandomSampler`` does
    only with a generator that each rank has seeded alike.

    Args:
        sampler: Any sampler, batch sampler or iterable with a length. A number, or a dataset (anything with a length
            that cannot be iterated over, or of torch's ``Dataset``), stands for its indices in order.
        rank: Which of the ranks this is. By default that of ``torch.distributed``, or else what the environment
            variable ``RANK`` says.
        world_size: How many ranks there are. By default as above, from ``WORLD_SIZE``.
        uneven: What is done when the items cannot be shared equally. ``"pad"`` yields the first ones once more, so
            no item is missed, as torch's ``DistributedSampler`` does by default; ``"drop"`` leaves out the last
            ones, fewer than ``world_size``, so no item counts twice; ``"error"`` raises.

    Raises:
        ArgumentError: Rank or world size are unknown or out of range, ``uneven`` is something else, ``sampler`` has
            no length, or the items cannot be shared equally and that is to raise.
    """

    def __init__(
        self,
        sampler: Iterable[Any] | Seekable[Any] | Sized | int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        uneven: Uneven = "pad",
    ) -> None:
        super().__init__()
        if rank is None or world_size is None:
            found = process_group(os.environ)
            rank, world_size = (found[0] if rank is None else rank), (found[1] if world_size is None else world_size)
        self.world_size = whole_number("world_size", world_size, 1)
        self.rank = whole_number("rank", rank, 0, self.world_size - 1)
        if uneven not in get_args(Uneven):
            msg = f"uneven must be 'drop', 'pad' or 'error', got {uneven!r}"
            raise ArgumentError(msg)
        self.uneven = uneven
        self.sampler: Any = InOrder(sampler) if stands_for_indices(sampler) else sampler  # type: ignore[arg-type]
        if not isinstance(self.sampler, Sized):
            msg = f"ShardedSampler needs a sampler with a length, got {sampler!r}"
            raise ArgumentError(msg)
        len(self)  # raises where it is uneven and must not be

    def __len__(self) -> int:
        """Return the number of items of each rank."""
        num_items = len(self.sampler)
        self._check_evenness(num_items)
        return num_items // self.world_size if self.uneven == "drop" else -(-num_items // self.world_size)

    def blocks(self, epoch: int, positions: range) -> Iterator[Sequence[Any]]:
        """Yield this rank's items at ``positions`` of an epoch, one at a time where the sampler is not ours."""
        if must_pass_over(self.sampler):
            yield from self._passed_over(epoch, positions)
            return
        num_items = len(self.sampler)
        mine = self._places(positions)
        inside = mine[: len(range(mine.start, min(mine.stop, num_items), mine.step))]
        again = [place % num_items for place in mine[len(inside) :]]  # one at most
        if isinstance(self.sampler, SeekableSampler):
            yield from self.sampler.blocks(epoch, inside)
            for place in again:
                yield from self.sampler.blocks(epoch, range(place, place + 1))
            return
        items = self.sampler.iter_from(epoch, min(inside.start, num_items))
        for item in islice(items, 0, len(inside) and inside[-1] + 1 - inside.start, mine.step):
            yield (item,)
        for place in again:
            yield list(islice(self.sampler.iter_from(epoch, place), 1))

    def fingerprint(self) -> dict[str, JSON]:
        """Return the arguments but the rank; of a sampler that is neither ours nor torch's, its class and length."""
        return {
            "name": "ShardedSampler",
            "world_size": self.world_size,
            "uneven": self.uneven,
            "sampler": fingerprint_of(self.sampler),
        }

    def _passed_over(self, epoch: int, positions: range) -> Iterator[Sequence[Any]]:
        """As :meth:`blocks`, in one pass over the sampler, from its start and to its end.

        The end is asked for, as a loader does: that is where samplers count their passes, or set their place back.
        What comes after as many items as the sampler says it has is left alone: it may never end.
        """
        num_items, num_passed, first = len(self.sampler), count(), list[Any]()
        items = self._opened(epoch)
        within = islice(items, num_items)
        noted = chain(_noting(islice(within, self.world_size), first), within)  # what padding may repeat
        passed = map(itemgetter(0), zip(noted, num_passed, strict=False))
        mine = self._places(positions)
        last = mine[-1] if mine else -1
        for item in islice(passed, mine.start, max(min(last + 1, num_items), mine.start), mine.step):
            yield (item,)
        if positions.stop < len(self):
            return
        deque(passed, maxlen=0)
        num_found = next(num_passed)
        if num_found == num_items:
            next(items, None)
        self._check_evenness(num_found)
        num_rounds = -(-num_found // self.world_size)
        place = self.rank + (num_rounds - 1) * self.world_size
        if self.uneven == "pad" and num_rounds - 1 in positions and place >= num_found:
            yield (first[place % num_found],)

    def _opened(self, epoch: int) -> Iterator[Any]:
        if isinstance(self.sampler, Seekable):
            return self.sampler.iter_from(epoch, 0)
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)
        return iter(self.sampler)

    def _places(self, positions: range) -> range:
        """Return which of the sampler's items these are; beyond its last one, those that repeat the first."""
        step = self.world_size
        return range(self.rank + positions.start * step, self.rank + positions.stop * step, positions.step * step)

    def _check_evenness(self, num_items: int) -> None:
        if self.uneven == "error" and num_items % self.world_size:
            msg = (
                f"{num_items} items cannot be shared equally among {self.world_size} ranks; "
                "choose uneven='drop' or uneven='pad', or another number of samples or ranks"
            )
            raise ArgumentError(msg)


def _noting(items: Iterable[Any], noted: list[Any]) -> Iterator[Any]:
    for item in items:
        noted.append(item)
        yield item


def must_pass_over(sampler: object) -> bool:
    """Whether items cannot be asked for by position: those of a sampler that is not ours, itself or sharded."""
    while isinstance(sampler, ShardedSampler):
        sampler = sampler.sampler
    return not isinstance(sampler, Seekable)


def stands_for_indices(sampler: object) -> bool:
    """Whether what is to be sharded is a dataset, or a number of samples, rather than a sampler."""
    if isinstance(sampler, torch.utils.data.Dataset):
        return not isinstance(sampler, torch.utils.data.IterableDataset)
    return not isinstance(sampler, Iterable | Seekable)


def process_group(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        ArgumentError: Neither ``torch.distributed`` nor the environment says.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        found = {name: environment.get(name) for name in ("RANK", "WORLD_SIZE")}
        msg = (
            "ShardedSampler needs rank and world_size: pass both, or initialise torch.distributed first, "
            f"or start with torchrun, which sets RANK and WORLD_SIZE; got {found!r} in the environment"
        )
        raise ArgumentError(msg) from error
