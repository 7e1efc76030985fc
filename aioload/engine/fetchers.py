"""Fetchers: what is done for each sample of a batch, by kind of dataset, and on which threads.

A fetcher turns a batch into jobs. Each job ends in exactly one of ``add``, ``fail`` or ``drop`` per sample.
"""

import asyncio
import inspect
import time
from typing import Any, Protocol

from aioload.engine import tuner
from aioload.engine.batch import Batch, strip
from aioload.engine.pools import Job, ThreadPool, Worker
from aioload.engine.source import Kind, Source
from aioload.engine.tasks import TaskPool
from aioload.errors import DatasetError

INLINE_BELOW_S = 70e-6
"""A decode cheaper than this runs on the thread that read the file: handing it over costs 15-20 us of the
interpreter lock (62,000 samples of 4 KB a second against 25,000)."""

OFFLOAD_ABOVE_S = 140e-6
"""A decode dearer than this goes to the decode pool, so that decoding threads do not crowd each other out."""

_MEASURE_EVERY = 16


class Gate(Protocol):
    """Keeps jobs of batches beyond the window from starting, once it is known how large batches are."""

    @property
    def horizon(self) -> int:
        """The number of the first batch that must not be worked on yet."""
        ...

    def hold(self, job: Job) -> None:
        """Keep the job until its batch is within the window."""
        ...


class Fetcher(Protocol):
    """How the batches of one kind of dataset are loaded."""

    def submit(self, batch: Batch) -> None:
        """Start loading ``batch``. Does not wait."""
        ...

    def resubmit(self, jobs: list[Job]) -> None:
        """Start jobs that had been held back."""
        ...


class SampleFetcher:
    """SINGLE: ``dataset[index]`` on the decode pool, a job per sample."""

    def __init__(self, source: Source, decode: ThreadPool, gate: Gate) -> None:
        self._source, self._pool, self._gate = source, decode, gate

    def submit(self, batch: Batch) -> None:
        """Queue a job per sample."""
        _submit_if_empty(batch, self._pool)
        self.resubmit([(self._fetch, batch, position, None) for position in range(len(batch.indices))])

    def resubmit(self, jobs: list[Job]) -> None:
        """Queue the jobs."""
        self._pool.submit(jobs, len(jobs))

    def _fetch(self, worker: Worker, batch: Batch, position: int, _: None) -> None:
        if not batch.wants(position):
            _settle(batch, batch.drop(position), worker)
            return
        if batch.number >= self._gate.horizon:
            self._gate.hold((self._fetch, batch, position, None))
            return
        started = time.perf_counter()
        try:
            sample = self._source.fetch(batch.indices[position])
            if inspect.iscoroutine(sample):
                _refuse_coroutine(sample, self._source)
        except BaseException as exc:
            _settle(batch, batch.fail(position, strip(exc), "fetch"), worker)
            return
        worker.tally.decode_s += time.perf_counter() - started
        _settle(batch, batch.add(position, sample, worker.tally), worker)


class StagedFetcher:
    """STAGED: read on the read pool, decode where it is cheapest."""

    def __init__(self, source: Source, reads: ThreadPool, decode: ThreadPool, gate: Gate, *, may_inline: bool) -> None:
        self._source, self._reads, self._decode_pool, self._gate = source, reads, decode, gate
        self._may_inline, self._inline = may_inline, False
        self._decode_cost_s: float | None = None
        self._num_decoded = 0

    def submit(self, batch: Batch) -> None:
        """Queue a read per sample."""
        _submit_if_empty(batch, self._decode_pool)
        self.resubmit([(self._read, batch, position, None) for position in range(len(batch.indices))])

    def resubmit(self, jobs: list[Job]) -> None:
        """Queue the jobs."""
        self._reads.submit(jobs, len(jobs))

    def _read(self, worker: Worker, batch: Batch, position: int, _: None) -> None:
        if not batch.wants(position):
            _settle(batch, batch.drop(position), worker)
            return
        if batch.number >= self._gate.horizon:
            self._gate.hold((self._read, batch, position, None))
            return
        tally = worker.tally
        tally.reads_in_flight = 1
        started = time.perf_counter()
        try:
            data = self._source.read(batch.indices[position])
        except BaseException as exc:
            tally.reads_in_flight = 0
            _settle(batch, batch.fail(position, strip(exc), "read"), worker)
            return
        tally.reads_in_flight = 0
        tally.read_s += time.perf_counter() - started
        tally.bytes_read += len(data)
        if self._inline:
            self._decode(worker, batch, position, data)
        else:
            self._decode_pool.submit(((self._decode, batch, position, data),), 1)

    def _decode(self, worker: Worker, batch: Batch, position: int, data: bytes) -> None:
        if not batch.wants(position):
            _settle(batch, batch.drop(position), worker)
            return
        self._num_decoded += 1
        measured = self._may_inline and self._num_decoded % _MEASURE_EVERY == 1
        cpu_started = time.thread_time() if measured else 0.0
        started = time.perf_counter()
        try:
            sample = self._source.decode(data, batch.indices[position])
        except BaseException as exc:
            _settle(batch, batch.fail(position, strip(exc), "decode"), worker)
            return
        worker.tally.decode_s += time.perf_counter() - started
        if measured:
            self._place(time.thread_time() - cpu_started)
        _settle(batch, batch.add(position, sample, worker.tally), worker)

    def _place(self, cost_s: float) -> None:
        self._decode_cost_s = tuner.smoothed(self._decode_cost_s, cost_s)
        if self._decode_cost_s < INLINE_BELOW_S:
            self._inline = True
        elif self._decode_cost_s > OFFLOAD_ABOVE_S:
            self._inline = False


