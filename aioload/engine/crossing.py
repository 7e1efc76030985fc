"""Crossing: finished batches go over to the device, few ahead of the consumer, and are handed over.

A batch is handed over as soon as its copy has been issued; the consumer's stream waits for the rest. At most
``num_batches`` are handed over and not taken yet, and as many copies are under way, also those of batches that have
been taken: so device memory, and slots that are still being read, are bounded however fast the consumer takes them.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from aioload.copier import Copier
from aioload.device import Event
from aioload.engine.batch import Batch
from aioload.engine.handoff import Handoff
from aioload.errors import ErrorContext, safe_to_raise, strip


class Crossing:
    """The way of one run's batches over to the device.

    Args:
        handoff: Where they go.
        copier: Moves them.
        call: Has the loop call a function soon. Any thread may call it.
        num_batches: Batches that may be there ahead of the consumer.
    """

    def __init__(
        self, handoff: Handoff, copier: Copier, call: Callable[[Callable[[], None]], object], *, num_batches: int
    ) -> None:
        self._handoff, self._copier, self._call, self._num_batches = handoff, copier, call, num_batches
        self._waiting: deque[Batch] = deque()
        self._events: deque[Event] = deque()  # of copies that were under way when we last looked
        self._is_watching = self._is_broken = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Crossing waiting={len(self._waiting)} copying={len(self._events)}>"

    def put(self, batch: Batch) -> None:
        """Take in the next batch, and let over those that may go. On the loop thread only; never waits."""
        self._waiting.append(batch)
        if self._closed:  # perhaps since a moment ago
            self.close()
        self._let_over()

    def resume(self) -> None:
        """Have the loop look again: the consumer has taken a batch, or is about to wait for one. Any thread."""
        if self._waiting:
            self._call(self._let_over)

    def close(self) -> None:
        """Discard what is waiting, and what comes. Any thread."""
        self._closed = True
        while (batch := self._next_waiting()) is not None:
            batch.discard()

    def receive(self, batch: Batch) -> Any:
        """Return what was copied, which the consumer's current stream waits for. In the consumer's thread.

        What goes wrong is the batch's error.
        """
        copied, batch.copied = batch.copied, None
        assert copied is not None
        stage = "copy"
        try:
            value = self._copier.receive(copied)
            if copied.is_partial:
                stage = "device_transform"
                value = self._copier.transform_here(value)
        except Exception as exc:
            _fail(batch, exc, stage)
            return None
        return value

    def _let_over(self) -> None:
        while self._waiting and self._has_room():
            batch = self._next_waiting()
            if batch is None:  # closed at this moment
                return
            if batch.error is None and not batch.is_empty:
                self._copy(batch)
            self._handoff.put(batch)

    def _next_waiting(self) -> Batch | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _has_room(self) -> bool:
        if len(self._handoff) >= self._num_batches:  # taking one resumes
            return False
        while self._events and _has_passed(self._events[0]):
            self._events.popleft()
        if len(self._events) < self._num_batches or self._is_broken:
            return True
        return not self._watch(self._events[0])

    def _watch(self, event: Event) -> bool:
        """Have the loop look again when ``event`` has passed; ``False`` if there is no thread to be had for that.

        This is where the consumer, or the loader, is faster than the copies: nobody has anything else to do.
        """
        if self._is_watching:
            return True
        # No daemon: one that woke up while the interpreter ends would be killed within torch. Copies are soon done.
        thread = threading.Thread(target=self._wait_for, args=(event,), name="aioload-copies", daemon=False)
        self._is_watching = True
        try:
            thread.start()
        except RuntimeError:
            self._is_watching = False
            return False
        return True

    def _wait_for(self, event: Event) -> None:
        try:
            event.synchronize()
        except Exception:  # as the next copy will find
            self._is_broken = True
        finally:
            self._is_watching = False
            self._call(self._let_over)

    def _copy(self, batch: Batch) -> None:
        slot, batch.slot = batch.slot, None
        stage = "copy"
        try:
            if slot is None:
                copied = self._copier.copy(batch.result)
            elif batch.bundle is not None:
                copied = self._copier.copy_bundle(slot, batch.bundle)
            else:
                assert batch.layout is not None
                copied = self._copier.copy_slot(slot, batch.layout, batch.columns, len(batch.indices))
            self._events.append(copied.event)
            stage = "device_transform"
            batch.copied = self._copier.transform(copied)
        except BaseException as exc:
            _fail(batch, exc, stage)
        batch.result, batch.bundle, batch.columns = None, None, []


def _fail(batch: Batch, exc: BaseException, stage: str) -> None:
    batch.error, batch.context = safe_to_raise(strip(exc)), ErrorContext(list(batch.indices), None, stage)


def _has_passed(event: Event) -> bool:
    try:
        return event.query()
    except Exception:  # it is broken, as the next copy will find
        return True
