"""Batch: one batch under way, from its indices to what the consumer gets.

Its states::

          last sample added, or the error that comes first is certain
    OPEN ------------------------------------------------------------> DONE
      |                                                                 |
      +--------------------- cancel ----------> CANCELLED <-------------+

Threads add samples in any order; exactly one call of :meth:`Batch.add` or :meth:`Batch.fail` answers that the
batch is complete, and its caller must then call :meth:`Batch.finish`. A slot goes back to the ring only when no
thread can still be writing a row of it.
"""

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from aioload.collate import collate_samples, convert_sample
from aioload.copier import Copied
from aioload.errors import ErrorContext, safe_to_raise
from aioload.layout import Column, Layout
from aioload.ring import Ring, Slot
from aioload.stats import Tally


class BatchState(enum.Enum):
    """How far a batch is."""

    OPEN = "open"
    DONE = "done"
    CANCELLED = "cancelled"


class Recipe:
    """How the batches of one pass are made. ``layout`` is that of the batch seen last, shared by all.

    Args:
        collate_fn: torch's default or the user's.
        batched: Whether samples are collated (``False``: ``batch_size=None``, one sample is the batch).
        by_rows: Whether samples may be written into rows of a slot.
        on_device: Whether a copier takes the slot over, so that it is sealed and not lent.
        pin: Whether what did not go through a slot is to be copied into page-locked memory.
        ring: Where slots come from.
        locate: Returns the path of a sample, or ``None``.
        on_size: Told the bytes of a batch when they are known.
    """

    def __init__(
        self,
        *,
        collate_fn: Callable[[Any], Any],
        batched: bool,
        by_rows: bool,
        on_device: bool,
        pin: bool,
        ring: Ring,
        locate: Callable[[Any], Any],
        on_size: Callable[[int], None],
    ) -> None:
        self.collate_fn, self.batched, self.by_rows = collate_fn, batched, by_rows
        self.on_device, self.pin, self.ring = on_device, pin, ring
        self.locate, self.on_size = locate, on_size
        self.layout: Layout | None = None