class BatchFetcher:
    """TAKE, MANY and ITERABLE: a job per batch on the decode pool."""

    def __init__(self, source: Source, decode: ThreadPool, *, batched: bool, drop_last: bool) -> None:
        self._source, self._pool = source, decode
        self._batched, self._drop_last = batched, drop_last
        self._layout = source.take_layout() if source.kind is Kind.TAKE else None
        self._job = {Kind.TAKE: self._take, Kind.MANY: self._many, Kind.ITERABLE: self._items}[source.kind]

    def submit(self, batch: Batch) -> None:
        """Queue one job."""
        if self._source.kind is Kind.ITERABLE:
            self._source.stream.expected.append(batch)
        self._pool.submit(((self._job, batch, None, None),), 1)

    def resubmit(self, jobs: list[Job]) -> None:
        """Queue the jobs."""
        self._pool.submit(jobs, len(jobs))

    def _take(self, worker: Worker, batch: Batch, _: None, __: None) -> None:
        if batch.wants(-1):
            assert self._layout is not None
            batch.gather(self._layout, self._source.take, worker.tally)

    def _many(self, worker: Worker, batch: Batch, _: None, __: None) -> None:
        if not batch.wants(-1):
            return
        started = time.perf_counter()
        try:
            samples = self._source.fetch_many(batch.indices)
        except BaseException as exc:
            batch.fail_whole(strip(exc), "fetch", list(batch.indices))
            return
        worker.tally.decode_s += time.perf_counter() - started
        batch.fill(samples, worker.tally)

    def _items(self, worker: Worker, batch: Batch, _: None, __: None) -> None:
        stream = self._source.stream
        with stream.lock:
            batch = stream.expected.popleft()
            if not batch.wants(-1):
                return
            started = time.perf_counter()
            position = stream.position
            try:
                items = stream.take(len(batch.indices))
            except StopIteration:
                batch.end()
                return
            except BaseException as exc:
                batch.fail_whole(strip(exc), "fetch", position)
                return
        worker.tally.decode_s += time.perf_counter() - started
        if self._batched and self._drop_last and len(items) < len(batch.indices):
            batch.end()
            return
        batch.fill(items, worker.tally, range(position, position + len(items)))


class AsyncFetcher:
    """ASYNC: ``await dataset[index]`` on the loop, a job per sample."""

    def __init__(self, source: Source, tasks: TaskPool, decode: ThreadPool, *, by_rows: bool) -> None:
        self._source, self._tasks, self._decode_pool = source, tasks, decode
        self._by_rows = by_rows

    def submit(self, batch: Batch) -> None:
        """Queue a job per sample."""
        _submit_if_empty(batch, self._decode_pool)
        self._tasks.submit((self._fetch, batch, position) for position in range(len(batch.indices)))

    def resubmit(self, jobs: list[Job]) -> None:
        """Never called: awaited samples are not held back."""
        raise AssertionError

    async def _fetch(self, batch: Batch, position: int) -> None:
        tally = self._tasks.tally
        if not batch.wants(position):
            self._settle(batch, batch.drop(position))
            return
        tally.reads_in_flight += 1
        started = time.perf_counter()
        try:
            sample = await self._source.fetch(batch.indices[position])
        except BaseException as exc:
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the loader stops; this is not the dataset's doing
            self._settle(batch, batch.fail(position, strip(exc), "fetch"))
            return
        finally:
            tally.reads_in_flight -= 1
            tally.decode_s += time.perf_counter() - started
        self._settle(batch, batch.add(position, sample, tally))

    def _settle(self, batch: Batch, complete: bool) -> None:
        if not complete:
            return
        if self._by_rows or batch.error is not None:
            batch.finish(self._tasks.tally)
        else:  # the user's collate_fn must not hold up the loop
            self._decode_pool.submit(((_finish, batch, None, None),), 1)


def _settle(batch: Batch, complete: bool, worker: Worker) -> None:
    if complete:
        batch.finish(worker.tally)


def _submit_if_empty(batch: Batch, pool: ThreadPool) -> None:
    if not batch.indices:  # collating nothing is an error that the user should see
        pool.submit(((_finish, batch, None, None),), 1)


def _finish(worker: Worker, batch: Batch, _: None, __: None) -> None:
    batch.finish(worker.tally)


def _refuse_coroutine(sample: Any, source: Source) -> None:
    sample.close()
    message = (
        f"{type(source.dataset).__name__}.__getitem__ returned a coroutine but is not declared 'async def'. "
        "Declare it so (a wrapper that hides it must be 'async def' too), and the loader awaits it."
    )
    raise DatasetError(message)
