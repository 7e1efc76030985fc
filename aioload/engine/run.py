"""Run: one pass over the data, from the first index to the last batch.

The consumer's thread draws indices and counts; worker threads fill batches and deliver them, by way of the loop where
there is a copier. Each piece of state has one writer: ``_submitted``, ``delivered`` and ``_total`` belong to the
consumer, the order book to whoever delivers.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioload.copier import Copier
from aioload.engine.batch import Batch, BatchState
from aioload.engine.budget import Budget, Claim
from aioload.engine.choice import Crew, fetcher_for
from aioload.engine.crossing import Crossing
from aioload.engine.delivery import Delivery
from aioload.engine.fetchers import Fetcher
from aioload.engine.gang import Gang
from aioload.engine.handoff import Handoff
from aioload.engine.indices import IndexStream
from aioload.engine.patience import WIDEN_AFTER_S, Patience, patience_for
from aioload.engine.recipe import Recipe
from aioload.engine.remote import RemoteFetcher
from aioload.engine.rhythm import Rhythm
from aioload.engine.settings import Answer, Settings
from aioload.engine.source import Kind, Source
from aioload.engine.tolerance import Losses
from aioload.engine.whole import GatherFetcher
from aioload.engine.window import Window, batches_for
from aioload.errors import ErrorContext, ForkedIteratorError, annotate, safe_to_raise, strip
from aioload.ring import Ring
from aioload.stats import Tally


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
        budget: The bytes in flight of all passes over the loader.
        max_batches: Batches it may be ahead for now (see :meth:`grant`).
        is_wanted: Whether it has a consumer, and does not begin ahead of one.
        saved: The state of the run that this one goes on with, if any.
        fetcher: What has other processes load; the crew is a gang of them.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        stream: IndexStream,
        crew: Crew | Gang,
        *,
        ring: Ring,
        copier: Copier | None,
        tally: Tally,
        budget: Budget,
        max_batches: int,
        is_wanted: bool = True,
        saved: Mapping[str, Any] | None = None,
        fetcher: RemoteFetcher | None = None,
    ) -> None:
        self._settings, self._crew, self._stream = settings, crew, stream
        self._ring, self._tally = ring, tally
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._handoff = Handoff()
        self._in_order = settings.in_order or source.kind is Kind.TAKE  # all rows take equally long
        crossing = None
        if copier is not None:
            crossing = Crossing(
                self._handoff,
                copier,
                crew.portal.call,
                num_batches=settings.num_device_batches,
                is_open=is_wanted,  # a pass that may yet be dropped takes no device memory, nor is anything done to it
            )
        self._delivery = Delivery(self._handoff, crossing, in_order=self._in_order)
        self._open: dict[int, Batch] = {}
        # What a consumer has taken and not got yet, by its thread: where an interrupt comes, its next call goes on.
        self._in_hand: dict[int, Batch] = {}
        self._has_moved = False  # the window, since those who wait for room have been told
        self._budget = budget
        self._window = Window(max_batches, budget, self._resubmit, call=crew.portal.call, is_wanted=is_wanted)
        self._submitted = 0
        self._total: int | None = None
        self._stream_error: BaseException | None = None
        self.is_cut_short = False
        """Whether an error ends it before its time: its indices could not all be drawn."""
        self.closed = False
        self._started = False
        self._drawn: tuple[int, list[Any]] = -1, []  # the number of the batch drawn last, and its indices
        self.on_exhausted: Callable[[int], None] | None = None
        self._has_indices = source.kind is not Kind.ITERABLE
        # Where an interrupt comes while a batch is submitted, it is submitted again, and else made anew: items may have
        # been taken for it, or another process may have it.
        self._keeps_submitted = not self._has_indices or fetcher is not None
        self.record = source.record(stream, 0 if saved is None else saved["num_yielded"])
        """How far the consumer is; it may outlive the run."""
        self._recipe = Recipe(
            context=source.context,
            collate_fn=settings.collate_fn,
            batched=settings.batched,
            by_rows=settings.by_rows,
            on_device=copier is not None,
            pin=settings.pin,
            ring=ring,
            locate=source.locate,
            on_size=self._window.note_size,
            tolerance=settings.tolerance,
        )
        self.record.position.num_errors = 0 if saved is None else saved.get("num_errors", 0)
        self._losses = Losses(settings.tolerance, self.record.position)
        self._regulator = crew.regulator
        self._rhythm = Rhythm(tally, None if crew.regulator is None else crew.regulator.demand)
        self._max_batches = self._num_enough = max_batches
        self._remote = fetcher
        self._no_claim = Claim(budget, 0)  # what another process loads counts there
        self._no_claim.close()
        if isinstance(crew, Gang):
            assert fetcher is not None
            self._fetcher: Fetcher = fetcher
        else:
            self._fetcher = fetcher_for(source, crew, self._window, settings, tally)
        self._copies = copier is not None
        # The batches of an async dataset or reader are lost with the loop: so one error comes, and not two.
        self._by_loop = copier is not None or (fetcher is None and source.kind in (Kind.ASYNC, Kind.AWAITED))

    def __repr__(self) -> str:
        total = "?" if self._total is None else self._total
        state = "closed" if self.closed else "open"
        return f"<Run {state} delivered={self._window.delivered} started={self._submitted} total={total}>"

    @property
    def delivered(self) -> int:
        """Batches that the consumer has received, those that were errors included."""
        return self._window.delivered

    @property
    def batches_limit(self) -> int:
        """Batches that may be ahead of the consumer at present."""
        return self._window.reach - self._window.delivered

    @property
    def num_on_device(self) -> int:
        """Batches whose copies to the device have been issued and that the consumer has not taken yet."""
        return self._delivery.num_on_device

    def start(self) -> None:
        """Draw the first indices and start loading."""
        try:
            with self._lock:
                self._refill()
        finally:
            self._started = True
            self._handoff.wake_all()  # there may be nothing to load
        self._crew.begin()

    def start_here(self) -> None:
        """As :meth:`start`, on the loop thread: what it raises is for the consumer."""
        if self._started:  # early; the consumer may be drawing already, and only one thread may move generators
            return
        try:
            self.start()
        except BaseException as exc:
            if exc is not self._stream_error:  # that one comes after the batches before it
                self.break_(exc)

    def grant(self, max_batches: int, *, is_wanted: bool = False) -> None:
        """Let the run be ``max_batches`` ahead, and start as many more as that allows; it may have a consumer now."""
        with self._lock:
            self._max_batches = self._num_enough = max_batches
            self._window.grant(max_batches, is_wanted=is_wanted)
            self._refill()
        self._window.release()
        if is_wanted:
            self._delivery.open()

    def next(self) -> Any:
        """Return the next batch, sleeping until it is there; :attr:`Answer.OVER` at the end."""
        self.check_process()
        self._rhythm.end_step()
        answer = self._take()
        if answer is Answer.NOT_YET:
            wait = self._rhythm.begin_wait()
            patience = self._patience()
            try:
                while answer is Answer.NOT_YET:
                    waiter = self._handoff.thread_waiter()
                    if self._has_news:
                        answer = self._take()
                    if answer is Answer.NOT_YET:
                        self._attend()
                        self._wait(waiter, patience, wait[1])
            finally:
                self._rhythm.end_wait(wait)
        return answer if isinstance(answer, Answer) else self._give(answer)

    @property
    def is_waited_for(self) -> bool:
        """Whether batches that other processes have made are to be taken in at once.

        They are for a consumer that is soon back, too: it saves it from waiting, and from waking up who takes them in.
        """
        return self._handoff.is_waited_for or self._copies or self._rhythm.is_quick

    def _attend(self) -> None:
        if self._remote is not None:
            self._remote.attend()

    def _wait(self, waiter: threading.Lock, patience: Patience, started: float) -> None:
        is_released = False
        try:
            wait_s = patience.wait_s(time.perf_counter() - started)
            is_released = waiter.acquire(timeout=-1 if wait_s is None else wait_s)
        finally:
            if not is_released:
                self._handoff.forget(waiter)

    async def anext(self) -> Any:
        """As :meth:`next`, letting the running event loop go on. Cancelling it loses no batch."""
        self.check_process()
        self._rhythm.end_step()
        await self._wait_for_start()
        answer = self._take()
        if answer is Answer.NOT_YET:
            wait = self._rhythm.begin_wait()
            patience = self._patience()
            try:
                while answer is Answer.NOT_YET:
                    with self._handoff.task_waiter() as waiter:
                        if self._has_news:
                            answer = self._take()
                        if answer is Answer.NOT_YET:
                            self._attend()
                            await asyncio.wait([waiter], timeout=patience.wait_s(time.perf_counter() - wait[1]))
            finally:
                self._rhythm.end_wait(wait)
        return answer if isinstance(answer, Answer) else self._give(answer)

    async def _wait_for_start(self) -> None:
        """Wait until the first indices are drawn: a sampler may think for long, and keeps the lock that we need."""
        started = time.perf_counter()
        waits = not self._started
        while not self._started:
            with self._handoff.task_waiter() as waiter:
                if not self._started:
                    await asyncio.wait([waiter])
        if waits:
            waited_s = time.perf_counter() - started
            self._tally.wait_s += waited_s

    def close(self) -> None:
        """Let all batches go and wake up whoever waits for one. Any thread; never waits."""
        if self._pid != os.getpid():
            return
        # Not under the lock, which a sampler that thinks would keep.
        self.closed = self._started = True
        self._delivery.close()
        self._handoff.close()
        for batch in list(self._open.values()):
            batch.cancel()
            if self._remote is not None and batch.state is BatchState.DONE and not batch.is_taken:
                batch.discard()  # it is in the hand-off, or on its way
        self._open.clear()
        self._window.clear()
        if self._remote is not None:
            self._remote.close()

    def break_(self, exc: BaseException) -> None:
        """Have the consumer raise ``exc``: threads or loop cannot go on."""
        self._started = True
        self._handoff.break_(exc)

    # The consumer's side.

    @property
    def _has_news(self) -> bool:
        """Whether to take again may give more than it did a moment ago; to find out that way takes much longer."""
        return self._handoff.has_news or (self._total is not None and self._window.delivered >= self._total)

    def _take(self) -> Batch | Answer:
        """Return the next batch and start another one in its place, or what keeps us from it."""
        if self.closed and (self._total is None or self._window.delivered < self._total):
            self._handoff.peek()  # raises; a sampler may still have the lock
        try:
            with self._lock:
                return self._take_next()
        finally:
            if self._has_moved:  # also where there was no data for a batch
                self._tell_who_waits()
            if self._remote is not None:
                self._remote.flush()
            self._delivery.resume()

    def _take_next(self) -> Batch | Answer:
        thread, position = threading.get_ident(), self.record.position
        position.settle()
        while True:
            batch = self._in_hand.get(thread)
            if batch is None:
                if self._total is not None and self._window.delivered >= self._total:
                    return self._finish()
                batch = self._handoff.peek()
                if batch is None:
                    return Answer.NOT_YET
                if batch.is_taken or (self._in_order and batch.number < self._window.delivered):
                    self._handoff.pop(batch)  # an interrupt left it here, or had it made again
                    continue
                if batch.is_end:
                    self._total = batch.number if self._total is None else min(self._total, batch.number)
                    self._handoff.pop(batch)
                    continue
                self._take_up(batch, thread)
            else:
                self._refill()
            self._let_go_of(batch)
            if batch.is_skipped and batch.error is None:
                position.add(batch.place, batch.num_lost, num_batches=0)
                del self._in_hand[thread]
                continue
            return batch

    def _take_up(self, batch: Batch, thread: int) -> None:
        """Have a batch in hand, and start another one in its place."""
        self._in_hand[thread], batch.is_taken = batch, True
        self._window.delivered += 1
        try:
            if self._remote is not None:
                self._remote.note_taken(batch)  # again does no harm; first, so that it goes with the batch asked for
            self._look_further()
            self._refill()
        except BaseException:  # it is still in the hand-off, for whoever asks next
            del self._in_hand[thread]
            batch.is_taken = False
            self._window.delivered -= 1
            raise

    def _let_go_of(self, batch: Batch) -> None:
        """See to it that nobody counts with a batch that has been taken up. It may be called again."""
        if self._remote is not None:
            batch.lend()
        batch.claim.close()
        self._open.pop(batch.number, None)
        if self._remote is None:  # else nothing here waits for room
            self._window.oldest, self._has_moved = min(self._open, default=self._submitted), True
        self._handoff.pop(batch)
        self._rhythm.feed()
        if batch.failed:
            self._note_losses(batch)

    def _tell_who_waits(self) -> None:
        """Have what waits for room go on. Whoever moves the window on meanwhile tells again."""
        self._has_moved = False
        try:
            self._budget.changed()
        except BaseException:  # an interrupt: the next call tells
            self._has_moved = True
            raise

    def _note_losses(self, batch: Batch) -> None:
        records, again = batch.losses(), batch.num_lost > 0
        num_lost = len(records)
        if not again:  # nothing is called in between
            self._losses.count, batch.num_lost = self._losses.count + num_lost, num_lost
        too_many = self._losses.note(records, again=again)
        if too_many is not None and batch.error is None:
            batch.discard()
            batch.error = too_many

    def _look_further(self) -> None:
        """Be as far ahead as the reads that may be under way need it."""
        if self._regulator is not None:
            enough = max(self._max_batches, batches_for(self._regulator.limit, self._settings.batch_size))
            if enough != self._num_enough:
                self._num_enough = enough
                self._window.grant(enough)

    def _finish(self) -> Answer:
        self.record.position.is_over = not self.is_cut_short
        if self._stream_error is not None:
            error, self._stream_error = self._stream_error, None
            annotate(error, ErrorContext(None, None, "sampler"))
            try:
                raise error
            finally:
                del error
        self._losses.check_end()
        return Answer.OVER

    def _refill(self) -> None:
        while self._total is None and self._submitted < self._window.reach and not self.closed:
            try:
                if self._drawn[0] < self._submitted:  # else an interrupt kept it from being submitted
                    self._drawn = self._submitted, self._stream.draw(batched=self._settings.batched)
            except StopIteration:
                self._total = self._submitted
            except BaseException as exc:
                if isinstance(exc, KeyboardInterrupt) and not self._stream.is_lost:
                    raise
                self.is_cut_short = True
                self._total, self._stream_error = self._submitted, safe_to_raise(strip(exc))
                if isinstance(exc, KeyboardInterrupt):  # it is for the consumer, and for now
                    raise
            else:
                self._submit(self._drawn[1])
        if self._total is not None and self.on_exhausted is not None:
            self.on_exhausted(self._window.reach - self._submitted)

    def _submit(self, indices: list[Any]) -> None:
        batch = self._open.get(self._submitted)  # of a call that an interrupt cut short
        is_done = batch is not None and batch.state is BatchState.DONE
        if is_done and (self._keeps_submitted or not self._in_order):
            self._submitted += 1
            return
        if batch is None or not self._keeps_submitted:
            claim = Claim(self._budget, self._submitted) if self._remote is None else self._no_claim
            batch = Batch(self._submitted, indices, self._recipe, self._report, claim)
            if self._has_indices:
                batch.place = self._stream.place
            self._open[batch.number] = batch
        if self.closed:  # while the sampler was asked; close() may not have seen this batch
            batch.cancel()
            return
        try:
            self._fetcher.submit(batch)
        except BaseException:  # an interrupt, or not one thread to be had: it is for the next call
            if not self._keeps_submitted:
                batch.cancel()
            raise
        self._submitted += 1

    def _give(self, batch: Batch) -> Any:
        """Return what was made of the batch in hand, or raise its error: from then on it is the consumer's."""
        value, thread = self._delivery.receive(batch), threading.get_ident()
        error = batch.error
        if error is not None:
            if batch.context is not None:
                annotate(error, batch.context)
        else:
            self._ring.warn_if_held()
            self._ring.warn_if_not_pinned()
            self._rhythm.begin_step()
        # An interrupt comes before this or after, and not between these lines: see Position.add.
        self.record.position.add(batch.place, batch.num_lost)
        del self._in_hand[thread]
        batch.result = batch.pieces = batch.view = batch.copied = batch.error = None
        if error is None:
            self._tally.batches += 1
            return value
        try:
            raise error
        finally:
            del error

    def _patience(self) -> Patience:
        widen = None if self._crew.is_single else self._crew.widen_if_stuck
        if widen is not None and self._rhythm.starved_s() > WIDEN_AFTER_S:  # who asks often and waits for less
            widen()
        return patience_for(self._settings, widen=widen, waited_for=self._waited_for)

    def _waited_for(self) -> tuple[Batch | None, Sequence[int]]:
        """Return the batch that the consumer waits for, and the positions that it lacks, as far as one knows."""
        with self._lock:
            batch = self._open.get(min(self._open, default=-1))
        if batch is None:
            return None, []
        loading = [] if self._remote is None else self._remote.being_loaded(batch)
        return batch, loading or batch.missing()

    def check_process(self) -> None:
        """Raise :class:`~aioload.errors.ForkedIteratorError` in a child of the process that the run belongs to."""
        if self._pid != os.getpid():
            message = (
                "This iterator was made before a fork, and its threads do not exist in this child process. "
                "Call iter(loader) here for one of its own."
            )
            raise ForkedIteratorError(message)

    # The workers' side.

    def _resubmit(self, jobs: list[Any]) -> None:
        self._fetcher.resubmit(jobs)

    def _report(self, batch: Batch) -> None:
        # Each thread that is woken takes the interpreter lock from those that read: by way of the loop costs 6 to 9 %.
        if self._by_loop:
            self._crew.portal.call(self._delivery.arrive, batch)
        elif isinstance(self._fetcher, GatherFetcher) and self._fetcher.is_direct:
            self._delivery.arrive_here(batch)  # in the consumer's thread, as all batches of this run
        else:
            self._crew.portal.pass_through(self._delivery.arrive, batch)
