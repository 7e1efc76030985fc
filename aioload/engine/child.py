"""Child: the engine of a process that loads for another one; :mod:`aioload.engine.gang` tells what goes on."""

import functools
import os
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from aioload.cache import Cache
from aioload.context import PassContext
from aioload.engine import abroad
from aioload.engine.batch import Batch
from aioload.engine.beginning import Beginning, begin_worker, seed_process
from aioload.engine.budget import Budget
from aioload.engine.channel import Channel
from aioload.engine.crew import Crew
from aioload.engine.items import Items
from aioload.engine.marks import Marks
from aioload.engine.messages import (
    Begin,
    Begun,
    Broken,
    Done,
    End,
    Hello,
    Load,
    Made,
    Notes,
    Totals,
    Widen,
    send,
)
from aioload.engine.pace import Pace
from aioload.engine.packing import Packed
from aioload.engine.pools import LAST_LOOK_S, STUCK_AFTER_S
from aioload.engine.portal import Portal
from aioload.engine.reception import Reception
from aioload.engine.regulator import Regulator
from aioload.engine.segments import Segments
from aioload.engine.settings import Part, Settings
from aioload.engine.share import Share
from aioload.engine.source import Kind, Source
from aioload.errors import ErrorContext, TransferError, safe_to_raise, strip, text_of
from aioload.layout import Layout
from aioload.pinned import piece_bytes
from aioload.readers import Reader, SchemeReader
from aioload.ring import Ring
from aioload.slot import Slot
from aioload.stats import Ledger
from aioload.workers import answer_for_torch

_TELL_EVERY_S = 0.05
"""Seconds between two accounts of what has been done, while there is more to do."""


