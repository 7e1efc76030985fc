"""Delivery: finished batches are put in order, copied to the device and handed over."""

from typing import Any

from aioload.copier import Copier
from aioload.engine.batch import Batch
from aioload.engine.handoff import Handoff
from aioload.engine.order import AsCompleted, InOrder
from aioload.errors import EngineError, ErrorContext, annotate


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

    def arrive(self, batch: Batch) -> None:
        """Take in a finished batch and hand over those that it lets go; drop it if closed. On the loop thread."""
        try:
            if self.closed:
                batch.discard()
                return
            for leaving in self._order.add(batch):
                if self._copier is not None and leaving.error is None and not leaving.is_empty:
                    _copy(leaving, self._copier)
                self._handoff.put(leaving)
        except BaseException as exc:
            error = EngineError(f"The loop thread failed: {exc!r}.")
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
