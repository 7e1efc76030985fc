"""Whole: datasets that give a batch at a time: gathered from tensors, from ``__getitems__``, or the next items."""

import time
from typing import Any

from aioload.context import HERE, Stage
from aioload.engine.batch import Batch
from aioload.engine.fetchers import Gate, lap_collate, lap_decode
from aioload.engine.items import Lane
from aioload.engine.pools import Job, ThreadPool, Worker
from aioload.engine.source import Kind, Source
from aioload.errors import strip
from aioload.stats import Tally

DIRECT_BELOW_BYTES = 256 << 10
"""A batch smaller than this is copied out of tensors in less time than it takes to wake up a thread."""


class GatherFetcher:
    """TAKE: rows of tensors gathered into the slot; in the consumer's thread where that costs less than a wake-up.

    ``is_direct`` says so. It is settled by the first batch, for all.
    """

    def __init__(self, source: Source, decode: ThreadPool, tally: Tally) -> None:
        self._source, self._pool, self._tally = source, decode, tally
        layout = source.take_layout()
        assert layout is not None
        self._layout = layout
        self.is_direct: bool | None = None

    def submit(self, batch: Batch) -> None:
        """Gather the batch, or queue one job that does."""
        if self.is_direct is None:
            num_bytes = self._layout.offsets(len(batch.indices))[1]
            self.is_direct = num_bytes <= DIRECT_BELOW_BYTES
            batch.recipe.on_size(num_bytes)
        if self.is_direct:
            self._gather_rows(batch, self._tally)
        else:
            self._pool.submit(((self._gather, batch, None, None),), 1)

    def resubmit(self, jobs: list[Job]) -> None:
        """Never called: nothing is held back, since how large batches are is known before the first."""
        raise AssertionError

    def _gather(self, worker: Worker, batch: Batch, _: None, __: None) -> None:
        if batch.wants(-1):
            self._gather_rows(batch, worker.tally)

    def _gather_rows(self, batch: Batch, tally: Tally) -> None:
        if not batch.gather(self._layout, self._source.take, tally):
            _fetch_singly(batch, self._source, tally, None)  # no row numbers, but a tensor may be indexed with them


def _fetch_singly(batch: Batch, source: Source, tally: Tally, worker_number: int | None) -> None:
    complete = not batch.indices
    for position, index in enumerate(batch.indices):
        HERE.set([source.context, index, Stage.SAMPLE, worker_number, None])
        try:
            sample = source.samples[index]
        except BaseException as exc:
            complete = batch.fail(position, strip(exc), "fetch") or complete
        else:
            complete = batch.add(position, sample) or complete
    if complete:
        batch.finish(tally)


class BatchFetcher:
    """MANY and ITERABLE: a job per batch on the decode pool."""

    def __init__(self, source: Source, decode: ThreadPool, gate: Gate, *, batched: bool, drop_last: bool) -> None:
        self._source, self._pool, self._gate = source, decode, gate
        self._batched, self._drop_last = batched, drop_last
        self._job = {Kind.MANY: self._many, Kind.ITERABLE: self._items}[source.kind]

    def submit(self, batch: Batch) -> None:
        """Queue one job. Of an iterable dataset a batch may be submitted again, where an interrupt cut that short."""
        if self._source.kind is Kind.ITERABLE:
            self._source.items.expect(batch)
        self._pool.submit(((self._job, batch, None, None),), 1)

    def resubmit(self, jobs: list[Job]) -> None:
        """Queue the jobs."""
        self._pool.submit(jobs, len(jobs))

    def _many(self, worker: Worker, batch: Batch, _: None, __: None) -> None:
        if not batch.wants(-1):
            return
        if self._gate.is_narrow and batch.number >= self._gate.horizon:
            self._gate.hold((self._many, batch, None, None))
            return
        HERE.set([self._source.context, None, Stage.BATCH, worker.number, None])
        try:
            samples = self._source.fetch_many(batch.indices)
        except BaseException as exc:
            if batch.recipe.tolerance is not None and isinstance(exc, Exception) and self._source.has_single:
                _fetch_singly(batch, self._source, worker.tally, worker.number)  # to see which one it is
                lap_decode(worker)
            else:
                batch.fail_whole(strip(exc), "fetch", list(batch.indices))
            return
        lap_decode(worker)
        batch.fill_with(samples, worker.tally)
        lap_collate(worker)

    def _items(self, worker: Worker, batch: Batch, _: None, __: None) -> None:
        lane = self._turn(batch)
        if lane is not None:
            self._serve(worker, lane, None, None)

    def _serve(self, worker: Worker, lane: Lane, _: None, __: None) -> None:
        """Load the next batch of a lane, unless another thread is at it, who then sees to the one after it."""
        taken = None
        while taken is None and lane.expected:
            if not lane.lock.acquire(blocking=False):
                return
            try:
                if not lane.expected:  # somebody may add to it at this moment, and go away because we are here
                    continue
                if self._must_wait(lane):
                    return
                worker.mark = time.perf_counter()
                taken = self._take(lane, lane.expected.popleft())
            finally:
                lane.lock.release()
        if taken is None:
            return
        if lane.expected:
            self._pool.submit(((self._serve, lane, None, None),), 1)
        batch, items, position = taken
        lap_decode(worker)
        batch.fill(items, worker.tally, range(position, position + len(items)))
        lap_collate(worker)

    def _must_wait(self, lane: Lane) -> bool:
        """Whether the next batch of a lane is beyond the window; if so, it is served when it no longer is."""
        batch = lane.expected[0]
        if not self._gate.is_narrow or batch.number < self._gate.horizon:
            return False
        self._gate.hold((self._serve_later, batch, lane, None))
        return True

    def _serve_later(self, worker: Worker, _: Batch, lane: Lane, __: None) -> None:
        self._serve(worker, lane, None, None)

    def _take(self, lane: Lane, batch: Batch) -> tuple[Batch, list[Any], int] | None:
        """Return a batch, its items, and the position of the first; ``None`` if there is nothing to make of it."""
        if not batch.wants(-1):
            return None
        try:
            items, position, batch.place = lane.take(len(batch.indices), whole=self._batched and self._drop_last)
        except StopIteration:
            self._end(batch)
        except BaseException as exc:
            batch.place = lane.place_of_error()
            batch.fail_whole(strip(exc), lane.stage, lane.position if lane.stage == "fetch" else None)
        else:
            return batch, items, position
        return None

    def _turn(self, batch: Batch) -> Lane | None:
        """Give the batch that is the first in line, often ``batch`` itself, its turn; return the lane it is for."""
        items = self._source.items
        with items.lock:
            if not items.expected:  # a job that was queued again
                return None
            batch = next(iter(items.expected.values()))
            if self._gate.is_narrow and batch.number >= self._gate.horizon:
                self._gate.hold((self._items, batch, None, None))
                return None
            del items.expected[batch.number]
            lane = items.next_lane()
            if lane is not None:
                lane.expected.append(batch)
        if lane is None:
            batch.end()
        return lane

    def _end(self, batch: Batch) -> None:
        """Deal with a batch that a lane had nothing left for; other lanes may have, for the batches behind it."""
        if len(self._source.items.lanes) == 1:
            batch.end()
        else:
            batch.skip()
