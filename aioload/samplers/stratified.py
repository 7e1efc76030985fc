"""StratifiedBatchSampler: batches that each have every class in the share it has of all samples."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioload.arguments import seed_number, whole_number
from aioload.errors import ArgumentError
from aioload.samplers.arguments import Column, column, digest, flag
from aioload.samplers.base import SeekableSampler, growing
from aioload.samplers.bucket import BLOCK_SAMPLES, Plan
from aioload.samplers.permutation import Permutation
from aioload.samplers.seekable import JSON
from aioload.samplers.streams import Stream

SAMPLES, CLASSES, ROUNDS, WITHIN = range(4)
"""What a stream is for."""


class StratifiedBatchSampler(SeekableSampler[list[int]]):
    """Batches in which each class has its share, each sample once an epoch.

    The share of a class in a batch is the size of the batch times the class's part of all samples. Every batch has that
    many of its samples, rounded down or up. So a class of at least as many samples as there are batches is in
    each full batch. Which samples meet, and the order in and of the batches, are random; the batch that is not
    full comes last.

    Args:
        labels: One per sample: whole numbers, truth values or strings.
        batch_size: Samples in a batch.
        seed: From 0 to 2**64 - 1.
        drop_last: Leave out the batch that would not be full: other samples in each epoch, each class in its share.

    Raises:
        ArgumentError: A number is out of range, or ``labels`` has other than one dimension or is of another kind.

    Beginning anywhere takes two sorts of all samples: a few seconds for ten million.
    """

    def __init__(self, labels: Column, batch_size: int, *, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__()
        values = column("labels", labels)
        if values.size and values.dtype.kind not in "biuUS":
            msg = f"labels must be whole numbers, truth values or strings, got dtype {values.dtype}"
            raise ArgumentError(msg)
        classes, codes = np.unique(values, return_inverse=True)
        self._codes = codes.astype(np.int64)
        self.num_classes = int(classes.size)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed = seed_number(seed)
        self.drop_last = flag("drop_last", drop_last)
        self._digest: str | None = None

    def __len__(self) -> int:
        """Return the number of batches."""
        full, rest = divmod(self._codes.size, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def blocks(self, epoch: int, positions: range) -> Iterator[list[list[int]]]:
        """Yield the batches at ``positions`` of an epoch, some thousand samples at a time."""
        plan = self._plan(epoch) if positions else Plan.empty()
        for part in growing(positions, max(1, BLOCK_SAMPLES // self.batch_size)):
            yield plan.batches(part)

    def fingerprint(self) -> dict[str, JSON]:
        """Return all arguments, the labels as a hash; what classes are called does not count."""
        if self._digest is None:
            self._digest = digest(self._codes)
        return {
            "name": "StratifiedBatchSampler",
            "num_samples": self._codes.size,
            "labels": self._digest,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def _plan(self, epoch: int) -> Plan:
        num_samples = self._codes.size
        num_full = num_samples // self.batch_size

        def order(size: int, *purpose: int) -> NDArray[np.int64]:
            return Permutation(size, Stream.of(self.seed, epoch, *purpose)).whole()

        samples = order(num_samples, SAMPLES)
        samples = samples[grouped(self._codes[samples], self.num_classes)]
        quotas = Quotas.of(np.bincount(self._codes, minlength=self.num_classes), self.batch_size)
        orders = (order(num_full, ROUNDS, number) for number in range(quotas.extra.sum() // max(1, num_full)))
        batches = assigned(quotas, num_full, order(self.num_classes, CLASSES), orders)
        within = order(num_samples, WITHIN)  # or the classes would be in order in each batch
        samples = samples[within[grouped(batches[within], num_full + 1)]]
        cut = num_full * self.batch_size
        return Plan(samples[:cut].reshape(num_full, self.batch_size), samples[cut:])


def grouped(values: NDArray[np.int64], num_values: int) -> NDArray[np.int64]:
    """Return the places of ``values``, whole numbers below ``num_values``, by value; equal ones stay in order."""
    if num_values <= 2**16:
        return np.argsort(values.astype(np.uint16), kind="stable")  # a radix sort, 4 times as fast
    return np.argsort(values, kind="stable")


class Quotas(NamedTuple):
    """How many samples of each class go where; int64, one number per class.

    Attributes:
        short: In the batch that is not full.
        each: In every full batch.
        extra: In that many of the full batches, one more.
    """

    short: NDArray[np.int64]
    each: NDArray[np.int64]
    extra: NDArray[np.int64]

    @staticmethod
    def of(counts: NDArray[Any], batch_size: int) -> "Quotas":
        """Return quotas with each class's share of each batch rounded down or up, and each batch of its size.

        Whichever way its share of the short batch is rounded, the rest of a class lies between ``num_full`` times its
        share of a full batch rounded down and rounded up: these two are whole numbers around what is not rounded.

        Args:
            counts: The number of samples of each class.
            batch_size: The size of a full batch.
        """
        counts = counts.astype(np.int64)
        total = int(counts.sum())
        num_full, rest = divmod(total, batch_size)
        if total == 0 or num_full == 0:
            nothing = np.zeros_like(counts)
            return Quotas(counts, nothing, nothing)
        each = counts * batch_size // total
        short, remainder = np.divmod(counts * rest, total)
        missing = rest - int(short.sum())
        short[np.argsort(-remainder, kind="stable")[:missing]] += 1
        return Quotas(short, each, counts - short - num_full * each)


def assigned(
    quotas: Quotas, num_full: int, class_order: NDArray[np.int64], orders: Iterable[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the batch of each sample, the samples of a class one after another; ``num_full`` is the short batch.

    Args:
        quotas: How many go where.
        num_full: The number of full batches.
        class_order: The order in which the classes' extra samples are dealt out.
        orders: Random orders of the full batches, one for each extra sample that a full batch has.
    """
    counts = quotas.short + quotas.each * num_full + quotas.extra
    classes = np.repeat(np.arange(counts.size), counts)
    number = np.arange(classes.size) - (np.cumsum(counts) - counts)[classes] - quotas.short[classes]  # in its class
    batches = np.where(number < 0, num_full, number % max(1, num_full))
    extra = quotas.extra[class_order]
    begins = np.empty_like(counts)
    begins[class_order] = np.cumsum(extra) - extra
    number -= (quotas.each * num_full)[classes]
    is_extra = number >= 0
    batches[is_extra] = dealt(extra, num_full, orders)[begins[classes[is_extra]] + number[is_extra]]
    return batches


def dealt(extra: NDArray[np.int64], num_full: int, orders: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return a batch for each extra sample, class after class, so that no class has two in one batch.

    Each round gives every batch one sample, in a random order. A class that a round leaves unfinished goes on in the
    next, in batches it has not had: they are as many as it can need, for no class has as many as there are batches.

    Args:
        extra: How many samples of each class; less than ``num_full`` each, and a multiple of it in all.
        num_full: The number of batches.
        orders: As many random orders of the batches as there are rounds.
    """
    ends = np.cumsum(extra)
    rounds: list[NDArray[np.int64]] = []
    for number, order in enumerate(orders):
        begin = number * num_full
        unfinished = int(np.searchsorted(ends, begin, side="right"))  # the class that has the slot at begin
        num_before = begin - int(ends[unfinished] - extra[unfinished])
        if num_before:
            had = np.zeros(num_full, dtype=bool)
            had[rounds[-1][-num_before:]] = True
            order = order[np.argsort(had[order], kind="stable")]
        rounds.append(order)
    return np.concatenate(rounds) if rounds else np.empty(0, dtype=np.int64)
