"""InfiniteSampler: epochs of any length, cut from one endless stream of reshuffled passes over the samples."""

from collections.abc import Iterator, Sized

import numpy as np

from aioload.arguments import seed_number, whole_number
from aioload.errors import ArgumentError
from aioload.samplers.arguments import size_of
from aioload.samplers.base import SeekableSampler, growing
from aioload.samplers.permutation import Permutation
from aioload.samplers.seekable import JSON
from aioload.samplers.streams import Stream


class InfiniteSampler(SeekableSampler[int]):
    """Epochs of exactly ``num_batches`` batches a rank, however many samples there are.

    The samples are passed over again and again, in a new random order each time. Epochs are cut from that stream, each
    where the one before ended, so after any number of them no sample has been seen more than once oftener than
    another. Ranks take turns in the stream, sample by sample.

    Args:
        data_source: The number of samples, or something that has it as its length; looked at once, here.
        batch_size: Samples in a batch of one rank.
        num_batches: Batches in an epoch of one rank.
        seed: From 0 to 2**64 - 1; the same on all ranks.
        rank: Which of the ranks this is.
        world_size: How many ranks there are.

    Raises:
        ArgumentError: A number is out of range, or there are no samples.

    A saved state fits any rank: all are equally far.
    """

    def __init__(
        self,
        data_source: int | Sized,
        *,
        batch_size: int,
        num_batches: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.num_samples = size_of(data_source)
        if self.num_samples == 0:
            msg = "InfiniteSampler needs at least one sample to repeat, got none"
            raise ArgumentError(msg)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.num_batches = whole_number("num_batches", num_batches, 1)
        self.seed = seed_number(seed)
        self.world_size = whole_number("world_size", world_size, 1)
        self.rank = whole_number("rank", rank, 0, self.world_size - 1)

    def __len__(self) -> int:
        """Return ``num_batches * batch_size``: the indices of one rank's epoch."""
        return self.num_batches * self.batch_size

    def blocks(self, epoch: int, positions: range) -> Iterator[list[int]]:
        """Yield the indices at ``positions`` of an epoch; no list reaches from one pass into the next."""
        for part in growing(positions):
            for number, places in by_pass(self._in_stream(epoch, part), self.num_samples):
                permutation = Permutation(self.num_samples, Stream.of(self.seed, number))
                yield permutation.at(np.arange(places.start, places.stop, places.step, dtype=np.int64)).tolist()

    def fingerprint(self) -> dict[str, JSON]:
        """Return all arguments but the rank."""
        names = ("num_samples", "batch_size", "num_batches", "seed", "world_size")
        return {"name": "InfiniteSampler", **{name: getattr(self, name) for name in names}}

    def _in_stream(self, epoch: int, positions: range) -> range:
        before = epoch * len(self)
        begin, end = (
            (before + position) * self.world_size + self.rank for position in (positions.start, positions.stop)
        )
        return range(begin, end, positions.step * self.world_size)


def by_pass(places: range, num_samples: int) -> Iterator[tuple[int, range]]:
    """Yield the places of the stream pass by pass: the number of the pass, and the places in it."""
    while places:
        number, begin = divmod(places.start, num_samples)
        count = min(len(places), -(-(num_samples - begin) // places.step))
        yield number, range(begin, begin + (count - 1) * places.step + 1, places.step)
        places = places[count:]
