"""Inline: a pass without threads and without look-ahead, all of it in the consumer's thread, for debugging."""

import asyncio
import dis
import functools
import signal
import sys
import threading
from collections import deque
from types import CodeType, CoroutineType
from typing import Any

from aioload.collate import collate_samples, convert_sample
from aioload.copier import Copier
from aioload.engine import aside
from aioload.engine.indices import IndexStream
from aioload.engine.portal import Portal
from aioload.engine.settings import Answer, Settings
from aioload.engine.source import Kind, Source, refuse_coroutine
from aioload.errors import (
    ErrorContext,
    LoaderClosedError,
    RunningLoopError,
    annotate,
    describe_sample,
    is_interrupt,
    safe_to_raise,
)
from aioload.stats import Tally

_RAISE = bytes([dis.opmap["RAISE_VARARGS"]])


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
    ) -> None:
        self._settings, self._source, self._stream = settings, source, stream
        self._portal, self._copier, self._tally = portal, copier, tally
        self.delivered = 0
        self.closed = False
        self._over = False
        self._lock = threading.Lock()  # one thread at a time draws indices
        self._undone: deque[list[Any]] = deque()  # indices of calls that were interrupted
        self._stream_error: BaseException | None = None
        self._item_error: BaseException | None = None  # of an iterable dataset, after the items before it

    def start(self) -> None:
        """Do nothing: nothing is loaded before it is asked for."""

    def close(self) -> None:
        """Drop the pass."""
        self.closed = True
        self._undone.clear()

    def next(self) -> Any:
        """Load and return the next batch; :attr:`Answer.OVER` at the end. An interrupted call loses no batch."""
        if self._source.kind is Kind.ASYNC and aside.in_event_loop():
            message = (
                "num_workers=0 runs an async dataset in the caller's thread, where an event loop is running already. "
                "Use 'async for', or num_workers=1 or more, which brings a loop of the loader's own."
            )
            raise RunningLoopError(message)
        indices = self._next_indices()
        if isinstance(indices, Answer):
            return indices
        try:
            return self._load_batch(indices)
        except KeyboardInterrupt as exc:
            if _is_of_signal(exc):
                self._undone.append(indices)
            raise

    def _load_batch(self, indices: list[Any]) -> Any:
        samples: list[Any] | None
        if self._source.kind is Kind.ITERABLE:
            samples = self._next_items(len(indices))
            if samples is None:
                return Answer.OVER
            stop = self._source.stream.position
            indices = list(range(stop - len(samples), stop))
        elif self._source.kind is Kind.MANY:
            with self._noting(list(indices), "fetch"):
                samples = self._source.fetch_many(indices)
        else:
            samples = [self._load(index) for index in indices]
        return self._deliver(samples, indices)

    async def anext(self) -> Any:
        """As :meth:`next`; an async dataset is awaited on the running loop, any other one blocks it."""
        if self._source.kind is not Kind.ASYNC:
            return self.next()
        indices = self._next_indices()
        if isinstance(indices, Answer):
            return indices
        samples = []
        try:
            for index in indices:
                with self._noting(index, "fetch"):
                    samples.append(await self._source.samples[index])
            return self._deliver(samples, indices)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # else it is the dataset that raised it
                self._undone.append(indices)
            raise
        except KeyboardInterrupt as exc:
            if _is_of_signal(exc):
                self._undone.append(indices)
            raise

    def _next_indices(self) -> list[Any] | Answer:
        with self._lock:
            if self._undone:
                return self._undone.popleft()
            if self._over:
                return self._finish()
            if self.closed:
                message = "The loader was closed. Call iter(loader) for a new pass."
                raise LoaderClosedError(message)
            try:
                return self._stream.draw(batched=self._settings.batched)
            except StopIteration:
                self._over = True
            except BaseException as exc:
                self._over, self._stream_error = True, safe_to_raise(exc)
                if is_interrupt(exc):  # now, and instead of the end, which it may have brought
                    raise
            return self._finish()

    def _finish(self) -> Answer:
        error, self._stream_error = self._stream_error, None
        if error is None:
            return Answer.OVER
        annotate(error, ErrorContext(None, None, "sampler"))
        try:
            raise error
        finally:
            del error

    def _next_items(self, count: int) -> list[Any] | None:
        """Return the next items of an iterable dataset, ``None`` at its end."""
        stream, whole = self._source.stream, self._settings.batched and self._settings.drop_last
        with stream.lock:
            try:
                error, self._item_error = self._item_error, None
                if error is not None:
                    raise error
                return stream.take(count, whole=whole)
            except StopIteration:
                self._over = True
                return None
            except BaseException as exc:
                # The stream takes any KeyboardInterrupt here for Ctrl-C, and keeps the items before it.
                if isinstance(exc, KeyboardInterrupt) and not _is_of_signal(exc):
                    items = stream.take(0, whole=whole)
                    if items and not whole:
                        self._item_error = exc
                        return items
                with self._noting(stream.position, "fetch"):
                    raise
            finally:
                error = None  # else its traceback refers to it by way of this frame

    def _load(self, index: Any) -> Any:
        if self._source.kind is Kind.STAGED:
            with self._noting(index, "read"):
                data = self._source.read(index)
            self._tally.bytes_read += len(data)
            with self._noting(index, "decode"):
                return self._plain(self._source.samples.decode(data, index), "decode")
        with self._noting(index, "fetch"):
            if self._source.kind is Kind.ASYNC:
                return self._portal.run_here(self._awaited(index))
            return self._plain(self._source.samples[index], "__getitem__")

    def _plain(self, sample: Any, method: str) -> Any:
        if type(sample) is CoroutineType:
            refuse_coroutine(sample, self._source.samples, method)
        return sample

    async def _awaited(self, index: Any) -> Any:
        return await self._source.samples[index]

    def _noting(self, index: Any, stage: str) -> "_Noting":
        return _Noting(self._source, index, stage)

    def _deliver(self, samples: Any, indices: list[Any]) -> Any:
        def describe(position: int) -> str:
            index = indices[position] if position < len(indices) else None
            return describe_sample(index, None if index is None else self._source.locate(index))

        settings = self._settings
        with self._noting(list(indices) if settings.batched else indices[0], "collate"):
            if settings.batched:
                result = collate_samples(settings.collate_fn, samples, describe)
            else:
                result = convert_sample(settings.collate_fn, samples[0])
        if self._copier is not None:
            result = self._copier.move(result)
        self.delivered += 1
        self._tally.samples += len(indices)
        self._tally.batches += 1
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
        if exc is None or _is_of_signal(exc):
            return
        where = None if isinstance(self._index, list) else self._locate()
        error = safe_to_raise(exc)
        annotate(error, ErrorContext(self._index, where, self._stage))
        if error is exc:
            return
        try:
            raise error
        finally:
            del error

    def _locate(self) -> Any:
        try:
            return self._source.locate(self._index)
        except KeyboardInterrupt as exc:
            if _is_of_signal(exc):
                raise
            return None


