"""Run: one pass over the data, from the first index to the last batch.

The consumer's thread draws indices and counts; worker threads fill batches; the loop thread puts finished ones
in order, has them copied to the device and hands them over. Each piece of state has one writer: ``_submitted``,
``delivered`` and ``_total`` belong to the consumer, the order book to the loop.
"""

import asyncio
import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aioload.copier import Copier
from aioload.engine import window
from aioload.engine.batch import Batch, Recipe
from aioload.engine.fetchers import AsyncFetcher, BatchFetcher, Fetcher, SampleFetcher, StagedFetcher
from aioload.engine.handoff import Handoff
from aioload.engine.indices import IndexStream
from aioload.engine.order import AsCompleted, InOrder
from aioload.engine.patience import Patience
from aioload.engine.pools import Job
from aioload.engine.source import Kind, Source
from aioload.errors import (
    EngineError,
    ErrorContext,
    ForkedIteratorError,
    LoaderTimeoutError,
    annotate,
)
from aioload.ring import Ring
from aioload.stats import Tally

logger = logging.getLogger("aioload")

WIDEN_AFTER_S = 0.010
"""A consumer that has waited this long makes sure that no thread sleeps while reads are stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the loader's arguments come to, for the engine."""

    collate_fn: Callable[[Any], Any]
    batched: bool
    by_rows: bool
    drop_last: bool
    in_order: bool
    pin: bool
    timeout_s: float
    slow_after_s: float
    max_batches: int
    max_bytes: int


class Crew(Protocol):
    """The threads that a run works with; see :mod:`aioload.engine.crew`."""

    decode: Any
    reads: Any
    tasks: Any
    portal: Any
    may_inline: bool

    def begin(self) -> None:
        """Called when the first jobs have been queued."""
        ...

    def widen_if_stuck(self) -> None:
        """Let every thread work where jobs wait and none gets done."""
        ...


class Answer(enum.Enum):
    """What asking for a batch may answer instead of one."""

    NOT_YET = "not yet"
    OVER = "over"