class Batch:
    """One batch under way.

    Args:
        number: Its place in the pass, from 0.
        indices: The indices of its samples (one where samples are not batched).
        recipe: How it is made.
        on_done: Called once, by the thread that finished it.
    """

    def __init__(self, number: int, indices: Sequence[Any], recipe: Recipe, on_done: Callable[["Batch"], None]) -> None:
        self.number, self.indices, self.recipe = number, indices, recipe
        self.state = BatchState.OPEN
        self.result: Any = None
        self.error: BaseException | None = None
        self.context: ErrorContext | None = None
        self.is_end = False  # an iterable dataset ended before this batch
        self.copied: Copied | None = None  # where a copier has been at work
        self.slot: Slot | None = None
        self.layout: Layout | None = None
        self.columns: list[Column] = []
        self._on_done = on_done
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that cancels batches.
        self._lock = threading.RLock()
        self._error_position = len(indices)
        self._settled = bytearray(len(indices))
        self._num_left = len(indices)
        self._has_layout = recipe.by_rows
        self._loose: dict[int, Any] = {}  # samples that are in no row, by position

    def __repr__(self) -> str:
        return f"<Batch {self.number} {self.state.value} {self._num_left}/{len(self.indices)} left>"

    def wants(self, position: int) -> bool:
        """Whether it is worth loading this sample; if not, :meth:`drop` must be called instead."""
        return self.state is BatchState.OPEN and position < self._error_position

    def add(self, position: int, sample: Any, tally: Tally) -> bool:
        """Take over a sample; return whether the batch is complete."""
        started = time.perf_counter()
        if not self._has_layout or not self._write(position, sample):
            self._loose[position] = sample
        complete = self._settle(position)
        tally.samples += 1
        tally.collate_s += time.perf_counter() - started
        return complete

    def fail(self, position: int, exc: BaseException, stage: str) -> bool:
        """Note that a sample failed; return whether the batch is complete. The lowest position counts."""
        with self._lock:
            if position < self._error_position:
                index = self.indices[position]
                self._error_position = position
                self._set_error(exc, ErrorContext(index, self.recipe.locate(index), stage))
        return self._settle(position)

    def drop(self, position: int) -> bool:
        """Settle a sample that nobody needs; return whether the batch is complete."""
        return self._settle(position)

    def fail_whole(self, exc: BaseException, stage: str, index: Any = None) -> None:
        """Fail for a reason that lies in no single sample, and finish."""
        with self._lock:
            if self.state is not BatchState.OPEN:
                return
            self.state = BatchState.DONE
            self._num_left = 0
            self._set_error(exc, ErrorContext(index, None, stage))
        self._release_slot()
        self._on_done(self)

    def end(self) -> None:
        """Note that the dataset ended before this batch, and finish."""
        self.is_end = True
        self.state = BatchState.DONE
        self._on_done(self)

    def fill(self, samples: Sequence[Any], tally: Tally, indices: Sequence[Any] | None = None) -> None:
        """Take over all the samples at once, of ``indices`` if those were not known before, and finish."""
        if indices is not None:
            self.indices = indices
        if len(samples) != len(self._settled):  # as many as the dataset chose to return
            num_samples = len(samples)
            self.indices = [*self.indices, *[None] * num_samples][:num_samples]
            self._settled, self._num_left = bytearray(num_samples), num_samples
            self._error_position = num_samples
        for position, sample in enumerate(samples):
            self.add(position, sample, tally)
        if self._num_left == 0:
            self.state = BatchState.DONE
            self.finish(tally)

    def gather(self, layout: Layout, take: Callable[[Sequence[Any], Sequence[Any]], None], tally: Tally) -> None:
        """Have ``take(indices, columns)`` write all rows at once, and finish."""
        started = time.perf_counter()
        try:
            self._open_slot(layout)
            take(self.indices, self.columns)
        except BaseException as exc:
            self._release_slot()
            self.fail_whole(strip(exc), "fetch", list(self.indices))
            return
        tally.samples += len(self.indices)
        tally.decode_s += time.perf_counter() - started
        self.state = BatchState.DONE
        self.finish(tally)

    def finish(self, tally: Tally) -> None:
        """Make the result, by the thread that completed the batch, and report the batch done."""
        started = time.perf_counter()
        if self.error is None:
            try:
                self._make_result()
            except BaseException as exc:
                self._release_slot()
                indices = list(self.indices) if self.recipe.batched else self.indices[0]
                where = None if self.recipe.batched else self.recipe.locate(indices)
                self._set_error(strip(exc), ErrorContext(indices, where, "collate"))
        self._loose.clear()
        tally.collate_s += time.perf_counter() - started
        self._on_done(self)

    def cancel(self) -> None:
        """Let the batch go; what is being loaded for it is dropped when it comes."""
        with self._lock:
            self.state = BatchState.CANCELLED
            idle = self._num_left == 0
        self.result = self.error = None
        if idle:
            self._release_slot()

    def missing(self) -> list[int]:
        """Return the positions of the samples that have not come yet."""
        return [position for position, settled in enumerate(self._settled) if not settled]

    def describe(self, position: int) -> str:
        """Return how to name a sample in a message."""
        index = self.indices[position]
        location = self.recipe.locate(index)
        return f"index {index!r}" if location is None else f"index {index!r} ({str(location)!r})"

    def _settle(self, position: int) -> bool:
        with self._lock:
            self._settled[position] = 1
            self._num_left -= 1
            complete = self.state is BatchState.OPEN and (
                self._num_left == 0
                # An error is certain to be the first once all the samples before it have come.
                or (self.error is not None and self._settled.find(0, 0, self._error_position) < 0)
            )
            if complete:
                self.state = BatchState.DONE
            abandoned = self._num_left == 0 and (self.error is not None or self.state is BatchState.CANCELLED)
        if abandoned:
            self._release_slot()
        return complete

    def _write(self, position: int, sample: Any) -> bool:
        layout = self.layout
        if layout is None:
            with self._lock:
                if self.layout is None:
                    return self._write_first(position, sample)
                layout = self.layout
        return layout.write(self.columns, position, sample)

    def _write_first(self, position: int, sample: Any) -> bool:
        recipe = self.recipe
        if recipe.layout is not None:
            self._open_slot(recipe.layout)
            if recipe.layout.write(self.columns, position, sample):
                return True
            self._release_slot()
            self.layout = None
        layout = Layout.of(sample)
        if layout is None:
            self._has_layout = False
            return False
        recipe.layout = layout
        self._open_slot(layout)
        return layout.write(self.columns, position, sample)

    def _open_slot(self, layout: Layout) -> None:
        num_bytes = layout.offsets(len(self.indices))[1]
        self.recipe.on_size(num_bytes)
        self.slot = self.recipe.ring.acquire(num_bytes)
        self.columns = layout.columns(self.slot.arena, len(self.indices))
        self.layout = layout

    def _release_slot(self) -> None:
        slot, self.slot = self.slot, None
        self.columns = []
        if slot is not None:
            self.recipe.ring.release(slot)

    def _make_result(self) -> None:
        recipe = self.recipe
        if self.layout is not None and not self._loose:
            assert self.slot is not None
            self.slot.seal()
            if not recipe.on_device:
                slot, self.slot = self.slot, None
                view = recipe.ring.lend(slot)
                self.result = self.layout.batch(self.layout.tensors(self.columns, len(self.indices), view))
                self.columns = []
            return
        samples = [self._sample(position) for position in range(len(self.indices))]
        self._release_slot()
        if recipe.batched:
            self.result = collate_samples(recipe.collate_fn, samples, self.describe)
        else:
            self.result = convert_sample(recipe.collate_fn, samples[0])
        recipe.on_size(_tensor_bytes(self.result))
        if recipe.pin:
            self.result = pin_memory(self.result)  # type: ignore[no-untyped-call]

    def _sample(self, position: int) -> Any:
        if position in self._loose:
            return self._loose[position]
        assert self.layout is not None
        return self.layout.read(self.columns, position)

    def _set_error(self, exc: BaseException, context: ErrorContext) -> None:
        self.error, self.context = safe_to_raise(exc), context


def strip(exc: BaseException) -> BaseException:
    """Return ``exc`` without the topmost frame of its traceback: our own, which would keep the batch alive."""
    traceback = exc.__traceback__
    return exc.with_traceback(traceback.tb_next if traceback is not None else None)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    return 0
