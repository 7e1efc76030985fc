"""Delivery: finished batches are put in order, copied to the device and handed over."""

import threading
from collections import deque
from typing import Any

from aioload.copier import Copier
from aioload.engine.batch import Batch
from aioload.engine.handoff import Handoff
from aioload.engine.order import AsCompleted, InOrder
from aioload.errors import EngineError, ErrorContext, annotate, is_interrupt


class Delivery:
    """The way of one run's batches from the threads that finished them to the consumer.

    Args:
        handoff: Where they go.
        copier: Moves them to the device, or ``None`` for the CPU.
        in_order: Whether they leave by number.
    """

    def __init__(self, handoff: Handoff, copier: Copier | None, *, in_order: bool) -> None:
        self.closed = False
        self._handoff, self._copier = handoff, copier
        self._order = InOrder() if in_order else AsCompleted()
        self._arrived: deque[Batch] = deque()
        self._lock = threading.Lock()

    def arrive(self, batch: Batch) -> None:
        """Take in a finished batch and hand over those that it lets go; drop it if closed. Never waits.

        Any thread may call it, or the loop alone where there is a copier, but not the main thread, in which an
        interrupt could leave the lock taken. One that finds another at work leaves the batch to it, and so does a
        finalizer that a garbage collection runs in the middle of this.
        """
        self._arrived.append(batch)
        while self._arrived and self._lock.acquire(blocking=False):
            try:
                while self._arrived:
                    self._hand_over(self._arrived.popleft())
            finally:
                self._lock.release()

    def arrive_here(self, batch: Batch) -> None:
        """As :meth:`arrive`, in the consumer's thread, from which all batches of the run come.

        Raises:
            KeyboardInterrupt: The batch may arrive again; the consumer drops what it has had.
        """
        self._hand_over(batch)

    def _hand_over(self, batch: Batch) -> None:
        try:
            if self.closed:
                batch.discard()
                return
            for leaving in self._order.add(batch):
                if self._copier is not None and leaving.error is None and not leaving.is_empty:
                    _copy(leaving, self._copier)
                self._handoff.put(leaving)
        except BaseException as exc:
            if is_interrupt(exc):
                raise
            error = EngineError(f"A batch could not be handed over: {exc!r}.")
            error.__cause__ = exc
            self._handoff.break_(error)

    def receive(self, batch: Batch) -> Any:
        """Return what was made of the batch, which is the caller's, or raise its error. In the consumer's thread."""
        if batch.error is not None:
            error, batch.error = batch.error, None
            assert batch.context is not None
            annotate(error, batch.context)
            try:
                raise error
            finally:
                del error
        if self._copier is not None:
            assert batch.copied is not None
            batch.result = self._copier.receive(batch.copied)
        result, batch.result = batch.result, None
        return result


def _copy(batch: Batch, copier: Copier) -> None:
    try:
        slot, batch.slot = batch.slot, None
        if slot is None:
            batch.copied = copier.copy(batch.result)
        else:
            assert batch.layout is not None
            batch.copied = copier.copy_slot(slot, batch.layout, batch.columns, len(batch.indices))
    except BaseException as exc:
        batch.error, batch.context = exc, ErrorContext(list(batch.indices), None, "copy")
