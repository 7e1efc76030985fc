"""Child: an engine process, from its start to its end; :mod:`aioload.engine.gang` tells what goes on in between."""

import contextlib
import fcntl
import functools
import gc
import os
import pickle
import select
import signal
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import IterableDataset

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
    Failed,
    Hello,
    InPieces,
    InRows,
    Load,
    Notes,
    Totals,
    Widen,
)
from aioload.engine.pace import Pace
from aioload.engine.packing import Packed
from aioload.engine.parcel import Parcel
from aioload.engine.portal import Portal
from aioload.engine.regulator import Regulator
from aioload.engine.segments import Segments
from aioload.engine.settings import Settings
from aioload.engine.share import Share
from aioload.engine.source import Kind, Source
from aioload.errors import ErrorContext, TransferError, safe_to_raise, strip, text_of
from aioload.layout import Layout
from aioload.pinned import piece_bytes
from aioload.readers import Reader, SchemeReader
from aioload.ring import Ring, Slot
from aioload.stats import Ledger
from aioload.workers import answer_for_torch

_END_S = 1.0
"""Seconds that threads get to end; one that is stuck in a read would keep the process for ever."""

_TELL_EVERY_S = 0.02
"""Seconds between two accounts of what has been done, while there is more to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one of several processes is to do of the whole.

    Attributes:
        process: Its number.
        num_processes: How many there are.
        first_worker: The number of the first of its workers.
        num_workers: Its decode threads.
        num_all_workers: Those of all processes.
        num_reads: Its reads under way, ``None`` for as many as it finds best.
        most_reads: What that never exceeds.
    """

    process: int
    num_processes: int
    first_worker: int
    num_workers: int
    num_all_workers: int
    num_reads: int | None
    most_reads: int