def _is_of_signal(exc: BaseException | None) -> bool:
    """Whether ``exc`` is Ctrl-C, or comes of it, and is not what the dataset raises of itself; in doubt it is."""
    if exc is None or not is_interrupt(exc):
        return False
    for _ in range(100):  # a chain that somebody has made a ring of must not hold us up
        if not isinstance(exc, KeyboardInterrupt):
            return False
        if not _has_raise_statement(exc):
            return True
        exc = exc.__context__
    return True


def _has_raise_statement(exc: BaseException) -> bool:
    """Whether a ``raise`` outside of the standard library and of signal handlers has raised ``exc``.

    Python calls handlers between instructions, and never from a ``raise``. The library's own one is C code, without
    a frame; asyncio's makes the loop's runner raise.
    """
    handlers = [_code_of(signal.getsignal(number)) for number in signal.valid_signals()]
    traceback, origin = exc.__traceback__, None
    while traceback is not None:
        if any(traceback.tb_frame.f_code is code for code in handlers):
            return False
        origin, traceback = traceback, traceback.tb_next
    if origin is None:
        return False
    frame, position = origin.tb_frame, origin.tb_lasti
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return frame.f_code.co_code[position : position + 1] == _RAISE and module not in sys.stdlib_module_names


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):  # which a method has as well
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    return getattr(handler, "__code__", None)
