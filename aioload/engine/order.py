"""Order: which finished batches may go to the consumer now."""

from aioload.engine.batch import Batch


class InOrder:
    """Batches leave by number, from 0, whichever was finished first."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Batch] = {}

    def add(self, batch: Batch) -> list[Batch]:
        """Return the batches that ``batch`` lets go, itself among them or none."""
        self._waiting[batch.number] = batch
        leaving = []
        while (head := self._waiting.pop(self._next, None)) is not None:
            leaving.append(head)
            self._next += 1
        return leaving


class AsCompleted:
    """Batches leave as they are finished."""

    def add(self, batch: Batch) -> list[Batch]:
        """Return ``batch``."""
        return [batch]
