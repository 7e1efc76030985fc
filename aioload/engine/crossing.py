"""Crossing: finished batches go over to the device, few ahead of the consumer, and are handed over.

A batch is handed over as soon as its copy has been issued; the consumer's stream waits for the rest. At most
``num_batches`` are handed over and not taken yet, and as many copies are under way, also those of batches that have
been taken; and none is begun while the device is several batches behind the consumer, whose memory it still needs then.
So device memory, and slots that are still being read, are bounded however fast the consumer takes them.
"""

import atexit
import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from aioload.context import HERE, Stage
from aioload.copier import MOST_BEHIND, Copier
from aioload.device import Event
from aioload.engine.batch import Batch
from aioload.engine.handoff import Handoff
from aioload.errors import ErrorContext, safe_to_raise, strip

_EXIT_TIMEOUT_S = 1.0


class Crossing:
    """The way of one run's batches over to the device.

    Args:
        handoff: Where they go.
        copier: Moves them.
        call: Has the loop call a function soon. Any thread may call it.
        num_batches: Batches that may be there ahead of the consumer.
        is_open: Whether there is a consumer; else all wait for :meth:`open`.
    """

    def __init__(
        self,
        handoff: Handoff,
        copier: Copier,
        call: Callable[[Callable[[], None]], object],
        *,
        num_batches: int,
        is_open: bool = True,
    ) -> None:
        self._handoff, self._copier, self._call, self._num_batches = handoff, copier, call, num_batches
        self._waiting: deque[Batch] = deque()
        self._events: deque[Event] = deque()  # of copies that were under way when we last looked
        self._uses: deque[Event] = deque()  # each behind what the consumer issued with the batches before one
        self._is_watching = self._is_broken = False
        self._closed, self._is_open = False, is_open

    def __repr__(self) -> str:
        return f"<Crossing waiting={len(self._waiting)} copying={len(self._events)}>"

    def put(self, batch: Batch) -> None:
        """Take in the next batch, and let over those that may go. On the loop thread only; never waits."""
        self._waiting.append(batch)
        if self._closed:  # perhaps since a moment ago
            self.close()
        self._let_over()

    @property
    def num_there(self) -> int:
        """Batches whose copies have been issued and that the consumer has not taken yet."""
        return self._handoff.count(lambda batch: batch.copied is not None)

    def open(self) -> None:
        """Let batches over from now on. Any thread."""
        self._is_open = True
        self.resume()

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

        What goes wrong is the batch's error. Where an interrupt cuts this short, it may be asked again.
        """
        copied = batch.copied
        assert copied is not None
        stage = "copy"
        try:
            self._uses.append(self._copier.mark())
            value = self._copier.receive(copied)
            if copied.is_partial:
                stage = "device_transform"
                with _working_for(batch):
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
        if not self._is_open or len(self._handoff) >= self._num_batches:  # taking one resumes
            return False
        for events, most in ((self._events, self._num_batches), (self._uses, MOST_BEHIND)):
            while events and _has_passed(events[0]):
                events.popleft()
            if len(events) >= most and not self._is_broken and self._watch(events[0]):
                return False
        return True

    def _watch(self, event: Event) -> bool:
        """Have the loop look again when ``event`` has passed; ``False`` if there is no thread to be had for that.

        This is where the consumer, or the loader, is faster than the copies: nobody has anything else to do.
        """
        if self._is_watching:
            return True
        thread = threading.Thread(target=self._wait_for, args=(event,), name="aioload-copies", daemon=True)
        self._is_watching = True
        try:
            thread.start()
        except RuntimeError:
            self._is_watching = False
            return False
        _watching.add(thread)
        _join_at_exit()
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
            with _working_for(batch):
                batch.copied = self._copier.transform(copied)
        except BaseException as exc:
            _fail(batch, exc, stage)
        batch.result, batch.bundle, batch.columns = None, None, []


def _fail(batch: Batch, exc: BaseException, stage: str) -> None:
    recipe, indices = batch.recipe, list(batch.indices)
    index, where = (indices, None) if recipe.batched else (indices[0], recipe.locate(indices[0]))
    batch.error, batch.context = safe_to_raise(strip(exc)), ErrorContext(index, where, stage)


@contextlib.contextmanager
def _working_for(batch: Batch) -> Iterator[None]:
    """Have what runs meanwhile work for a batch as a whole, in no worker."""
    token = HERE.set([batch.recipe.context, None, Stage.BATCH, None, None])
    try:
        yield
    finally:
        HERE.reset(token)


_watching: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@functools.cache
def _join_at_exit() -> None:
    """Arrange it, once in a process and those forked from it."""
    atexit.register(_join)


def _join() -> None:
    """Wait a little for threads that wait for copies, which are soon done, unless the device hangs.

    A daemon thread that wakes up while the interpreter ends would be killed within torch.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for thread in list(_watching):
        if thread.is_alive():  # which after a fork it is not
            thread.join(max(0.0, deadline - time.monotonic()))


def _has_passed(event: Event) -> bool:
    try:
        return event.query()
    except Exception:  # it is broken, as the next copy will find
        return True
