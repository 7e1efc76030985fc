"""Order: which finished batches may go to the consumer now."""

from collections.abc import Iterator

from aioload.engine.batch import Batch


class InOrder:
    """Batches leave by number, from 0, whichever was finished first."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Batch] = {}

    def add(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batches that ``batch`` lets go, itself among them or none; each is gone once the next is asked for.

        So an interrupt in between loses none.
        """
        if batch.number < self._next:  # made again, after an interrupt that came when it had left
            return
        self._waiting[batch.number] = batch
        while (head := self._waiting.get(self._next)) is not None:
            yield head
            number, self._next = self._next, self._next + 1
            del self._waiting[number]


class AsCompleted:
    """Batches leave as they are finished."""

    def add(self, batch: Batch) -> Iterator[Batch]:
        """Yield ``batch``."""
        yield batch
