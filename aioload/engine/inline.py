"""Inline: a pass without threads and without look-ahead, all of it in the consumer's thread, for debugging."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from aioload.collate import collate_samples, convert_sample
from aioload.context import HERE, Stage, leave_sample
from aioload.copier import Copier
from aioload.engine import aside
from aioload.engine.indices import IndexStream
from aioload.engine.pace import Pace
from aioload.engine.portal import Portal
from aioload.engine.position import Place
from aioload.engine.settings import Answer, Settings
from aioload.engine.source import Kind, Source, refuse_coroutine
from aioload.engine.tolerance import Losses, let_go, record_of
from aioload.errors import (
    ErrorContext,
    LoaderClosedError,
    RunningLoopError,
    SampleError,
    annotate,
    context_of,
    describe_sample,
    error_context,
    is_interrupt,
    safe_to_raise,
    strip,
)
from aioload.stats import Tally

_ON_LOOP = (Kind.ASYNC, Kind.AWAITED)


@dataclass(slots=True)
class Drawn:
    """A batch under way: its indices, its place in the pass, and its samples once they are there.

    Attributes:
        first: The place of the first of them, where they are items of an iterable dataset.
        failed: Samples that it is made without, by position.
        num_lost: How many those are, once that has been counted.
        num_samples: Of what was made of it.
        is_over: Whether there was nothing left to make it of.
    """

    indices: list[Any]
    place: Place | None
    samples: Any = None
    first: int | None = None
    failed: dict[int, SampleError] = field(default_factory=dict)
    num_lost: int = 0
    num_samples: int = 0
    is_over: bool = False


class InlineRun:
    """One pass, batch by batch as it is asked for; the counterpart of :class:`~aioload.engine.run.Run`."""

    def __init__(
        self,
        settings: Settings,
        source: Source,
        stream: IndexStream,
        *,
        portal: Portal,
        copier: Copier | None,
        tally: Tally,
        pace: Pace,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings, self._source, self._stream = settings, source, stream
        self._portal, self._copier, self._tally = portal, copier, tally
        self.record = source.record(stream, 0 if saved is None else saved["num_yielded"])
        """How far the consumer is; it may outlive the run."""
        self.delivered = 0
        self.closed = False
        self._over = False
        self._lock = threading.Lock()  # one thread at a time draws indices
        # What has been drawn and neither given nor failed, by who is at it: an interrupt may come anywhere.
        self._in_hand: dict[Any, Drawn] = {}
        self._undone: deque[Drawn] = deque()  # of calls that were interrupted, for whoever asks next
        self._stream_error: BaseException | None = None
        self._is_cut_short = False  # by that
        self.record.position.num_errors = 0 if saved is None else saved.get("num_errors", 0)
        self._losses = Losses(settings.tolerance, self.record.position)
        self._read_patiently = source.patient(pace, tally)

    def start(self) -> None:
        """Do nothing: nothing is loaded before it is asked for."""

    def close(self) -> None:
        """Drop the pass."""
        self.closed = True
        self._undone.clear()

    def next(self) -> Any:
        """Load and return the next batch; :attr:`Answer.OVER` at the end. An interrupted call loses no batch."""
        if self._source.kind in _ON_LOOP and aside.in_event_loop():
            message = (
                "num_workers=0 runs an async dataset or reader in the caller's thread, where an event loop is running "
                "already. Use 'async for', or num_workers=1 or more, which brings a loop of the loader's own."
            )
            raise RunningLoopError(message)
        while (result := self._next()) is Answer.NOT_YET:
            pass
        return result

    def _next(self) -> Any:
        """Return the next batch, :attr:`Answer.OVER`, or :attr:`Answer.NOT_YET` where nothing is left of a batch."""
        who = threading.get_ident()
        drawn = self._next_indices(who)
        if isinstance(drawn, Answer):
            return drawn
        outside = HERE.get()  # this may be code of another loader's dataset
        try:
            try:
                if drawn.samples is None:
                    self._load_batch(drawn)
                result = Answer.OVER if drawn.is_over else self._made(drawn)
            finally:
                HERE.set(outside)
            return self._give(drawn, result, who)
        except BaseException as exc:
            self._settle(drawn, who, is_undone=is_interrupt(exc))
            raise

    def _load_batch(self, drawn: Drawn) -> None:
        if self._source.kind is Kind.ITERABLE:
            self._load_items(drawn)
        elif self._source.kind is Kind.MANY:
            self._load_many(drawn)
        else:
            self._load_singly(drawn)

    def _load_many(self, drawn: Drawn) -> None:
        HERE.set([self._source.context, None, Stage.BATCH, None, None])
        try:
            with self._noting(list(drawn.indices), "fetch"):
                drawn.samples = self._source.fetch_many(drawn.indices)
        except Exception:
            if self._settings.tolerance is None or not self._source.has_single:
                raise
            self._load_singly(drawn)  # to see which one it is

    def _load_singly(self, drawn: Drawn) -> None:
        samples: list[Any] = []
        drawn.failed = {}
        for index in drawn.indices:
            try:
                samples.append(self._load(index))
            except Exception as exc:
                samples.append(self._tolerate(drawn, len(samples), exc))
        drawn.samples = samples

    async def _load_awaited(self, drawn: Drawn) -> None:
        samples: list[Any] = []
        drawn.failed = {}
        for index in drawn.indices:
            try:
                samples.append(await self._awaited(index))
            except Exception as exc:
                samples.append(self._tolerate(drawn, len(samples), exc))
        drawn.samples = samples

    def _tolerate(self, drawn: Drawn, position: int, exc: Exception) -> Any:
        """Return what stands in for a sample that failed, ``None`` if nothing does; raise the error if it counts."""
        tolerance, context = self._settings.tolerance, error_context(exc)
        if tolerance is None or context is None:
            try:
                raise exc
            finally:
                del exc
        sample = None
        if tolerance.stand_in is not None:
            with self._noting(context.index, context.stage):
                sample = tolerance.stand_in(exc)
        record = record_of(strip(exc), context)
        let_go(record)
        drawn.failed[position] = record
        return sample

    def _load_items(self, drawn: Drawn) -> None:
        """Take what comes next out of an iterable dataset, if anything does."""
        while (lane := self._source.items.next_lane()) is not None:
            with lane.lock:
                try:
                    drawn.samples, drawn.first, drawn.place = lane.take(
                        len(drawn.indices), whole=self._settings.batched and self._settings.drop_last
                    )
                except StopIteration:
                    continue
                except BaseException as exc:
                    if is_interrupt(exc):
                        self._source.items.give_back(lane)
                    else:
                        drawn.place = lane.place_of_error()
                    with self._noting(lane.position, "fetch"):
                        raise
            return
        self._is_cut_short = any(lane.is_cut_short for lane in self._source.items.lanes)
        self._over = drawn.is_over = True
        self.record.position.is_over = not self._is_cut_short

    def _settle(self, drawn: Drawn, who: Any, *, is_undone: bool) -> None:
        """Deal with a batch that the consumer does not get: now, or never."""
        if is_undone:
            del self._in_hand[who]
            self._undone.append(drawn)
        else:
            self.record.position.add(drawn.place, drawn.num_lost)
            del self._in_hand[who]

    async def anext(self) -> Any:
        """As :meth:`next`; an async dataset or reader is awaited on the running loop, any other one blocks it."""
        if self._source.kind not in _ON_LOOP:
            return self.next()
        while (result := await self._anext()) is Answer.NOT_YET:
            pass
        return result

    async def _anext(self) -> Any:
        who = asyncio.current_task()
        drawn = self._next_indices(who)
        if isinstance(drawn, Answer):
            return drawn
        outside = HERE.get()
        try:
            try:
                await self._load_awaited(drawn)
                result = self._made(drawn)
            finally:
                HERE.set(outside)
            return self._give(drawn, result, who)
        except BaseException as exc:
            self._settle(drawn, who, is_undone=is_interrupt(exc) or _is_cancelled(exc))
            raise

    def _next_indices(self, who: Any) -> Drawn | Answer:
        with self._lock:
            self.record.position.settle()
            if who in self._in_hand:  # an interrupt cut its latest call short
                return self._in_hand[who]
            if self._undone:
                drawn = self._in_hand[who] = self._undone[0]
                del self._undone[0]
                return drawn
            if self._over:
                return self._finish()
            if self.closed:
                message = "The loader was closed. Call iter(loader) for a new pass."
                raise LoaderClosedError(message)
            drawn = Drawn([], None)
            try:
                drawn.indices = self._stream.draw(batched=self._settings.batched)
                drawn.place = None if self._source.kind is Kind.ITERABLE else self._stream.place
                self._in_hand[who] = drawn
                return drawn
            except StopIteration:
                self._over = True
            except BaseException as exc:
                if is_interrupt(exc) and not self._stream.is_lost:
                    raise
                self._is_cut_short = True
                self._over, self._stream_error = True, safe_to_raise(exc)
                if is_interrupt(exc):  # now, and instead of the end, which it may have brought
                    raise
            return self._finish()

    def _finish(self) -> Answer:
        self.record.position.is_over = not self._is_cut_short
        error, self._stream_error = self._stream_error, None
        if error is None:
            self._losses.check_end()
            return Answer.OVER
        annotate(error, ErrorContext(None, None, "sampler"))
        try:
            raise error
        finally:
            del error

    def _load(self, index: Any) -> Any:
        source = self._source
        if source.kind is Kind.STAGED:
            HERE.set([source.context, index, Stage.LOCATION, None, None])
            with self._noting(index, "read"):
                data = source.read_patiently(source.samples.location(index), self._pause)
                self._tally.bytes_read += source.size_of(data)
            return self._decode(data, index)
        if source.kind is Kind.AWAITED:
            return self._decode(self._portal.run_here(self._awaited_data(index)), index)
        if source.kind is Kind.ASYNC:
            return self._portal.run_here(self._awaited(index))
        HERE.set([source.context, index, Stage.SAMPLE, None, None])
        with self._noting(index, "fetch"):
            return self._plain(source.samples[index], "__getitem__")

    def _decode(self, data: Any, index: Any) -> Any:
        HERE.set([self._source.context, index, Stage.SAMPLE, None, None])
        with self._noting(index, "decode"):
            return self._plain(self._source.samples.decode(data, index), "decode")

    def _pause(self, seconds: float) -> bool:
        self._tally.retries += 1
        time.sleep(seconds)
        return True

    def _plain(self, sample: Any, method: str) -> Any:
        if type(sample) is CoroutineType:
            refuse_coroutine(sample, self._source.samples, method)
        return sample

    async def _awaited_data(self, index: Any) -> Any:
        source = self._source
        HERE.set([source.context, index, Stage.LOCATION, None, None])
        with self._noting(index, "read"):
            data = await self._read_patiently(source.samples.location(index))
            self._tally.bytes_read += source.size_of(data)
        return data

    async def _awaited(self, index: Any) -> Any:
        if self._source.kind is Kind.AWAITED:
            return self._decode(await self._awaited_data(index), index)
        HERE.set([self._source.context, index, Stage.SAMPLE, None, None])
        with self._noting(index, "fetch"):
            return await self._source.samples[index]

    def _noting(self, index: Any, stage: str) -> "_Noting":
        return _Noting(self._source, index, stage)

    def _made(self, drawn: Drawn) -> Any:
        """Return what is made of the samples, or :attr:`Answer.NOT_YET` where nothing is."""
        if drawn.first is not None:
            drawn.indices = list(range(drawn.first, drawn.first + len(drawn.samples)))
        samples, indices, tolerance = drawn.samples, drawn.indices, self._settings.tolerance
        if drawn.failed:
            self._note_losses(drawn)
        if drawn.failed and tolerance is not None and tolerance.stand_in is None:
            sources = tolerance.sources(len(indices), drawn.failed)
            if not sources:
                return Answer.NOT_YET
            samples = [samples[position] for position in sources]
            indices = [indices[position] for position in sources]

        def describe(position: int) -> str:
            index = indices[position] if position < len(indices) else None
            return describe_sample(index, None if index is None else self._source.locate(index))

        settings = self._settings
        leave_sample()
        whose = list(indices) if settings.batched else indices[0]
        with self._noting(whose, "collate"):
            if settings.batched:
                result = collate_samples(settings.collate_fn, samples, describe)
            else:
                result = convert_sample(settings.collate_fn, samples[0])
            if settings.pin:
                result = pin_memory(result)  # type: ignore[no-untyped-call]
        if self._copier is not None:
            with self._noting(whose, "copy"):
                result = self._copier.move(result)
            with self._noting(whose, "device_transform"):
                result = self._copier.transform_here(result)
            self._copier.ring.warn_if_not_pinned(stacklevel=6)
        drawn.num_samples = len(indices)
        return result

    def _note_losses(self, drawn: Drawn) -> None:
        records, again = [drawn.failed[position] for position in sorted(drawn.failed)], drawn.num_lost > 0
        num_lost = len(records)
        if not again:  # nothing is called in between
            self._losses.count, drawn.num_lost = self._losses.count + num_lost, num_lost
        error = self._losses.note(records, again=again)
        if error is not None:
            raise error

    def _give(self, drawn: Drawn, result: Any, who: Any) -> Any:
        """Return what was made, which is the consumer's from then on; or an answer, if it is that."""
        if result is Answer.OVER:
            del self._in_hand[who]
            return result
        num_batches = 0 if result is Answer.NOT_YET else 1
        # An interrupt comes before this or after, and not between these lines: see Position.add.
        self.record.position.add(drawn.place, drawn.num_lost, num_batches)
        del self._in_hand[who]
        self.delivered += num_batches
        self._tally.samples += drawn.num_samples
        self._tally.batches += num_batches
        return result


class _Noting:
    """Has what is raised inside say where it came from.

    It is no ``contextlib.contextmanager``: that one assigns to ``__traceback__``, which an exception may refuse.
    """

    def __init__(self, source: Source, index: Any, stage: str) -> None:
        self._source, self._index, self._stage = source, index, stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if exc is None or is_interrupt(exc):
            return
        where = None if isinstance(self._index, list) else self._source.locate(self._index)
        error = safe_to_raise(exc)
        annotate(error, context_of(exc, self._index, where, self._stage))
        if error is exc:
            return
        try:
            raise error
        finally:
            del error


def _is_cancelled(exc: BaseException) -> bool:
    """Whether it is the caller that has been cancelled, and not the dataset that raises this of itself."""
    task = asyncio.current_task()
    return isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling() > 0