class Run:
    """One pass over the data. Any thread may call :meth:`next`; :meth:`anext` any event loop.

    Args:
        settings: What the loader's arguments come to.
        source: The dataset.
        stream: Its indices.
        crew: Threads and loop; shared with other runs where workers are persistent.
        ring: Slots.
        copier: Moves batches to the device, or ``None`` for the CPU.
        tally: Where the consumer's waiting is counted.
        max_batches: Batches it may be ahead for now (see :meth:`grant`).
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        stream: IndexStream,
        crew: Crew,
        *,
        ring: Ring,
        copier: Copier | None,
        tally: Tally,
        max_batches: int,
    ) -> None:
        self._settings, self._crew, self._copier, self._ring, self._tally = (
            settings,
            crew,
            copier,
            ring,
            tally,
        )
        self._stream = stream
        self._source = source
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._handoff = Handoff()
        self._order = InOrder() if settings.in_order else AsCompleted()
        self._open: dict[int, Batch] = {}
        self._held: deque[Job] = deque()
        self._max_batches = max_batches
        self._batch_bytes = 0
        self._ahead = max_batches
        self._submitted = self.delivered = 0
        self._total: int | None = None
        self._stream_error: BaseException | None = None
        self.closed = False
        self.on_exhausted: Callable[[int], None] | None = None
        self._recipe = Recipe(
            collate_fn=settings.collate_fn,
            batched=settings.batched,
            by_rows=settings.by_rows,
            on_device=copier is not None,
            pin=settings.pin,
            ring=ring,
            locate=source.locate if source.kind is Kind.STAGED else lambda _: None,
            on_size=self._note_size,
        )
        self._fetcher = self._make_fetcher()

    def __repr__(self) -> str:
        total = "?" if self._total is None else self._total
        state = "closed" if self.closed else "open"
        return f"<Run {state} delivered={self.delivered} started={self._submitted} total={total}>"

    @property
    def horizon(self) -> int:
        """The number of the first batch that must not be worked on yet."""
        return self.delivered + self._ahead

    def start(self) -> None:
        """Draw the first indices and start loading."""
        with self._lock:
            self._refill()
        self._crew.begin()
        self._handoff.wake_all()  # there may be nothing to load

    def grant(self, max_batches: int) -> None:
        """Let the run be ``max_batches`` ahead, and start as many more as that allows."""
        with self._lock:
            self._max_batches = max_batches
            self._note_size(self._batch_bytes)
            self._refill()
        self._resubmit_held()

    def next(self) -> Any:
        """Return the next batch, sleeping until it is there; :attr:`Answer.OVER` at the end."""
        self._check_process()
        answer = self._take()
        if answer is Answer.NOT_YET:
            started = time.perf_counter()
            patience = self._patience()
            try:
                while answer is Answer.NOT_YET:
                    waiter = self._handoff.thread_waiter()
                    answer = self._take()
                    if answer is Answer.NOT_YET:
                        wait_s = patience.wait_s(time.perf_counter() - started)
                        waiter.acquire(timeout=-1 if wait_s is None else wait_s)
            finally:
                self._tally.wait_s += time.perf_counter() - started
        return answer if isinstance(answer, Answer) else self._unwrap(answer)

    async def anext(self) -> Any:
        """As :meth:`next`, letting the running event loop go on. Cancelling it loses no batch."""
        self._check_process()
        answer = self._take()
        if answer is Answer.NOT_YET:
            started = time.perf_counter()
            patience = self._patience()
            try:
                while answer is Answer.NOT_YET:
                    waiter = self._handoff.task_waiter()
                    answer = self._take()
                    if answer is Answer.NOT_YET:
                        await asyncio.wait([waiter], timeout=patience.wait_s(time.perf_counter() - started))
            finally:
                self._tally.wait_s += time.perf_counter() - started
        return answer if isinstance(answer, Answer) else self._unwrap(answer)

    def close(self) -> None:
        """Let all batches go and wake up whoever waits for one. Any thread; never waits."""
        if self._pid != os.getpid():
            return
        self.closed = True
        with self._lock:
            batches = list(self._open.values())
            self._open.clear()
            self._held.clear()
        for batch in batches:
            batch.cancel()
        self._handoff.close()

    def break_(self, exc: BaseException) -> None:
        """Have the consumer raise ``exc``: threads or loop cannot go on."""
        self._handoff.break_(exc)

    def hold(self, job: Job) -> None:
        """Keep a job until its batch is within the window."""
        self._held.append(job)
        self._resubmit_held()  # the window may have moved on meanwhile

    # The consumer's side.

    def _take(self) -> Batch | Answer:
        """Return the next batch and start another one in its place, or what keeps us from it."""
        with self._lock:
            while True:
                if self._total is not None and self.delivered >= self._total:
                    return self._finish()
                batch = self._handoff.peek()
                if batch is None:
                    return Answer.NOT_YET
                if batch.is_end:
                    self._total = batch.number if self._total is None else min(self._total, batch.number)
                    self._handoff.pop()
                    continue
                break
            # If an interrupt hits while indices are drawn, the batch is still here for the next call.
            self.delivered += 1
            try:
                self._refill()
            except BaseException:
                self.delivered -= 1
                raise
            self._open.pop(batch.number, None)
            self._handoff.pop()
        self._resubmit_held()
        return batch

    def _finish(self) -> Answer:
        if self._stream_error is not None:
            error, self._stream_error = self._stream_error, None
            annotate(error, ErrorContext(None, None, "sampler"))
            try:
                raise error
            finally:
                del error
        self._handoff.wake_all()  # others may wait for a batch that will not come
        return Answer.OVER

    def _refill(self) -> None:
        while self._total is None and self._submitted < self.horizon and not self.closed:
            try:
                entry = next(self._stream)
                indices = list(entry) if self._settings.batched else [entry]
            except StopIteration:
                self._total = self._submitted
            except BaseException as exc:
                self._total, self._stream_error = self._submitted, exc
                if isinstance(exc, KeyboardInterrupt):  # it is for the consumer, and for now
                    raise
            else:
                self._submit(indices)
        if self._total is not None and self.on_exhausted is not None:
            self.on_exhausted(self.horizon - self._submitted)

    def _submit(self, indices: list[Any]) -> None:
        batch = Batch(self._submitted, indices, self._recipe, self._report)
        self._open[batch.number] = batch
        self._submitted += 1
        self._fetcher.submit(batch)

    def _unwrap(self, batch: Batch) -> Any:
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
            self._copier.receive(batch.copied)
            batch.result = batch.copied.value
        self._tally.batches += 1
        self._ring.warn_if_held()
        result, batch.result = batch.result, None
        return result

    def _patience(self) -> Patience:
        patience = Patience()
        patience.at(WIDEN_AFTER_S, self._crew.widen_if_stuck)
        patience.at(self._settings.slow_after_s, self._log_slow)
        if self._settings.timeout_s > 0:
            patience.at(self._settings.timeout_s, self._time_out)
        return patience

    def _log_slow(self) -> None:
        logger.warning(
            "A batch has been loading for %.3g s; still waiting for %s.",
            self._settings.slow_after_s,
            self._missing(),
        )

    def _time_out(self) -> None:
        message = f"DataLoader timed out after {self._settings.timeout_s} seconds, waiting for {self._missing()}."
        raise LoaderTimeoutError(message)

    def _missing(self) -> str:
        batch = self._open.get(min(self._open, default=-1))
        if batch is None:
            return "its first indices"
        missing = batch.missing()
        names = [batch.describe(position) for position in missing[:4]]
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return f"batch {batch.number}: {', '.join(names) or 'its collation'}{more}"

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            message = (
                "This iterator was made before a fork, and its threads do not exist in this child process. "
                "Call iter(loader) here for one of its own."
            )
            raise ForkedIteratorError(message)

    # The workers' side.

    def _make_fetcher(self) -> Fetcher:
        crew, source, settings = self._crew, self._source, self._settings
        if source.kind is Kind.STAGED:
            return StagedFetcher(source, crew.reads, crew.decode, self, may_inline=crew.may_inline)
        if source.kind is Kind.ASYNC:
            return AsyncFetcher(source, crew.tasks, crew.decode, by_rows=settings.by_rows)
        if source.kind is Kind.SINGLE:
            return SampleFetcher(source, crew.decode, self)
        return BatchFetcher(source, crew.decode, batched=settings.batched, drop_last=settings.drop_last)

    def _note_size(self, num_bytes: int) -> None:
        self._batch_bytes = max(self._batch_bytes, num_bytes)
        self._ahead = window.batches_ahead(
            max_batches=self._max_batches, batch_bytes=self._batch_bytes, max_bytes=self._settings.max_bytes
        )

    def _resubmit_held(self) -> None:
        again = bool(self._held)
        while again:
            ready: list[Job] = []
            later: list[Job] = []
            while self._held:
                try:
                    job = self._held.popleft()
                except IndexError:
                    break
                (ready if job[1].number < self.horizon else later).append(job)
            self._held.extend(later)
            if ready:
                self._fetcher.resubmit(ready)
            again = any(job[1].number < self.horizon for job in later)

    def _report(self, batch: Batch) -> None:
        self._crew.portal.call(self._arrive, batch)

    # The loop's side.

    def _arrive(self, batch: Batch) -> None:
        try:
            for leaving in self._order.add(batch):
                if self._copier is not None and leaving.error is None and not leaving.is_end:
                    self._copy(leaving, self._copier)
                self._handoff.put(leaving)
        except BaseException as exc:
            error = EngineError(f"The loop thread failed: {exc!r}.")
            error.__cause__ = exc
            self._handoff.break_(error)

    def _copy(self, batch: Batch, copier: Copier) -> None:
        try:
            slot, batch.slot = batch.slot, None
            if slot is None:
                batch.copied = copier.copy(batch.result)
            else:
                assert batch.layout is not None
                batch.copied = copier.copy_slot(slot, batch.layout, batch.columns, len(batch.indices))
        except BaseException as exc:
            batch.error, batch.context = exc, ErrorContext(list(batch.indices), None, "copy")
