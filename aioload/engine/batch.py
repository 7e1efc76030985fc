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
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from aioload.bundle import Bundle, bundle
from aioload.collate import collate_samples, convert_sample, visible_bytes
from aioload.context import leave_sample
from aioload.copier import Copied
from aioload.engine.budget import Budget, Claim
from aioload.engine.packing import Span, unpack
from aioload.engine.position import Place
from aioload.engine.recipe import Recipe
from aioload.engine.tolerance import Tolerance, let_go, record_of
from aioload.errors import ErrorContext, SampleError, context_of, describe_sample, is_interrupt, safe_to_raise, strip
from aioload.layout import Layout
from aioload.leaf import Column
from aioload.slot import Slot, View
from aioload.stats import Tally


class BatchState(enum.Enum):
    """How far a batch is."""

    OPEN = "open"
    DONE = "done"
    CANCELLED = "cancelled"


class Batch:
    """One batch under way.

    Args:
        number: Its place in the pass, from 0.
        indices: The indices of its samples (one where samples are not batched).
        recipe: How it is made.
        on_done: Called once, by the thread that finished it.
        claim: What it has in flight; by default nobody wants to know.
    """

    # Of most batches these stay as they are: here, and not in each, they take no time.
    result: Any = None
    error: BaseException | None = None
    context: ErrorContext | None = None
    marks: memoryview | None = None
    """Where another process sees which samples are being loaded."""
    is_end = False
    """Whether an iterable dataset ended before this batch."""
    is_skipped = False
    """Whether one of its lanes did, or none of its samples could be loaded."""
    place: Place | None = None
    """Where it stands in the pass, for whoever resumes it."""
    copied: Copied | None = None
    """Where a copier has been at work."""
    is_taken = False
    """Whether a consumer has taken it, who may not have got it yet."""
    num_lost = 0
    """Samples that it is made without, once that has been counted."""
    slot: Slot | None = None
    view: View | None = None
    """Of its slot, once that is lent."""
    pieces: tuple[bytes, Sequence[Span]] | None = None
    """What another process has made, where there is no layout."""
    bundle: Bundle | None = None
    """What is in the slot, unless that are rows of a layout."""
    layout: Layout | None = None
    _num_bytes = 0  # of its slot and what lies beside it, or of its result
    _whole: tuple[Any] | None = None  # what a dataset gave for the batch, where that is no list of samples

    def __init__(
        self,
        number: int,
        indices: Sequence[Any],
        recipe: Recipe,
        on_done: Callable[["Batch"], None],
        claim: Claim | None = None,
    ) -> None:
        self.number, self.indices, self.recipe = number, indices, recipe
        self.claim = claim or Claim(Budget(0), number)
        self.state = BatchState.OPEN
        self.failed: dict[int, SampleError] = {}  # samples that it is made without, by position
        self.columns: list[Column] = []
        self._on_done = on_done
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that cancels batches.
        self._lock = threading.RLock()
        self._error_position = len(indices)
        self._settled = bytearray(len(indices))
        self._tokens = list(range(len(indices)))  # one per sample that has not settled
        self._has_layout = recipe.by_rows
        self._loose: dict[int, Any] = {}  # samples that are in no row, by position
        self.there: set[int] = set()
        """Positions of samples that have come, though they may be added together with others later."""

    def __repr__(self) -> str:
        return f"<Batch {self.number} {self.state.value} {len(self._tokens)}/{len(self.indices)} left>"

    @property
    def is_empty(self) -> bool:
        """Whether there was no data for it."""
        return self.is_end or self.is_skipped

    def wants(self, position: int) -> bool:
        """Whether it is worth loading this sample; if not, :meth:`drop` must be called instead."""
        return position < self._error_position and self.state is BatchState.OPEN

    def add(self, position: int, sample: Any) -> bool:
        """Take over a sample; return whether the batch is complete."""
        layout = self.layout
        try:
            if layout is None:
                in_row = self._has_layout and self._write_first(position, sample)
            else:
                in_row = layout.write(self.columns, position, (sample,))
        except BaseException as exc:  # no memory for a slot, or a property of the user's that fails
            return self.fail(position, strip(exc), "collate")
        if not in_row:
            self._loose[position] = sample
            self.claim.add_loose(visible_bytes(sample))
        elif self.layout is not None and self.layout.has_texts:
            self.claim.add_loose(self._bytes_of_texts(position, position + 1))
        return self._settle(position)

    def add_all(self, start: int, samples: Sequence[Any]) -> bool:
        """Take over samples of consecutive positions; return whether the batch is complete."""
        complete = False
        if self.layout is None:  # the first one chooses it
            complete, start, samples = self.add(start, samples[0]), start + 1, samples[1:]
        if self.layout is not None and samples:
            try:
                are_in_rows = self.layout.write(self.columns, start, samples)
            except BaseException:  # whose it is will be seen
                are_in_rows = False
            if are_in_rows:
                if self.layout.has_texts:
                    self.claim.add_loose(self._bytes_of_texts(start, start + len(samples)))
                return self._settle(start, len(samples)) or complete
        for position, sample in enumerate(samples, start):
            complete = self.add(position, sample) or complete
        return complete

    def fail(self, position: int, exc: BaseException, stage: str) -> bool:
        """Note that a sample failed; return whether the batch is complete. The lowest position counts."""
        index = self.indices[position]
        context = context_of(exc, index, self.recipe.locate(index), stage)
        if self.recipe.tolerance is not None and isinstance(exc, Exception) and stage != "collate":
            return self._tolerate(position, exc, context, self.recipe.tolerance)
        return self._fail(position, exc, context)

    def _tolerate(self, position: int, exc: Exception, context: ErrorContext, tolerance: Tolerance) -> bool:
        record = record_of(exc, context)
        if tolerance.stand_in is None:
            let_go(record)
            self.failed[position] = record
            return self._settle(position)
        try:
            sample = tolerance.stand_in(record.error)  # type: ignore[arg-type]  # made of an Exception
        except BaseException as other:
            return self._fail(position, strip(other), context)
        let_go(record)
        self.failed[position] = record
        return self.add(position, sample)

    def _fail(self, position: int, exc: BaseException, context: ErrorContext) -> bool:
        with self._lock:
            if position < self._error_position:
                self._error_position = position
                self._set_error(exc, context)
        return self._settle(position)

    def drop(self, position: int) -> bool:
        """Settle a sample that nobody needs; return whether the batch is complete."""
        return self._settle(position)

    def fail_whole(self, exc: BaseException, stage: str, index: Any = None) -> None:
        """Fail for a reason that lies in no single sample, and finish."""
        self._release_slot()
        with self._lock:
            if self.state is not BatchState.OPEN:
                return
            self.state = BatchState.DONE
            self._set_error(exc, context_of(exc, index, None, stage))
        self._on_done(self)

    def end(self) -> None:
        """Note that the dataset ended before this batch, and finish."""
        self.is_end = True
        self.state = BatchState.DONE
        self._on_done(self)

    def skip(self) -> None:
        """Note that there is nothing in this batch, though there may be in later ones, and finish."""
        self.is_skipped = True
        self.state = BatchState.DONE
        self._on_done(self)

    def fill_with(self, samples: Any, tally: Tally) -> None:
        """Take over what the dataset gave for the whole batch, whatever it is, and finish.

        What is not a list goes to ``collate_fn`` as it is: a dataset may make whole batches by itself.
        """
        if type(samples) is list:
            self.fill(samples, tally)
            return
        self._whole = (samples,)
        self.state = BatchState.DONE
        self.finish(tally)

    def fill(self, samples: Sequence[Any], tally: Tally, indices: Sequence[Any] | None = None) -> None:
        """Take over all the samples at once, of ``indices`` if those were not known before, and finish."""
        if indices is not None:
            self.indices = indices
        if len(samples) != len(self._settled):  # as many as the dataset chose to return
            num_samples = len(samples)
            self.indices = [*self.indices, *[None] * num_samples][:num_samples]
            self._settled, self._tokens = bytearray(num_samples), list(range(num_samples))
            self._error_position = num_samples
        if not samples or self.add_all(0, samples):
            self.state = BatchState.DONE
            self.finish(tally)

    def gather(self, layout: Layout, take: Callable[[Sequence[Any], Sequence[Any]], bool], tally: Tally) -> bool:
        """Have ``take(indices, columns)`` write all rows at once, and finish; ``False`` if it would not."""
        started = time.perf_counter()
        try:
            self._open_slot(layout)
            if not take(self.indices, layout.rows(self.columns)):
                self._release_slot()
                return False
            self.layout = layout
        except KeyboardInterrupt:  # no code of the user's runs here: it is for the consumer, and for now
            self._release_slot()
            raise
        except BaseException as exc:
            self.fail_whole(strip(exc), "fetch", list(self.indices))
            return True
        taken = time.perf_counter()
        tally.decode_s += taken - started
        self.state = BatchState.DONE
        self.finish(tally)
        tally.collate_s += time.perf_counter() - taken
        return True

    def finish(self, tally: Tally) -> None:
        """Make the result, by the thread that completed the batch, and report the batch done."""
        if self.error is None:
            try:
                self._make_result()
            except BaseException as exc:
                self._release_slot()
                if is_interrupt(exc):  # in the consumer's thread: it is for the consumer, who asks again
                    raise
                indices = list(self.indices) if self.recipe.batched else self.indices[0]
                where = None if self.recipe.batched else self.recipe.locate(indices)
                self._set_error(strip(exc), ErrorContext(indices, where, "collate"))
            else:
                tally.samples += 0 if self.is_skipped else len(self.indices)
        self._loose.clear()
        self._whole = None
        self.claim.finish(self._num_bytes)
        self._on_done(self)

    def cancel(self) -> None:
        """Let the batch go; what is being loaded for it is dropped when it comes.

        The thread that settles the last sample gives the slot back, or finishes the batch if it was that far.
        """
        with self._lock:
            if self.state is BatchState.OPEN:
                self.state = BatchState.CANCELLED
        self.claim.close()

    def discard(self) -> None:
        """Drop a finished batch that nobody wants."""
        self.let_go()
        self.error = None
        self._release_slot()

    def let_go(self) -> None:
        """Refer no more to what the consumer has got, who may hold this batch no longer than that."""
        self.result = self.pieces = self.view = self.copied = None

    def arrive(self, num_bytes: int) -> None:
        """Report the batch done: another process has made it, and the caller has put here what that is.

        Args:
            num_bytes: Of its slot.
        """
        self.recipe.on_size(num_bytes)
        if self.recipe.on_device and self.pieces is not None:
            try:
                result = self.unwrap()
                self.let_go()
                if (bundled := bundle(result, self.recipe.ring)) is not None:
                    self.bundle, self.slot = bundled
                else:
                    self.result = result
            except Exception as exc:
                self._set_error(strip(exc), ErrorContext(list(self.indices), None, "collate"))
        with self._lock:
            is_wanted = self.state is BatchState.OPEN
            if is_wanted:
                self.state = BatchState.DONE
        if is_wanted:
            self._on_done(self)
        else:
            self.discard()

    def lend(self) -> None:
        """Have its slot come back by itself, when neither the batch nor what is made of it is there any more."""
        if self.slot is not None:
            self.view, self.slot = self.recipe.ring.lend(self.slot), None

    def unwrap(self) -> Any:
        """Return what it was made to be, over memory that is lent. It may be asked again, until :meth:`let_go`.

        Raises:
            Exception: It cannot be unpickled.
        """
        self.lend()
        if self.pieces is not None:
            result = unpack(*self.pieces, self.view)
        elif self.view is not None:
            assert self.layout is not None
            result = self.layout.batch(self.layout.tensors(self.columns, len(self.indices), self.view))
        else:
            return self.result
        return pin_memory(result) if self.recipe.pin else result  # type: ignore[no-untyped-call]

    def losses(self) -> list[SampleError]:
        """Return what became of the samples that it is made without; of those behind an error nobody can tell."""
        if not self.failed:
            return []
        return [self.failed[position] for position in sorted(self.failed) if position < self._error_position]

    def missing(self) -> list[int]:
        """Return the positions of the samples that have not come yet."""
        there = self.there
        return [position for position, settled in enumerate(self._settled) if not settled and position not in there]

    def describe(self, position: int) -> str:
        """Return how to name a sample in a message."""
        indices = self.indices
        index = indices[position] if position < len(indices) else None  # the dataset may end meanwhile
        if index is None:  # it goes by its own order
            return f"sample {position} of the batch"
        return describe_sample(index, self.recipe.locate(index))

    def _settle(self, start: int, num_samples: int = 1) -> bool:
        self._settled[start : start + num_samples] = b"\1" * num_samples
        # Taking a token is atomic and needs no lock; whoever takes the last one, 0, is the last to settle. A
        # failure notes itself before it settles, so one of the two that race here sees the other.
        if num_samples > 1:
            del self._tokens[1 - num_samples :]  # atomic, too; 0 is not among them, as there is one more
        is_last = self._tokens.pop() == 0
        if is_last and self.error is None and self.state is BatchState.OPEN:
            self.state = BatchState.DONE
            return True
        if self.error is None and self.state is BatchState.OPEN:
            return False
        with self._lock:
            # An error is certain to be the first once all the samples before it have come.
            certain = is_last or self._settled.find(0, 0, self._error_position) < 0
            complete = self.state is BatchState.OPEN and certain
            if complete:
                self.state = BatchState.DONE
        if is_last:
            self._release_slot()
        return complete

    def _write_first(self, position: int, sample: Any) -> bool:
        with self._lock:
            if self.layout is None:
                return self._has_layout and self._choose_layout(position, sample)
        return self.layout.write(self.columns, position, (sample,))

    def _choose_layout(self, position: int, sample: Any) -> bool:
        recipe = self.recipe
        if recipe.layout is not None and self._try_layout(recipe.layout, position, sample):
            return True
        layout = Layout.of(sample)
        if layout is not None and self._try_layout(layout, position, sample):
            recipe.layout = layout
            return True
        self._has_layout = False
        return False

    def _try_layout(self, layout: Layout, position: int, sample: Any) -> bool:
        self._open_slot(layout)
        if layout.write(self.columns, position, (sample,)):
            self.layout = layout  # not before: other threads write by it, and the slot was not certain to stay
            return True
        self._release_slot()
        return False

    def _open_slot(self, layout: Layout) -> None:
        num_bytes = layout.offsets(len(self.indices))[1]
        self.recipe.on_size(num_bytes)
        num_rows = max(1, len(self.indices))
        self.claim.set_whole(num_bytes, num_bytes // num_rows)  # before there is memory for it: spare memory makes room
        self.slot = self.recipe.ring.acquire(num_bytes)
        self._num_bytes = self.slot.arena.nbytes
        if self._num_bytes != num_bytes:
            self.claim.set_whole(self._num_bytes, self._num_bytes // num_rows)
        self.columns = layout.columns(self.slot.arena, len(self.indices))

    def _release_slot(self) -> None:
        with self._lock:  # whoever closes the run may do it at the same time
            slot, self.slot = self.slot, None
        self.columns, self.bundle = [], None
        if slot is not None:
            self._num_bytes = 0
            self.claim.set_whole(0)
            self.recipe.ring.release(slot)

    def _bytes_of_texts(self, start: int, stop: int) -> int:
        """Return the bytes of what lies beside the slot, of some rows."""
        layout, columns = self.layout, self.columns
        if layout is None or not columns:  # it has been given up meanwhile
            return 0
        texts = [columns[leaf.number][start:stop] for leaf in layout.leaves if leaf.dtype is None]
        return sum(sum(map(sys.getsizeof, column)) for column in texts)  # of exactly str or bytes

    def _make_result(self) -> None:
        recipe = self.recipe
        sources: Sequence[int] = range(len(self.indices))
        if self.failed and recipe.tolerance is not None and recipe.tolerance.stand_in is None:
            sources = recipe.tolerance.sources(len(self.indices), self.failed)
            if not sources:
                self._release_slot()
                self.is_skipped = True
                return
        elif self.layout is not None and not self._loose:
            assert self.slot is not None
            self.slot.seal()
            if self.layout.has_texts:
                self._num_bytes += self._bytes_of_texts(0, len(self.indices))
                recipe.on_size(self._num_bytes)
            if not recipe.on_device:
                slot, self.slot = self.slot, None
                view = recipe.ring.lend(slot)
                self.result = self.layout.batch(self.layout.tensors(self.columns, len(self.indices), view))
                self.columns = []
            return
        if self._whole is not None:
            samples = self._whole[0]
        else:
            samples = [self._sample(position) for position in sources]
            if self.failed:
                self.indices = [self.indices[position] for position in sources]
        self._release_slot()
        leave_sample()
        if recipe.batched:
            self.result = collate_samples(recipe.collate_fn, samples, self.describe)
        else:
            self.result = convert_sample(recipe.collate_fn, samples[0])
        self._num_bytes = visible_bytes(self.result)
        recipe.on_size(self._num_bytes)
        if recipe.pin:
            self.result = pin_memory(self.result)  # type: ignore[no-untyped-call]
        elif recipe.on_device and recipe.bundles and (bundled := bundle(self.result, recipe.ring)) is not None:
            self.result = None
            self.bundle, self.slot = bundled
            self._num_bytes = self.slot.arena.nbytes

    def _sample(self, position: int) -> Any:
        if position in self._loose:
            return self._loose[position]
        assert self.layout is not None
        return self.layout.read(self.columns, position)

    def _set_error(self, exc: BaseException, context: ErrorContext) -> None:
        self.error, self.context = safe_to_raise(exc), context