class Child:
    """The engine of this process: what a runtime is to a loader.

    Args:
        channel: To the loader.
        part: What it is to do.
        kind: The kind of dataset.
        dataset: The dataset, and so on.
        settings: What the loader's arguments come to, ``max_bytes`` being this process's part.
        is_page_locked: Whether the loader page-locks the memory of slots.
    """

    def __init__(
        self,
        channel: Channel,
        part: Part,
        *,
        kind: Kind,
        dataset: Any,
        reader: Reader | None,
        cache: Cache | None,
        worker_init_fn: Any,
        seed: int | None,
        settings: Settings,
        is_page_locked: bool,
    ) -> None:
        self._channel, self._part, self._settings = channel, part, settings
        self._kind, self._dataset, self._reader, self._cache, self._seed = kind, dataset, reader, cache, seed
        self._worker_init_fn, self._default_reader = worker_init_fn, SchemeReader()
        # As for page-locked memory in one process, few sizes: to lock a new one takes milliseconds.
        self._segments = Segments(piece_bytes if is_page_locked else None)
        # Free slots are few: the loader is told of each that goes.
        self._ring = Ring(new_memory=self._segments.new_memory, falls_back=False, max_free=settings.max_batches + 2)
        self._sent: dict[int, Slot] = {}
        """Slots that the loader has, by segment."""
        self._num_sent: Counter[int] = Counter()
        """How many times each segment has been sent."""
        self._ledger = Ledger()
        self._tally = self._ledger.open()
        self._pace, self._portal = Pace(), Portal(keep_loop=True)
        self._budget = Budget(
            settings.max_bytes,
            num_makers=part.num_workers,
            num_reads=part.num_reads or part.most_reads,
            num_copies=2 if settings.batched else 1,
            spares=self._ring,
        )
        self._crew: Crew | None = None
        self._marks: Marks | None = None
        self._looks_at_s: float | None = None
        self._look_pause_s = STUCK_AFTER_S
        self._reception = Reception(channel, self._handle)
        self._told_s = 0.0  # when the loader was told of what has been done
        self._shares: dict[int, Share] = {}
        self._layouts: weakref.WeakKeyDictionary[Layout, bytes] = weakref.WeakKeyDictionary()
        answer_for_torch()

    def serve(self) -> None:
        """Do what the loader asks for until it is gone. In the main thread."""
        self._reception.serve(self._patience, self._look)

    def _handle(self, message: Any, file: int | None) -> None:
        if isinstance(message, Load):
            self._note(message)
            share = self._shares.get(message.of)
            if share is not None:
                assert self._marks is not None
                marks = self._marks.memory[message.first_mark : message.end_mark]
                share.load(message.number, message.indices, marks)
                if message.number == 0:
                    self._look_later(STUCK_AFTER_S)
        elif isinstance(message, Hello):
            self._marks = Marks(file)
        elif isinstance(message, Notes):
            self._note(message)
        elif isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, End):
            share = self._shares.pop(message.of, None)
            if share is not None:
                share.close()
        elif isinstance(message, Widen) and self._crew is not None:
            self._crew.widen_if_stuck()

    def _patience(self) -> float | None:
        return None if self._looks_at_s is None else max(0.0, self._looks_at_s - time.monotonic())

    def _look(self) -> None:
        """See to it that a first read that takes long does not keep others waiting, as a crew's loop would.

        To start that takes a millisecond, in which no batch comes.
        """
        self._look_later(2 * self._look_pause_s)
        if self._crew is not None:
            self._crew.widen_if_stuck()

    def _look_later(self, pause_s: float) -> None:
        self._look_pause_s = pause_s
        self._looks_at_s = time.monotonic() + pause_s if pause_s < LAST_LOOK_S else None

    def close(self, timeout_s: float) -> None:
        """End threads and passes; the process ends when this returns, whatever they do."""
        deadline = time.monotonic() + timeout_s
        for share in self._shares.values():
            share.close()
        if self._crew is not None:
            self._crew.close()
            self._crew.join(timeout_s)
        self._portal.join(deadline)
        self._portal.close()
        self._reception.close()

    def _note(self, notes: Notes | Load) -> None:
        for segment, num_sent in notes.freed:
            if segment in self._sent and num_sent == self._num_sent[segment]:  # else we have been told before
                self._ring.release(self._sent.pop(segment))
        for of, number in notes.taken:
            share = self._shares.get(of)
            if share is not None:
                share.note_taken(number)

    def _begin(self, begin: Begin) -> None:
        part = self._part
        if begin.epoch_told is not None and callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(begin.epoch_told)
        context = PassContext(
            self._dataset,
            part.num_all_workers,
            begin.base_seed,
            self._seed,
            begin.epoch,
            first_worker=part.first_worker,
            process=part.process,
        )
        items = None
        if self._kind is Kind.ITERABLE:
            items = self._items(context, begin)
        source = Source(
            context,
            batched=self._settings.batched,
            by_rows=self._settings.by_rows,
            reader=self._reader,
            default_reader=self._default_reader,
            read_policy=self._settings.read_policy,
            cache=self._cache,
            tally=self._tally,
            items=items,
            kind=self._kind,
        )
        if self._crew is None:
            seed_process(begin.base_seed + part.first_worker)
            self._crew = self._new_crew(source)
            self._crew.start()
            self._crew.portal.pass_through(send, self._channel, Begun(self._crew.is_single))
        share = Share(
            self._settings,
            source,
            self._crew,
            ring=self._ring,
            tally=self._tally,
            budget=self._budget,
            on_done=functools.partial(self._report, begin.of),
            on_broken=self._break,
        )
        self._shares[begin.of] = share
        self._crew.attach(share)

    def _items(self, context: PassContext, begin: Begin) -> Items:
        worker_init_fn = None
        if self._worker_init_fn is not None and (self._crew is None or context.num_workers > 1):  # copies begin anew
            worker_init_fn = Beginning(self._worker_init_fn, begin.base_seed, puts_back=False)
        return Items(
            context,
            num_lanes=context.num_workers,
            threaded=True,
            worker_init_fn=worker_init_fn,
            in_order=self._settings.in_order,
            saved=begin.saved,
        )

    def _new_crew(self, source: Source) -> Crew:
        part, on_start = self._part, None
        if self._worker_init_fn is not None and source.kind is not Kind.ITERABLE:
            beginning = Beginning(self._worker_init_fn, source.context.base_seed, puts_back=False)
            on_start = functools.partial(begin_worker, beginning, source.context)
        regulated = source.kind in (Kind.STAGED, Kind.AWAITED, Kind.ASYNC)
        return Crew(
            source.kind,
            num_workers=part.num_workers,
            reads=part.num_reads or (Regulator(part.most_reads) if regulated else 1),
            worker_init_fn=on_start,
            portal=self._portal,
            ledger=self._ledger,
            tally=self._tally,
            pace=self._pace,
            loop_at_once=False,
            on_park=self._reception.listen,
        )

    def _break(self, exc: BaseException) -> None:
        send(self._channel, Broken(abroad.pack_error(exc)))

    # On the threads that finish batches.

    def _report(self, of: int, batch: Batch, given: Sequence[Any]) -> None:
        try:
            made = self._made_of(batch)
        except BaseException as exc:  # no memory, or a value that cannot be pickled
            batch.discard()
            made = _refusal(exc, batch)
        failed = None
        if batch.failed:
            failed = {position: abroad.pack_record(record) for position, record in batch.failed.items()}
        num_bytes, file = 0, None
        if made.segment is not None:
            num_bytes, file = self._sent[made.segment].arena.nbytes, self._segments.take_file(made.segment)
        done = Done(
            of,
            batch.number,
            batch.is_end,
            None if batch.indices is given else list(batch.indices),
            batch.place,
            failed,
            num_bytes,
            self._totals(of),
            self._dropped(),
            *made,
        )
        batch.result = batch.error = None
        try:
            send(self._channel, done, file)
        finally:
            if file is not None:
                os.close(file)
        assert self._crew is not None
        if self._crew.num_awake == 1:
            self._reception.take_in()
        else:
            self._reception.listen()

    def _made_of(self, batch: Batch) -> Made:
        if batch.error is not None:
            assert batch.context is not None
            return Made(error=(abroad.pack_error(batch.error), abroad.pack_context(batch.context)))
        if batch.is_empty:
            return Made()
        if batch.slot is None:
            return self._packed(batch)
        assert batch.layout is not None
        layout = self._layouts.get(batch.layout)
        if layout is None:
            layout = self._layouts[batch.layout] = pickle.dumps(batch.layout, pickle.HIGHEST_PROTOCOL)
        texts = batch.layout.texts(batch.columns)
        slot, batch.slot, batch.columns = batch.slot, None, []
        return Made(self._hand_over(slot), layout, texts)

    def _packed(self, batch: Batch) -> Made:
        packed = Packed(batch.result)
        if packed.num_bytes == 0:
            return Made(pieces=(packed.pickled, packed.spans))
        slot = self._ring.acquire(packed.num_bytes)
        packed.write(slot.arena)
        slot.seal()
        return Made(self._hand_over(slot), pieces=(packed.pickled, packed.spans))

    def _hand_over(self, slot: Slot) -> int:
        segment = self._segments.number_of(slot.address)
        self._num_sent[segment] += 1
        self._sent[segment] = slot
        return segment

    def _dropped(self) -> list[int]:
        dropped = []
        while self._segments.dropped:
            dropped.append(self._segments.dropped.popleft())
            del self._num_sent[dropped[-1]]
        return dropped

    def _totals(self, of: int) -> Totals | None:
        """Return what there is to tell of all threads, which takes a while: not for each of many batches.

        But with the last one of a pass; of an iterable dataset any may be that.
        """
        now_s, share = time.monotonic(), self._shares.get(of)
        may_be_last = self._kind is Kind.ITERABLE or share is None or share.is_idle
        if now_s - self._told_s < _TELL_EVERY_S and not may_be_last:
            return None
        self._told_s = now_s
        crew, budget = self._crew, self._budget
        assert crew is not None
        return Totals(self._ledger.sums(), crew.reads_limit, crew.decode.limit, budget.num_bytes, budget.peak_bytes)


def _refusal(exc: BaseException, batch: Batch) -> Made:
    error: BaseException = exc
    if not isinstance(exc, MemoryError | OSError):
        error = TransferError(
            f"A batch could not be sent from the engine process, since it cannot be pickled: {text_of(exc)}. Have "
            "collate_fn return what can be, or leave out processes=."
        )
        error.__cause__ = strip(exc)
    context = ErrorContext(list(batch.indices), None, "collate")
    return Made(error=(abroad.pack_error(safe_to_raise(error)), abroad.pack_context(context)))
