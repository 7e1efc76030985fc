"""Window: how far ahead of the consumer the engine may work, in batches and in bytes.

What may be is decided by pure functions; :class:`Window` keeps count, and the jobs that must wait.
"""

from collections import deque
from collections.abc import Callable
from typing import Any


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

    The consumer moves it on, worker threads narrow it when they see how large batches are. Any thread may ask.

    Args:
        max_batches: Bound on batches ahead, which :meth:`grant` changes.
        max_bytes: Bound on the bytes of all batches ahead.
        resubmit: Starts jobs that had been held back.
    """

    def __init__(self, max_batches: int, max_bytes: int, resubmit: Callable[[list[Any]], None]) -> None:
        self.delivered = 0
        self._max_batches, self._max_bytes, self._resubmit = max_batches, max_bytes, resubmit
        self._batch_bytes = 0
        self._ahead = max_batches
        self._held: deque[Any] = deque()

    def __repr__(self) -> str:
        return f"<Window {self.delivered} to {self.horizon}, {len(self._held)} jobs held>"

    @property
    def is_narrow(self) -> bool:
        """Whether batches have turned out so large that some that were started must wait."""
        return self._ahead < self._max_batches

    @property
    def horizon(self) -> int:
        """The number of the first batch that must not be worked on yet."""
        return self.delivered + self._ahead

    def grant(self, max_batches: int) -> None:
        """Set the bound on batches ahead."""
        self._max_batches = max_batches
        self.note_size(self._batch_bytes)

    def note_size(self, num_bytes: int) -> None:
        """Take notice of the bytes of a batch."""
        self._batch_bytes = max(self._batch_bytes, num_bytes)
        self._ahead = batches_ahead(
            max_batches=self._max_batches, batch_bytes=self._batch_bytes, max_bytes=self._max_bytes
        )

    def hold(self, job: Any) -> None:
        """Keep a job until its batch, its second item, is within the window."""
        self._held.append(job)
        self.release()  # the window may have moved on meanwhile

    def release(self) -> None:
        """Start the jobs that were held and need not wait any longer."""
        again = bool(self._held)
        while again:
            ready: list[Any] = []
            later: list[Any] = []
            while self._held:
                try:
                    job = self._held.popleft()
                except IndexError:
                    break
                (ready if job[1].number < self.horizon else later).append(job)
            self._held.extend(later)
            if ready:
                self._resubmit(ready)
            again = any(job[1].number < self.horizon for job in later)

    def clear(self) -> None:
        """Drop what is held."""
        self._held.clear()
