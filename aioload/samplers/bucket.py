"""BucketBatchSampler: batches of samples of similar length, so that little is padded."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioload.arguments import seed_number, whole_number
from aioload.errors import ArgumentError
from aioload.samplers.arguments import Column, column, digest, flag
from aioload.samplers.base import SeekableSampler, growing
from aioload.samplers.permutation import Permutation
from aioload.samplers.seekable import JSON
from aioload.samplers.streams import Stream

SAMPLES, BATCHES, SHORT = range(3)
"""What a stream is for."""

BLOCK_SAMPLES = 8192


class BucketBatchSampler(SeekableSampler[list[int]]):
    """Batches of samples of similar length, each sample once an epoch.

    The samples are shuffled and cut into buckets of ``num_batches_per_bucket`` batches. Each bucket is sorted by length
    and cut into batches; then the batches are shuffled, and the samples in each. More batches a bucket: less padding,
    and less chance in which samples meet. A batch that is not full comes last, of any lengths that come to it.

    Args:
        lengths: One number per sample, finite and not negative. Copied.
        batch_size: Samples in a batch.
        seed: From 0 to 2**64 - 1.
        drop_last: Leave out the batch that would not be full: other samples in each epoch.
        num_batches_per_bucket: How many batches are sorted together.
        shuffle: False keeps buckets of samples in the order of the data, sorted, the same each epoch.

    Raises:
        ArgumentError: A number is out of range, or ``lengths`` has other than one dimension.

    Beginning anywhere takes a sort of all lengths: about a second for ten million.
    """

    def __init__(
        self,
        lengths: Column,
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
        num_batches_per_bucket: int = 100,
        shuffle: bool = True,
    ) -> None:
        super().__init__()
        self.lengths = _checked(column("lengths", lengths))
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed = seed_number(seed)
        self.drop_last = flag("drop_last", drop_last)
        self.num_batches_per_bucket = whole_number("num_batches_per_bucket", num_batches_per_bucket, 1)
        self.shuffle = flag("shuffle", shuffle)
        self._digest: str | None = None

    def __len__(self) -> int:
        """Return the number of batches."""
        full, rest = divmod(self.lengths.size, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def blocks(self, epoch: int, positions: range) -> Iterator[list[list[int]]]:
        """Yield the batches at ``positions`` of an epoch, some thousand samples at a time."""
        plan = self._plan(epoch) if positions else Plan.empty()
        for part in growing(positions, max(1, BLOCK_SAMPLES // self.batch_size)):
            yield plan.batches(part)

    def fingerprint(self) -> dict[str, JSON]:
        """Return all arguments, the lengths as a hash."""
        if self._digest is None:
            self._digest = digest(self.lengths)
        names = ("batch_size", "seed", "drop_last", "num_batches_per_bucket", "shuffle")
        arguments: dict[str, JSON] = {name: getattr(self, name) for name in names}
        return {
            "name": "BucketBatchSampler",
            "num_samples": self.lengths.size,
            "lengths": self._digest,
            **arguments,
        }

    def padding_waste(self, epoch: int | None = None) -> float:
        """Return the share of padding if each batch is padded to the longest of its samples, from 0 up to 1.

        Args:
            epoch: Which; by default the one that ``epoch`` names.
        """
        plan = self._plan(self.epoch if epoch is None else whole_number("epoch", epoch, 0))
        used = padded = 0.0
        for samples in (plan.full, plan.short[np.newaxis, :]):
            if samples.size:
                lengths = self.lengths[samples]
                used += float(lengths.sum(dtype=np.float64))
                padded += float(lengths.max(axis=1).sum(dtype=np.float64)) * samples.shape[1]
        return 1.0 - used / padded if padded > 0 else 0.0

    def _plan(self, epoch: int) -> "Plan":
        num_samples = self.lengths.size
        samples = np.arange(num_samples, dtype=np.int64)
        num_full, rest = divmod(num_samples, self.batch_size)
        if self.shuffle:
            samples = Permutation(num_samples, Stream.of(self.seed, epoch, SAMPLES)).whole()
        if self.drop_last:
            samples, rest = samples[: num_full * self.batch_size], 0
        ranks = sorted_in_buckets(self.lengths[samples], self.batch_size * self.num_batches_per_bucket)
        begin = num_full * self.batch_size
        if self.shuffle and rest:  # of any lengths of the last bucket, or the longest would always be in it
            in_bucket = num_full % self.num_batches_per_bucket * self.batch_size
            begin -= Stream.of(self.seed, epoch, SHORT).word(0) % (in_bucket + 1)
        full = np.delete(ranks, np.s_[begin : begin + rest]).reshape(num_full, self.batch_size)
        short = ranks[begin : begin + rest]
        if self.shuffle:  # the places before sorting are random, so their order is
            full = np.sort(full, axis=1)[Permutation(num_full, Stream.of(self.seed, epoch, BATCHES)).whole()]
            short = np.sort(short)
        return Plan(samples[full], samples[short])


class Plan(NamedTuple):
    """The batches of an epoch.

    Attributes:
        full: int64 of shape ``(num_full, batch_size)``.
        short: int64 of fewer than ``batch_size``: the batch after these, if there is one.
    """

    full: NDArray[np.int64]
    short: NDArray[np.int64]

    @staticmethod
    def empty() -> "Plan":
        """Return the plan of no samples."""
        return Plan(np.empty((0, 1), dtype=np.int64), np.empty(0, dtype=np.int64))

    def batches(self, positions: range) -> list[list[int]]:
        """Return the batches at these positions, which rise."""
        wanted = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        batches: list[list[int]] = self.full[wanted[wanted < len(self.full)]].tolist()
        if positions and positions[-1] == len(self.full):
            batches.append(self.short.tolist())
        return batches


def sorted_in_buckets(lengths: NDArray[Any], bucket_size: int) -> NDArray[np.int64]:
    """Return the places of ``lengths`` bucket by bucket, in each by length; equal ones stay in order."""
    num_whole = lengths.size // bucket_size
    cut = num_whole * bucket_size
    whole = np.argsort(lengths[:cut].reshape(num_whole, bucket_size), axis=1, kind="stable")
    whole += np.arange(0, cut, bucket_size)[:, np.newaxis]
    return np.concatenate([whole.ravel(), np.argsort(lengths[cut:], kind="stable") + cut])


def _checked(lengths: NDArray[Any]) -> NDArray[Any]:
    if lengths.size == 0:
        return np.empty(0, dtype=np.int64)
    if lengths.dtype.kind not in "iuf":
        msg = f"lengths must be numbers, got dtype {lengths.dtype}"
        raise ArgumentError(msg)
    good = (lengths >= 0) & np.isfinite(lengths)
    if not good.all():
        at = int(np.argmin(good))
        msg = f"lengths must be finite and not negative, got {lengths[at].item()!r} at index {at}"
        raise ArgumentError(msg)
    return lengths.astype(np.float64 if lengths.dtype.kind == "f" else np.int64)
