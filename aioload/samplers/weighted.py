"""WeightedSampler: samples drawn with replacement, each as often as its weight says."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aioload.arguments import seed_number, whole_number
from aioload.errors import ArgumentError
from aioload.samplers.arguments import Column, column, digest
from aioload.samplers.base import SeekableSampler, growing
from aioload.samplers.seekable import JSON
from aioload.samplers.streams import Stream

BLOCK = 65536
"""Draws at a time. Sorted, they share cache lines of the search: with 10**8 weights 0.7 us a draw, not 1.8."""


class WeightedSampler(SeekableSampler[int]):
    """``num_samples`` draws an epoch with replacement, with probabilities in proportion to the weights.

    Draw number *k* of an epoch depends on seed, epoch and *k* alone. What is held is the running sum of the weights:
    8 bytes a sample.

    Args:
        weights: One number per sample, finite and not negative; they need not sum to one. Copied.
        num_samples: How many draws make an epoch.
        seed: From 0 to 2**64 - 1.

    Raises:
        ArgumentError: A weight is negative or not finite, or all are zero; or a number is out of range.
    """

    def __init__(self, weights: Column, num_samples: int, *, seed: int = 0) -> None:
        super().__init__()
        self.num_samples = whole_number("num_samples", num_samples, 0)
        self.seed = seed_number(seed)
        self._sums = running_sums(column("weights", weights))
        if self.num_samples > 0 and (self._sums.size == 0 or self._sums[-1] == 0):
            msg = f"weights must have at least one above zero to draw from, got {self._sums.size} without"
            raise ArgumentError(msg)
        self._digest: str | None = None

    def __len__(self) -> int:
        """Return the number of draws."""
        return self.num_samples

    def blocks(self, epoch: int, positions: range) -> Iterator[list[int]]:
        """Yield the draws at ``positions`` of an epoch, in short lists and then longer ones."""
        stream = Stream.of(self.seed, epoch)
        for part in growing(positions, BLOCK):
            shares = stream.uniform(np.arange(part.start, part.stop, part.step, dtype=np.uint64))
            yield draw(self._sums, shares).tolist()

    def fingerprint(self) -> dict[str, JSON]:
        """Return the numbers, the seed and a hash of the weights."""
        if self._digest is None:
            self._digest = digest(self._sums)
        return {
            "name": "WeightedSampler",
            "num_samples": self.num_samples,
            "seed": self.seed,
            "num_weights": self._sums.size,
            "weights": self._digest,
        }


def running_sums(weights: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the sums of the weights up to and with each, float64.

    Raises:
        ArgumentError: A weight, or the sum of all, is not a finite number of at least 0.
    """
    if weights.size and weights.dtype.kind not in "biuf":
        msg = f"weights must be numbers, got dtype {weights.dtype}"
        raise ArgumentError(msg)
    if weights.size and not weights.min() >= 0:  # so is a NaN anywhere
        at = int(np.argmin(weights >= 0))  # type: ignore[operator]
        msg = f"weights must be finite and not negative, got {weights[at].item()!r} at index {at}"
        raise ArgumentError(msg)
    with np.errstate(over="ignore"):
        sums = np.cumsum(weights, dtype=np.float64)
    if sums.size and not np.isfinite(sums[-1]):
        msg = f"weights must be finite and have a finite sum, got {sums[-1].item()!r}; scale them down"
        raise ArgumentError(msg)
    return sums


def draw(sums: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return, for each share of the total, the first index whose running sum is above it."""
    points = np.minimum(shares * sums[-1], np.nextafter(sums[-1], 0))  # rounding must not reach the total
    order = np.argsort(points)
    found = np.empty(points.size, dtype=np.int64)
    found[order] = np.searchsorted(sums, points[order], side="right")
    return found