def main(parcel: Parcel, end: socket.socket, life: Connection, part: Part) -> None:
    """Load what is asked for until the other side is gone. In the main thread of a new process.

    Args:
        parcel: What it is given.
        end: Its end of the channel.
        life: Its end of a pipe that the consumer's process closes when this one has ended, or that is closed for it.
        part: What it is to do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with(life.fileno())
    _let_others_finish()
    torch.set_num_threads(1)  # as torch's workers: there are threads enough
    channel = Channel(end)
    if not parcel.contents and parcel.error is None:
        files = _files_of_contents(channel)
        if not files:
            return
        parcel.unpack(*files)
    if parcel.error is not None:
        error = TransferError(
            f"The dataset could not be unpacked in the engine process: {text_of(parcel.error)}. Define what it is made "
            "of in modules that can be imported, not at a prompt or by python -c; or have processes forked, by "
            "multiprocessing_context='fork'."
        )
        error.__cause__ = parcel.error
        _send(channel, Broken(abroad.pack_error(error)))
        return
    gc.freeze()  # what is there now stays: a collection would touch, and so copy, what is shared with who forked us
    child = Child(channel, part, **parcel.contents)
    try:
        while (received := channel.receive()) is not None:
            message, file = received
            child.handle(pickle.loads(message), file)
    except BaseException as exc:
        _send(channel, Broken(abroad.pack_error(exc)))
        raise
    finally:
        child.close(_END_S)


def _files_of_contents(channel: Channel) -> list[int]:
    """Return what the parcel is to be filled from; nothing if the other side is gone."""
    files = []
    while (received := channel.receive()) is not None:
        message, file = received
        assert file is not None
        files.append(file)
        if pickle.loads(message).is_last:
            return files
    return []


class Child:
    """The engine of this process: what a runtime is to a loader.

    Args:
        channel: To the loader.
        part: What it is to do.
        dataset: The dataset, and so on.
        settings: What the loader's arguments come to, ``max_bytes`` being this process's part.
        is_page_locked: Whether the loader page-locks the memory of slots.
    """

    def __init__(
        self,
        channel: Channel,
        part: Part,
        *,
        dataset: Any,
        reader: Reader | None,
        cache: Cache | None,
        worker_init_fn: Any,
        seed: int | None,
        settings: Settings,
        is_page_locked: bool,
    ) -> None:
        self._channel, self._part, self._settings = channel, part, settings
        self._dataset, self._reader, self._cache, self._seed = dataset, reader, cache, seed
        self._worker_init_fn, self._default_reader = worker_init_fn, SchemeReader()
        # As for page-locked memory in one process, few sizes: to lock a new one takes milliseconds.
        self._segments = Segments(piece_bytes if is_page_locked else None)
        # Free slots are few: the loader is told of each that goes.
        self._ring = Ring(new_memory=self._segments.new_memory, falls_back=False, max_free=settings.max_batches + 2)
        self._sent: dict[int, Slot] = {}
        """Slots that the loader has, by segment."""
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
        self._told_s = 0.0  # when the loader was told of what has been done
        self._shares: dict[int, Share] = {}
        self._layouts: weakref.WeakKeyDictionary[Layout, bytes] = weakref.WeakKeyDictionary()
        answer_for_torch()

    def handle(self, message: Any, file: int | None = None) -> None:
        """Do what the loader asks for, with the file that came with the message."""
        if isinstance(message, Load):
            if message.notes is not None:
                self._note(message.notes)
            share, span = self._shares.get(message.of), message.marks
            if share is not None:
                assert self._marks is not None
                share.load(message.number, message.indices, self._marks.memory[span.start : span.stop])
                if message.number == 0 and self._crew is not None:
                    self._crew.begin()
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

    def _note(self, notes: Notes) -> None:
        for segment in notes.freed:
            slot = self._sent.pop(segment, None)
            if slot is not None:
                self._ring.release(slot)
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
        if isinstance(self._dataset, IterableDataset):
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
        )
        if self._crew is None:
            seed_process(begin.base_seed + part.first_worker)
            self._crew = self._new_crew(source)
            self._crew.portal.pass_through(_send, self._channel, Begun())
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
        )

    def _break(self, exc: BaseException) -> None:
        _send(self._channel, Broken(abroad.pack_error(exc)))

    # On the threads that finish batches.

    def _report(self, of: int, batch: Batch, given: Sequence[Any]) -> None:
        try:
            made = self._made_of(batch)
        except BaseException as exc:  # no memory, or a value that cannot be pickled
            batch.discard()
            made = _refusal(exc, batch)
        segment = None if made is None or isinstance(made, Failed) else made.segment
        failed = {position: abroad.pack_record(record) for position, record in batch.failed.items()}
        done = Done(
            of=of,
            number=batch.number,
            made=made,
            is_end=batch.is_end,
            indices=None if batch.indices is given else list(batch.indices),
            place=batch.place,
            failed=failed,
            num_bytes=0 if segment is None else self._sent[segment].arena.nbytes,
            totals=self._totals(),
            dropped=self._dropped(),
        )
        batch.result = batch.error = None
        file = None if segment is None else self._segments.take_file(segment)
        try:
            _send(self._channel, done, file)
        finally:
            if file is not None:
                os.close(file)

    def _made_of(self, batch: Batch) -> InRows | InPieces | Failed | None:
        if batch.error is not None:
            assert batch.context is not None
            return Failed(abroad.pack_error(batch.error), abroad.pack_context(batch.context))
        if batch.is_empty:
            return None
        if batch.slot is None:
            return self._packed(batch)
        assert batch.layout is not None
        layout = self._layouts.get(batch.layout)
        if layout is None:
            layout = self._layouts[batch.layout] = pickle.dumps(batch.layout, pickle.HIGHEST_PROTOCOL)
        texts = {number: column for number, column in enumerate(batch.columns) if isinstance(column, list)}
        slot, batch.slot, batch.columns = batch.slot, None, []
        return InRows(self._hand_over(slot), layout, texts)

    def _packed(self, batch: Batch) -> InPieces:
        packed = Packed(batch.result)
        if packed.num_bytes == 0:
            return InPieces(None, packed.pickled, packed.spans)
        slot = self._ring.acquire(packed.num_bytes)
        packed.write(slot.arena)
        slot.seal()
        return InPieces(self._hand_over(slot), packed.pickled, packed.spans)

    def _hand_over(self, slot: Slot) -> int:
        segment = self._segments.number_of(slot.address)
        self._sent[segment] = slot
        return segment

    def _dropped(self) -> list[int]:
        dropped = []
        while self._segments.dropped:
            dropped.append(self._segments.dropped.popleft())
        return dropped

    def _totals(self) -> Totals | None:
        """Return what there is to tell of all threads, which takes a while: not for each of many batches."""
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_EVERY_S and not all(share.is_idle for share in tuple(self._shares.values())):
            return None
        self._told_s = now_s
        crew, budget = self._crew, self._budget
        assert crew is not None
        return Totals(self._ledger.sums(), crew.reads_limit, crew.decode.limit, budget.num_bytes, budget.peak_bytes)


def _end_with(life: int) -> None:
    """Have the kernel end this process when the other end of a pipe is closed, which says that the consumer's is gone.

    That is certain even where code that does not return has the interpreter: what SIGIO does by default is to end it.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it was closed before
        os._exit(0)


def _let_others_finish() -> None:
    """Have the kernel not interrupt whoever is at work, the training step say, when a read here is done.

    This process gets its share of the processor as ever. Where all are busy it takes it at the next tick, not at once.
    """
    with contextlib.suppress(OSError):  # forbidden here
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else somebody has chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _refusal(exc: BaseException, batch: Batch) -> Failed:
    error: BaseException = exc
    if not isinstance(exc, MemoryError | OSError):
        error = TransferError(
            f"A batch could not be sent from the engine process, since it cannot be pickled: {text_of(exc)}. Have "
            "collate_fn return what can be, or leave out processes=."
        )
        error.__cause__ = strip(exc)
    context = ErrorContext(list(batch.indices), None, "collate")
    return Failed(abroad.pack_error(safe_to_raise(error)), abroad.pack_context(context))


def _send(channel: Channel, message: Any, file: int | None = None) -> None:
    channel.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), file)
