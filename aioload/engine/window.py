"""Window: how far ahead of the consumer the engine may work, in batches and in bytes.

What may be is decided by pure functions; :class:`Window` keeps count, and the jobs that must wait.
"""

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

from aioload.engine.budget import Budget, pile_bytes
from aioload.readers.local import UNASKED_BYTES

NOBODY = 1 << 62
"""The number of no batch."""


def max_batches(*, prefetch_factor: int, num_workers: int, batch_size: int, num_concurrent: int) -> int:
    """Return how many batches may be under way or waiting for the consumer.

    It is torch's ``prefetch_factor * num_workers``, or more when batches are so small that fewer than
    ``num_concurrent`` samples would be in flight: reads in flight do not depend on the batch size.

    Args:
        prefetch_factor: Batches ahead per decode thread.
        num_workers: Decode threads.
        batch_size: Samples of a usual batch, 1 if unknown.
        num_concurrent: Reads (or awaited samples) that should be in flight; 0 where reads are not separate.
    """
    enough_to_read = -(-num_concurrent // max(1, batch_size))
    return max(1, prefetch_factor * num_workers, enough_to_read)


def batches_for(limit: int, batch_size: int) -> int:
    """Return how many batches must be ahead so that ``limit`` reads are always under way, and twice as many for a try.

    The batch that the consumer needs next holds up the others until its last sample is there, and while it is taken.
    """
    return -(-2 * limit // max(1, batch_size)) + 2


def batches_ahead(*, max_batches: int, batch_bytes: int, max_bytes: int) -> int:
    """Return how many batches may be ahead of the consumer, given their size.

    At least one: the batch that the consumer needs next is always allowed, however large, so nothing can wait
    for ever.

    Args:
        max_batches: Bound on batches ahead.
        batch_bytes: Bytes of the largest batch so far, 0 while unknown.
        max_bytes: Bound on the bytes of all batches ahead.
    """
    if batch_bytes <= 0:
        return max(1, max_batches)
    return max(1, min(max_batches, max_bytes // batch_bytes))


class Window:
    """The batches that may be worked on: from the one the consumer needs next up to the horizon.

    The consumer moves it on; worker threads narrow it when they see how large batches are, or when bytes in flight
    fill the budget. Then jobs wait here, in the order of their batches: those of batches beyond the horizon, and
    reads, of any batch, that are too large for now. The oldest batch that the consumer has not had waits for nobody:
    all its small samples may go on, and of those that are too large one at a time. Any thread may ask.

    Args:
        max_batches: Bound on batches ahead, which :meth:`grant` changes.
        budget: The bytes in flight, of other passes over the loader too.
        resubmit: Starts jobs that had been held back.
        call: Has a thread call a function soon where no interrupt can come; ``False`` if there is none.
        is_wanted: Whether there is a consumer already; else no batch goes on where the budget is full.
    """

    def __init__(
        self,
        max_batches: int,
        budget: Budget,
        resubmit: Callable[[list[Any]], None],
        *,
        call: Callable[[Callable[[], None]], bool] | None = None,
        is_wanted: bool = True,
    ) -> None:
        self.delivered = 0
        self.oldest = 0
        """The number of the first batch that the consumer has not had; unlike ``delivered`` also out of order."""
        self.opening: dict[int, int] = {}
        """The number of the batch for which each thread is opening a file whose size is not known yet."""
        self._max_batches, self._budget, self._resubmit, self._call = max_batches, budget, resubmit, call
        self._batch_bytes = 0
        self._ahead = max_batches
        self.is_narrow = False
        """Whether some batches that were started must wait: batches are large, or bytes in flight are too many."""
        self._num_privileged = int(is_wanted)
        self._closed = False
        # By the number of the batch, and of those of one batch as they came. Guarded by the budget's lock.
        self._held: list[tuple[int, int, Any]] = []
        self._refused: list[tuple[int, int, Any, int]] = []
        self._serial = itertools.count()
        budget.join(self)

    def __repr__(self) -> str:
        return f"<Window {self.delivered} to {self.horizon}, {len(self._held)} + {len(self._refused)} jobs held>"

    @property
    def has_jobs(self) -> bool:
        """Whether any jobs are held back."""
        return bool(self._held or self._refused)

    @property
    def reach(self) -> int:
        """The number of the first batch that must not be started yet."""
        return self.delivered + self._ahead

    @property
    def horizon(self) -> int:
        """The number of the first batch that must not be worked on yet."""
        horizon = self.delivered + self._ahead
        if self._budget.is_full:
            horizon = min(horizon, self.oldest + self._num_privileged)
        return min(horizon, self._first_refused() + 1)

    @property
    def unasked_bytes(self) -> int:
        """What a read that knows its size may bring without asking."""
        return self._budget.unasked_bytes

    @property
    def assumed_bytes(self) -> int:
        """What a read is expected to bring that does not know its size beforehand."""
        return self._budget.assumed_bytes

    @property
    def uncounted_bytes(self) -> int:
        """What a thread may have read, and not counted, before it decodes that: nothing where room is scarce."""
        return 0 if self.is_narrow else pile_bytes(self._budget.max_bytes)

    def grant(self, max_batches: int, *, is_wanted: bool = False) -> None:
        """Set the bound on batches ahead, and whether there is a consumer now."""
        self._max_batches = max_batches
        if is_wanted:
            self._num_privileged = 1
        self.note_size(self._batch_bytes)

    def note_size(self, num_bytes: int) -> None:
        """Take notice of the bytes of a batch."""
        self._batch_bytes = max(self._batch_bytes, num_bytes)
        self._ahead = batches_ahead(
            max_batches=self._max_batches,
            batch_bytes=self._batch_bytes,
            max_bytes=self._budget.batch_bytes_allowed,
        )
        with self._budget.lock:
            self.look()

    def look(self) -> None:
        """See anew whether the window is narrow. The caller has the budget's lock."""
        # Kept, since it is asked for every sample.
        self.is_narrow = self._ahead < self._max_batches or self._budget.is_full or self.has_jobs

    def note_read(self, num_bytes: int) -> None:
        """Take notice of the size of a read."""
        self._budget.note_read(num_bytes)

    def ask(self, batch: Any, num_bytes: int) -> bool:
        """Whether a read of ``num_bytes`` for ``batch`` may be begun. If so they are the batch's, until given back.

        Else the job is for :meth:`hold`, with ``num_bytes``.
        """
        with self._budget.lock:
            granted = batch.number <= self._first_refused() and self._claim(batch, num_bytes)
        if granted:
            self._budget.make_room()
        return granted

    def hold(self, job: Any, num_bytes: int = 0) -> None:
        """Keep a job until its batch, its second item, is within the window.

        Args:
            job: The job.
            num_bytes: If given, the job is kept until so many bytes are the batch's.
        """
        number, serial = job[1].number, next(self._serial)
        with self._budget.lock:
            if self._closed:
                return
            if num_bytes:
                heapq.heappush(self._refused, (number, serial, job, num_bytes))
            else:
                heapq.heappush(self._held, (number, serial, job))
            self.look()
        self.release()  # the window may have moved on meanwhile

    def release(self) -> None:
        """Start the jobs that were held and need not wait any longer."""
        if not self.has_jobs:
            return
        # An interrupt between taking a job and starting it would lose the job, and comes in the main thread.
        is_safe = threading.current_thread() is not threading.main_thread()
        if is_safe or self._call is None or not self._call(self._release):
            self._release()

    def _release(self) -> None:
        while self._held or self._refused:
            ready: list[Any] = []
            with self._budget.lock:
                while self._refused and self._claim(self._refused[0][2][1], self._refused[0][3]):
                    _move_first(self._refused, ready)
                num_claimed, horizon = len(ready), self.horizon
                while self._held and self._held[0][0] < horizon:
                    _move_first(self._held, ready)
                self.look()
            if not ready:
                return
            if num_claimed:
                self._budget.make_room()
            self._resubmit(ready)

    def clear(self) -> None:
        """Drop what is held, and hold nothing any more."""
        self._closed = True
        self._held.clear()
        self._refused.clear()
        self._budget.leave(self)

    def _first_refused(self) -> int:
        try:
            return self._refused[0][0]
        except IndexError:
            return NOBODY

    def _claim(self, batch: Any, num_bytes: int) -> bool:
        number, claim = batch.number, batch.claim
        if claim.closed:  # it is no longer wanted, and the job will see that
            return True
        is_privileged = number < self.oldest + self._num_privileged
        num_older = 0 if is_privileged else sum(each < number for each in list(self.opening.values()))
        fits = self._budget.fits(num_bytes, num_older, is_placed=claim.is_placed)
        must_go_on = is_privileged and (claim.num_raw == 0 or num_bytes <= UNASKED_BYTES)
        if fits or must_go_on:
            claim.take_raw(num_bytes)
        return fits or must_go_on


def _move_first(heap: list[Any], jobs: list[Any]) -> None:
    with contextlib.suppress(IndexError):  # a garbage collection has run a finalizer that closes the pass
        jobs.append(heapq.heappop(heap)[2])
