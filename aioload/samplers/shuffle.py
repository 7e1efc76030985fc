"""ShuffleSampler: every sample once an epoch, in a random order that is computed as it is asked for."""

from collections.abc import Iterator, Sized

import numpy as np

from aioload.arguments import seed_number
from aioload.samplers.arguments import size_of
from aioload.samplers.base import SeekableSampler, growing
from aioload.samplers.permutation import Permutation
from aioload.samplers.seekable import JSON
from aioload.samplers.streams import Stream


class ShuffleSampler(SeekableSampler[int]):
    """Every sample once an epoch, in a new random order each epoch.

    No order is held: beginning, and beginning anywhere in the middle, take the same short time and the same small
    memory for any number of samples. Seed and epoch decide the order, on every platform.

    Args:
        data_source: The number of samples, or something that has it as its length; looked at once, here.
        seed: From 0 to 2**64 - 1. The same on all ranks where the samples are shared among them.

    Raises:
        ArgumentError: There is no such number or seed.
    """

    def __init__(self, data_source: int | Sized, seed: int = 0) -> None:
        super().__init__()
        self.num_samples = size_of(data_source)
        self.seed = seed_number(seed)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def blocks(self, epoch: int, positions: range) -> Iterator[list[int]]:
        """Yield the indices at ``positions`` of an epoch, in short lists and then longer ones."""
        permutation = Permutation(self.num_samples, Stream.of(self.seed, epoch))
        for part in growing(positions):
            yield permutation.at(np.arange(part.start, part.stop, part.step, dtype=np.int64)).tolist()

    def fingerprint(self) -> dict[str, JSON]:
        """Return the number of samples and the seed."""
        return {"name": "ShuffleSampler", "num_samples": self.num_samples, "seed": self.seed}
