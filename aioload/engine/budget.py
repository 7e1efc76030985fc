"""Budget: the bytes that one loader has in flight, and how many more it may take on.

In flight are *raw* bytes, from the read of a file to the end of its ``decode``; *loose* samples, decoded, which wait to
be collated; and the *whole* of batches, from their first row, or their collation, until the consumer has them.

What may be taken on is decided by pure functions. :class:`Budget` keeps the sums, :class:`Claim` those of one batch.
"""

import threading
import weakref
from typing import Protocol

from aioload.readers.local import UNASKED_BYTES

ASSUMED_BYTES = 8 << 20
"""What a read is expected to bring that does not know its size beforehand, until the first has been seen."""

ASSUMED_GROWTH = 4.0
"""Bytes that a byte is expected to become in ``decode``, until the first sample has been seen."""


_LOOKS = 256
"""Whether the budget is full is seen when bytes in flight have changed by one part in this many of it."""

_UNASKED_PART = 8
"""All reads under way that have not asked bring no more than one part in this many of the budget."""

_PARTS = 4096
"""Samples that are smaller than one part in this many of the budget are counted several at a time."""

_PILE_BYTES = 256 << 10
"""A thread reads no more than this in a row before it decodes it."""


def pile_bytes(max_bytes: int) -> int:
    """Return how many bytes a thread may have read, and not counted, before it decodes them."""
    return min(_PILE_BYTES, max_bytes // _PARTS)


def small_bytes(max_bytes: int) -> int:
    """Return how many bytes may be in flight and not be counted yet, in each batch, raw and decoded each."""
    return min(UNASKED_BYTES, max_bytes // _PARTS)


def unasked_bytes(max_bytes: int, num_reads: int) -> int:
    """Return what each of so many reads may bring without asking, so that together they are few of ``max_bytes``."""
    return min(UNASKED_BYTES, max_bytes // (_UNASKED_PART * max(1, num_reads)))


def expected_bytes(raw: int, placed: int, loose: int, whole: int, *, growth: float, num_copies: int) -> int:
    """Return what is in flight when all that has been read has been decoded and collated as well.

    Args:
        raw: Bytes that have been read, or are being read.
        placed: The same, of batches that have their rows already.
        loose: Bytes of decoded samples that are in no row of a batch.
        whole: Bytes of batches, filled or being filled.
        growth: Bytes of decoded samples that a raw byte becomes.
        num_copies: How often a loose sample exists in the end: 2 where a batch is made of copies.
    """
    return int(raw * max(1 + growth, num_copies * growth)) + placed + num_copies * loose + whole


def margin_bytes(max_bytes: int, num_makers: int, largest_sample: int) -> int:
    """Return what is kept free for samples that are being made, save one, at most half of all."""
    return min(max_bytes // 2, (num_makers - 1) * largest_sample)


def batch_bytes_allowed(max_bytes: int, num_reads: int, largest_read: int) -> int:
    """Return how many bytes batches may fill, so that reads find room beside them; at least half of all."""
    return max(max_bytes // 2, max_bytes - num_reads * largest_read)


def assumed_bytes(before: int | None, seen: int) -> int:
    """Return what the next read is expected to bring: the largest of late, which fades over a few hundred reads.

    Args:
        before: What was expected so far, ``None`` before the first read.
        seen: Bytes that were read now.
    """
    return seen if before is None else max(seen, before - (before >> 8))


class Waiting(Protocol):
    """Who may have jobs held back for want of room."""

    @property
    def has_jobs(self) -> bool:
        """Whether there are any."""
        ...

    def release(self) -> None:
        """Start those that there is room for by now."""
        ...

    def look(self) -> None:
        """Take notice of whether the budget is full. The caller has the lock."""
        ...


class Spares(Protocol):
    """Memory that is kept for reuse."""

    def trim(self, max_bytes: int) -> None:
        """Keep no more than ``max_bytes``."""
        ...


class Budget:
    """The bytes in flight of all passes over one loader. Any thread may call any method.

    Args:
        max_bytes: How many there may be; it may be set anew.
        num_makers: How many samples may be in the making at once: each is there before it is counted.
        num_reads: Reads that may be under way at once.
        num_copies: See :func:`expected_bytes`.
        spares: What is given up first where room is short.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        num_makers: int = 1,
        num_reads: int = 0,
        num_copies: int = 2,
        spares: Spares | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.raw = self.placed = self.loose = self.whole = 0
        self.num_bytes = self.peak_bytes = 0
        """Bytes in flight, now and at the most."""
        self._looked_at = 0  # bytes in flight when it was last seen whether it is full
        self.is_full = False
        """Whether only the batches that are wanted next may go on."""
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that gives bytes back.
        self.lock = threading.RLock()
        self._num_makers, self._num_reads, self._num_copies = num_makers, num_reads, num_copies
        self._spares = spares
        self._assumed: int | None = None
        self._largest_read = self._largest_sample = 0
        self._raw_passed = self._decoded = 0  # of late; their ratio is the growth
        self._waiting: list[weakref.ref[Waiting]] = []

    def __repr__(self) -> str:
        parts = f"{self.raw} + {self.placed} raw, {self.loose} loose, {self.whole} whole"
        return f"<Budget {parts}, of {self.max_bytes}{', full' if self.is_full else ''}>"

    @property
    def num_spare(self) -> int:
        """Bytes that are not in flight and could be."""
        return max(0, self.max_bytes - self.num_bytes)

    @property
    def unasked_bytes(self) -> int:
        """What a read that knows its size may bring without asking."""
        return unasked_bytes(self.max_bytes, self._num_reads)

    @property
    def assumed_bytes(self) -> int:
        """What a read is expected to bring that does not know its size beforehand."""
        if self._assumed is not None:
            return self._assumed
        return max(self.unasked_bytes + 1, min(ASSUMED_BYTES, self.max_bytes // 4))  # so that the first of all do ask

    @property
    def batch_bytes_allowed(self) -> int:
        """How many bytes batches may fill."""
        return batch_bytes_allowed(self.max_bytes, self._num_reads, self._largest_read)

    def fits(self, num_bytes: int, num_older: int, *, is_placed: bool) -> bool:
        """Whether a read may be begun, so that others of older batches, whose size is not known, still find room.

        Args:
            num_bytes: What it brings.
            num_older: How many there are of those.
            is_placed: Whether its batch has its rows already.
        """
        raw, placed = (0, num_bytes) if is_placed else (num_bytes, 0)
        return self._expected(raw + num_older * self._largest_read, placed) <= self._room()

    def note_read(self, num_bytes: int) -> None:
        """Take notice of the size of a read."""
        self._assumed = assumed_bytes(self._assumed, num_bytes)
        self._largest_read = max(self._largest_read, num_bytes)

    def note_sample(self, num_bytes: int) -> None:
        """Take notice of the size of a decoded sample."""
        self._largest_sample = max(self._largest_sample, num_bytes)

    def note_decoded(self, raw: int, decoded: int) -> None:
        """Take notice of raw bytes that have been decoded, and of what came of it; not of both at the same time."""
        # Without the lock, which many threads would wait for: a sample that is lost is no loss to the ratio.
        self._raw_passed += raw
        self._decoded += decoded
        if self._raw_passed > self.max_bytes:  # what was long ago counts for less
            self._raw_passed >>= 1
            self._decoded >>= 1

    def add(self, raw: int, placed: int, loose: int, whole: int) -> None:
        """Count bytes that have come, or gone (negative). The caller has the lock."""
        self.raw += raw
        self.placed += placed
        self.loose += loose
        self.whole += whole
        self.num_bytes = num_bytes = self.num_bytes + raw + placed + loose + whole
        if num_bytes > self.peak_bytes:
            self.peak_bytes = num_bytes
        # To look takes as long as all the rest, which each small file needs twice.
        if self.is_full or abs(num_bytes - self._looked_at) * _LOOKS > self.max_bytes:
            self._looked_at = num_bytes
            room, was_full = self._room(), self.is_full
            # Not full again at the next sample: what is held back and let go costs a little each time.
            self.is_full = self._expected() >= (room - room // 8 if was_full else room)
            if self.is_full != was_full:
                self._tell()

    def make_room(self) -> None:
        """Give up spare memory that would come on top of what is in flight."""
        if self._spares is not None:
            self._spares.trim(self.num_spare)

    def changed(self) -> None:
        """Have everybody look who waits: there may be room now."""
        for ref in self._waiting:  # which is replaced, not changed
            waiting = ref()
            if waiting is not None and waiting.has_jobs:
                waiting.release()

    def join(self, waiting: Waiting) -> None:
        """Have ``waiting`` told of changes, as long as it lives or until it leaves."""
        with self.lock:
            self._waiting = [ref for ref in self._waiting if ref() is not None] + [weakref.ref(waiting)]
            waiting.look()

    def leave(self, waiting: Waiting) -> None:
        """Tell ``waiting`` no more."""
        self._waiting = [ref for ref in self._waiting if ref() not in (None, waiting)]

    def _tell(self) -> None:
        for ref in self._waiting:
            waiting = ref()
            if waiting is not None:
                waiting.look()

    def _expected(self, raw: int = 0, placed: int = 0) -> int:
        raw_passed = self._raw_passed
        growth = self._decoded / raw_passed if raw_passed else ASSUMED_GROWTH
        return expected_bytes(
            self.raw + raw,
            self.placed + placed,
            self.loose,
            self.whole,
            growth=growth,
            num_copies=self._num_copies,
        )

    def _room(self) -> int:
        return self.max_bytes - margin_bytes(self.max_bytes, self._num_makers, self._largest_sample)


class Claim:
    """What one batch has in flight; all of it is given back when the batch is the consumer's, or nobody's.

    Args:
        budget: Whose bytes they are.
        number: The batch's place in its pass.
    """

    __slots__ = (
        "_budget",
        "_loose",
        "_raw",
        "_row_bytes",
        "_small_bytes",
        "_small_loose",
        "_small_raw",
        "_whole",
        "closed",
        "num_raw",
        "number",
    )

    def __init__(self, budget: Budget, number: int) -> None:
        self._budget, self.number = budget, number
        self._raw = self._loose = self._whole = 0
        self._small_bytes = small_bytes(budget.max_bytes)
        # Not counted yet. Without the lock, which would be taken for each sample, so that one may be lost.
        self._small_raw = self._small_loose = 0
        self._row_bytes = 0
        self.num_raw = 0
        """Large samples that have been read, or are being read, and are not decoded yet."""
        self.closed = False

    def __repr__(self) -> str:
        return f"<Claim of batch {self.number}: {self._raw} + {self._loose} + {self._whole} bytes>"

    @property
    def is_placed(self) -> bool:
        """Whether the batch has its rows already."""
        return self._row_bytes > 0

    def take_raw(self, num_bytes: int) -> None:
        """Count the bytes of a sample that is read, before or after."""
        if num_bytes <= self._small_bytes:
            self._add_small(num_bytes)
            return
        with self._budget.lock:
            if not self.closed:
                self.num_raw += 1
                self._change(num_bytes, 0, 0)

    def correct_raw(self, claimed: int, num_bytes: int) -> None:
        """Count ``num_bytes`` for a sample for which ``claimed`` were, 0 for a sample that was not counted."""
        if claimed != num_bytes:
            self.take_raw(num_bytes)
            if claimed:
                self.give_raw(claimed)

    def give_raw(self, num_bytes: int) -> None:
        """Count the bytes of a sample no longer: it is decoded, or will not be."""
        if num_bytes <= self._small_bytes:
            self._add_small(-num_bytes)
            return
        with self._budget.lock:
            if not self.closed:
                self.num_raw -= 1
                self._change(-num_bytes, 0, 0)
        self._budget.changed()

    def give_decoded(self, num_bytes: int) -> None:
        """As :meth:`give_raw`, of a sample that has been decoded."""
        self.note_decoded(num_bytes, 1)
        self.give_raw(num_bytes)

    def note_decoded(self, num_bytes: int, num_samples: int) -> None:
        """Take notice of samples that have been decoded, out of so many raw bytes."""
        self._budget.note_decoded(num_bytes, num_samples * self._row_bytes)

    def add_loose(self, num_bytes: int) -> None:
        """Count a decoded sample that waits for the others of its batch."""
        num_bytes += self._small_loose
        if num_bytes < self._small_bytes:
            self._small_loose = num_bytes
            return
        self._small_loose = 0
        with self._budget.lock:
            self._budget.note_sample(num_bytes)
            self._budget.note_decoded(0, num_bytes)
            self._change(0, num_bytes, 0)

    def set_whole(self, num_bytes: int, row_bytes: int = 0) -> None:
        """Count so many bytes for the batch itself, in rows of ``row_bytes`` if it has them."""
        with self._budget.lock:
            raw = self._raw
            self._change(-raw, 0, 0)
            self._row_bytes = row_bytes
            self._change(raw, 0, num_bytes - self._whole)
            self._budget.note_sample(row_bytes)
        self._budget.make_room()

    def finish(self, whole: int) -> None:
        """Count ``whole`` bytes for the batch itself, and no longer the samples that it was made of."""
        with self._budget.lock:
            self._change(0, -self._loose, whole - self._whole)
        self._budget.changed()

    def close(self) -> None:
        """Count nothing any more, whatever comes. Tells nobody: it may be called by a finalizer."""
        if self.closed:
            return
        with self._budget.lock:
            self._change(-self._raw, -self._loose, -self._whole)
            self.closed = True

    def __del__(self) -> None:  # where a pass is gone that was never closed
        if hasattr(self, "closed"):  # an interrupt may have come before it was made
            self.close()

    def _add_small(self, num_bytes: int) -> None:
        num_bytes += self._small_raw
        if abs(num_bytes) <= self._small_bytes:
            self._small_raw = num_bytes
            return
        self._small_raw = 0
        with self._budget.lock:
            self._change(num_bytes, 0, 0)
        if num_bytes < 0:
            self._budget.changed()

    def _change(self, raw: int, loose: int, whole: int) -> None:
        if self.closed:
            return
        self._raw += raw
        self._loose += loose
        self._whole += whole
        if self._row_bytes:
            self._budget.add(0, raw, loose, whole)
        else:
            self._budget.add(raw, 0, loose, whole)


class NotYet(BaseException):  # no error: nobody is to catch it on the way, or to try again
    """A read of ``num_bytes`` is too large to be begun now."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes
