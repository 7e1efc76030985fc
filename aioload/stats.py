"""Stats: what each stage did and how long it took, summed without a lock and read as an immutable snapshot."""

import dataclasses
import operator
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """What a loader has done since it was made, over all its iterators. Times are summed over threads.

    Attributes:
        samples: Samples of batches that have been put together (of those not delivered yet, too).
        batches: Batches handed to the consumer.
        bytes_read: Bytes read from files, from the loader's cache among them.
        cache_hits: Reads that the loader's cache made unnecessary.
        cache_misses: Files that were read since the loader's cache did not have them.
        read_s: Seconds threads (or coroutines, waiting included) spent reading, opening and closing included.
        retries: Reads that were tried again.
        hedges: Reads that lasted so long that a second one was started beside them.
        hedges_won: Those of which the second was done first.
        read_timeouts: Reads that were given up after ``timeout_s``.
        decode_s: Seconds threads (or coroutines, waiting included) spent in ``decode``, ``__getitem__``,
            ``__getitems__`` or gathering.
        collate_s: Seconds spent writing rows, collating and building batches.
        wait_s: Seconds the consumer waited for a batch that was not there yet.
        reads_in_flight: Reads (or awaited samples) under way at this moment.
        reads_limit: Reads the loader lets be under way at present: what it has found to be best with
            ``num_concurrent_reads="auto"``, and in any case fewer, down to one, while reads are so short that threads
            would only contend for the interpreter. 0 between passes.
        decode_limit: Of the ``num_workers`` threads, those it lets be awake at present, for the same reason.
        batches_limit: Batches it lets be ahead of the consumer at present.
        device_batches: Batches that are on the device at this moment, or on their way there, and that the consumer has
            not asked for yet: at most ``num_device_batches`` for each pass.
        pinned_bytes: Bytes of page-locked memory at this moment, of batches that are ahead, on their way or, with
            ``pin_memory``, held by whoever got them, or kept for the next ones.
        bytes_in_flight: Bytes at this moment that have been read and not decoded yet, or decoded and not collated yet,
            and of batches begun or finished that the consumer has not had; of all passes that go on.
        peak_bytes_in_flight: The most there have been. See ``prefetch_bytes``.
        errors: Samples that batches handed out went without, or that others stood in for (``on_error``).
    """

    samples: int = 0
    batches: int = 0
    bytes_read: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    read_s: float = 0.0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    read_timeouts: int = 0
    decode_s: float = 0.0
    collate_s: float = 0.0
    wait_s: float = 0.0
    reads_in_flight: int = 0
    reads_limit: int = 0
    decode_limit: int = 0
    batches_limit: int = 0
    device_batches: int = 0
    pinned_bytes: int = 0
    bytes_in_flight: int = 0
    peak_bytes_in_flight: int = 0
    errors: int = 0


class Tally:
    """What one thread did. Only that thread adds to it; any thread may read it.

    Consumers share one, and so add a number that they have at hand: a call in between could let another thread in.
    """

    __slots__ = (
        "batches",
        "bytes_read",
        "cache_hits",
        "cache_misses",
        "collate_s",
        "decode_s",
        "hedges",
        "hedges_won",
        "read_s",
        "read_timeouts",
        "reads_in_flight",
        "retries",
        "samples",
        "wait_s",
    )

    def __init__(self) -> None:
        self.samples = self.batches = self.bytes_read = self.reads_in_flight = self.retries = 0
        self.hedges = self.hedges_won = self.read_timeouts = 0
        self.cache_hits = self.cache_misses = 0
        self.read_s = self.decode_s = self.collate_s = self.wait_s = 0.0


_values_of = operator.attrgetter(*Tally.__slots__)


class Ledger:
    """The tallies of all threads of a loader, dead ones folded into one.

    Attributes:
        peak_bytes_elsewhere: The most bytes in flight that the processes of one pass have told of.
    """

    def __init__(self) -> None:
        self.peak_bytes_elsewhere = 0
        self._lock = threading.Lock()
        self._open: list[Tally] = []
        self._closed = Tally()

    def open(self) -> Tally:
        """Return a new tally, for one thread."""
        tally = Tally()
        with self._lock:
            self._open.append(tally)
        return tally

    def close(self, tally: Tally) -> None:
        """Fold ``tally`` in; its thread has ended."""
        with self._lock:
            if tally in self._open:
                self._open.remove(tally)
                tally.reads_in_flight = 0  # a coroutine may have been cancelled, and not have come to say so itself
                for name in Tally.__slots__:
                    setattr(self._closed, name, getattr(self._closed, name) + getattr(tally, name))

    def sums(self) -> list[float]:
        """Return the sums, by the fields of a :class:`Tally`."""
        with self._lock:
            each = map(_values_of, [self._closed, *self._open])
            return [sum(values) for values in zip(*each, strict=True)]

    def snapshot(self, **limits: int) -> LoaderStats:
        """Return the sums, and the limits as they are."""
        sums: dict[str, Any] = dict(zip(Tally.__slots__, self.sums(), strict=True))
        stats = LoaderStats(**sums, **limits)
        return dataclasses.replace(stats, reads_in_flight=max(0, stats.reads_in_flight))
