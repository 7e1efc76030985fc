"""Delivery: finished batches are put in order, taken across to the device and handed over."""

import threading
from collections import deque
from typing import Any

from aioload.engine.batch import Batch
from aioload.engine.crossing import Crossing
from aioload.engine.handoff import Handoff
from aioload.engine.order import AsCompleted, InOrder
from aioload.errors import EngineError, ErrorContext, is_interrupt, safe_to_raise, strip


class Delivery:
    """The way of one run's batches from the threads that finished them to the consumer.

    Args:
        handoff: Where they go.
        crossing: Their way to the device, or ``None`` for the CPU.
        in_order: Whether they leave by number.
    """

    def __init__(self, handoff: Handoff, crossing: Crossing | None, *, in_order: bool) -> None:
        self.closed = False
        self._handoff, self._crossing = handoff, crossing
        self._order = InOrder() if in_order else AsCompleted()
        self._arrived: deque[Batch] = deque()
        self._lock = threading.Lock()

    def arrive(self, batch: Batch) -> None:
        """Take in a finished batch and hand over those that it lets go; drop it if closed. Never waits.

        Any thread may call it, or the loop alone where there is a device, but not the main thread, in which an
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
                if self._crossing is None:
                    self._handoff.put(leaving)
                else:
                    self._crossing.put(leaving)
        except BaseException as exc:
            if is_interrupt(exc):
                raise
            error = EngineError(f"A batch could not be handed over: {exc!r}.")
            error.__cause__ = exc
            self._handoff.break_(error)

    @property
    def num_on_device(self) -> int:
        """Batches whose copies have been issued and that the consumer has not taken yet."""
        return 0 if self._crossing is None else self._crossing.num_there

    def open(self) -> None:
        """Let batches over to the device, where the run has begun ahead of its consumer. Any thread; never waits."""
        if self._crossing is not None:
            self._crossing.open()

    def resume(self) -> None:
        """Go on with what had to wait for the consumer to take a batch. Any thread; never waits."""
        if self._crossing is not None:
            self._crossing.resume()

    def close(self) -> None:
        """Drop what arrives from now on. Any thread; never waits."""
        self.closed = True
        if self._crossing is not None:
            self._crossing.close()

    def receive(self, batch: Batch) -> Any:
        """Return what was made of the batch, or ``None`` where it has an error, or gets one here.

        In the consumer's thread. Where an interrupt cuts this short, it may be asked again.
        """
        if batch.error is not None:
            return None
        if self._crossing is not None:
            return self._crossing.receive(batch)
        try:
            return batch.unwrap()
        except Exception as exc:  # what another process has made
            batch.error, batch.context = safe_to_raise(strip(exc)), ErrorContext(list(batch.indices), None, "collate")
            return None
