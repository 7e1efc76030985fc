"""Awaited: files are read by coroutines on the loop, and decoded on the decode pool."""

import asyncio
import functools
import time
from types import CoroutineType
from typing import Any

from aioload.context import HERE, Stage
from aioload.engine.batch import Batch
from aioload.engine.fetchers import Gate, is_held, lap_collate, lap_decode, settle, submit_if_empty
from aioload.engine.pace import Pace
from aioload.engine.pools import ThreadPool, Worker
from aioload.engine.source import Source, refuse_coroutine
from aioload.engine.tasks import TaskPool
from aioload.errors import strip

_LOCATION, _SAMPLE = Stage.LOCATION, Stage.SAMPLE


class AwaitedFetcher:
    """AWAITED: ``await reader.read(location)`` on the loop, a job per sample, then ``decode`` on the decode pool."""

    def __init__(self, source: Source, tasks: TaskPool, decode: ThreadPool, gate: Gate, pace: Pace) -> None:
        self._source, self._tasks, self._decode_pool, self._gate = source, tasks, decode, gate
        self._samples, self._context = source.samples, source.context
        self._read_patiently = source.patient(pace, tasks.tally)

    def submit(self, batch: Batch) -> None:
        """Queue a read per sample."""
        submit_if_empty(batch, self._decode_pool)
        self._tasks.submit((self._read, batch, position) for position in range(len(batch.indices)))

    def resubmit(self, jobs: list[Any]) -> None:
        """Queue the jobs."""
        decodes = [job for job in jobs if job[0] == self._decode]
        if decodes:
            self._decode_pool.submit(decodes, len(decodes))
        self._tasks.submit(job for job in jobs if job[0] != self._decode)

    async def _read(self, batch: Batch, position: int, granted: int = 0) -> None:
        """Read a sample, for which ``granted`` bytes have been counted already."""
        tally = self._tasks.tally
        if not batch.wants(position):
            if granted:
                batch.claim.give_raw(granted)
            if batch.drop(position):
                batch.finish(tally)
            return
        if not granted:
            if is_held(self._gate, (self._read, batch, position)):
                return
            granted = max(1, self._gate.assumed_bytes)
            if not self._gate.ask(batch, granted):
                self._gate.hold((functools.partial(self._read, granted=granted), batch, position), granted)
                return
        tally.reads_in_flight += 1
        started = time.perf_counter()
        index = batch.indices[position]
        HERE.set([self._context, index, _LOCATION, 0, None])
        try:
            data = await self._read_patiently(self._samples.location(index))
            num_bytes = self._source.size_of(data)
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError) and self._tasks.closed:
                raise  # the loader stops; this is not the reader's doing
            batch.claim.give_raw(granted)
            self._decode_pool.submit(((self._fail, batch, position, strip(exc)),), 1)  # the user's on_error may block
            return
        finally:
            tally.reads_in_flight -= 1
            tally.read_s += time.perf_counter() - started
            HERE.set(None)
        tally.bytes_read += num_bytes
        self._gate.note_read(num_bytes)
        batch.claim.correct_raw(granted, num_bytes)
        self._decode_pool.submit(((self._decode, batch, position, data),), 1)

    def _fail(self, worker: Worker, batch: Batch, position: int, exc: BaseException) -> None:
        HERE.set([self._context, batch.indices[position], _LOCATION, worker.number, None])
        settle(batch, batch.fail(position, exc, "read"), worker)

    def _decode(self, worker: Worker, batch: Batch, position: int, data: Any) -> None:
        if is_held(self._gate, (self._decode, batch, position, data)):
            return
        try:
            self._decode_sample(worker, batch, position, data)
        finally:
            batch.claim.give_decoded(self._source.size_of(data))

    def _decode_sample(self, worker: Worker, batch: Batch, position: int, data: Any) -> None:
        if not batch.wants(position):
            settle(batch, batch.drop(position), worker)
            return
        index = batch.indices[position]
        HERE.set([self._context, index, _SAMPLE, worker.number, None])
        try:
            sample = self._samples.decode(data, index)
            if type(sample) is CoroutineType:
                refuse_coroutine(sample, self._samples, "decode")
        except BaseException as exc:
            settle(batch, batch.fail(position, strip(exc), "decode"), worker)
            return
        lap_decode(worker)
        if batch.add(position, sample):
            batch.finish(worker.tally)
        lap_collate(worker)
