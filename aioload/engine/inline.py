"""Inline: a pass without threads and without look-ahead, all of it in the consumer's thread, for debugging."""

import contextlib
from collections.abc import Iterator
from typing import Any

from aioload.collate import collate_samples, convert_sample
from aioload.copier import Copier
from aioload.engine.indices import IndexStream
from aioload.engine.portal import Portal
from aioload.engine.run import Answer, Settings
from aioload.engine.source import Kind, Source
from aioload.errors import ErrorContext, LoaderClosedError, annotate, safe_to_raise
from aioload.stats import Tally


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

    def start(self) -> None:
        """Do nothing: nothing is loaded before it is asked for."""

    def close(self) -> None:
        """Drop the pass."""
        self.closed = True

    def next(self) -> Any:
        """Load and return the next batch; :attr:`Answer.OVER` at the end."""
        indices = self._next_indices()
        if isinstance(indices, Answer):
            return indices
        samples: list[Any] | None
        if self._source.kind is Kind.ITERABLE:
            samples = self._next_items(len(indices))
            if samples is None:
                return Answer.OVER
        elif self._source.kind is Kind.MANY:
            with self._noting(indices, "fetch"):
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
        for index in indices:
            with self._noting(index, "fetch"):
                samples.append(await self._source.fetch(index))
        return self._deliver(samples, indices)

    def _next_indices(self) -> list[Any] | Answer:
        if self.closed:
            message = "The loader was closed. Call iter(loader) for a new pass."
            raise LoaderClosedError(message)
        if self._over:
            return Answer.OVER
        try:
            entry = next(self._stream)
        except StopIteration:
            self._over = True
            return Answer.OVER
        except Exception as exc:
            annotate(exc, ErrorContext(None, None, "sampler"))
            raise
        return list(entry) if self._settings.batched else [entry]

    def _next_items(self, count: int) -> list[Any] | None:
        """Return the next items of an iterable dataset, ``None`` at its end."""
        stream = self._source.stream
        with self._noting(stream.position, "fetch"):
            try:
                items = stream.take(count)
            except StopIteration:
                items = []
        if not items or (self._settings.drop_last and len(items) < count):
            self._over = True
            return None
        return items

    def _load(self, index: Any) -> Any:
        if self._source.kind is Kind.STAGED:
            with self._noting(index, "read"):
                data = self._source.read(index)
            self._tally.bytes_read += len(data)
            with self._noting(index, "decode"):
                return self._source.decode(data, index)
        with self._noting(index, "fetch"):
            if self._source.kind is Kind.ASYNC:
                return self._portal.run_here(self._awaited(index))
            return self._source.fetch(index)

    async def _awaited(self, index: Any) -> Any:
        return await self._source.fetch(index)

    @contextlib.contextmanager
    def _noting(self, index: Any, stage: str) -> Iterator[None]:
        """Have what is raised inside say where it came from."""
        try:
            yield
        except Exception as exc:
            where = self._source.locate(index) if self._source.kind is Kind.STAGED else None
            error = safe_to_raise(exc)
            annotate(error, ErrorContext(index, where, stage))
            if error is exc:
                raise
            raise error from exc

    def _deliver(self, samples: list[Any], indices: list[Any]) -> Any:
        def describe(position: int) -> str:
            return f"index {indices[position]!r}"

        settings = self._settings
        with self._noting(list(indices) if settings.batched else indices[0], "collate"):
            if settings.batched:
                result = collate_samples(settings.collate_fn, samples, describe)
            else:
                result = convert_sample(settings.collate_fn, samples[0])
        if self._copier is not None:
            result = self._copier.move(result)
        self.delivered += 1
        self._tally.samples += len(samples)
        self._tally.batches += 1
        return result
