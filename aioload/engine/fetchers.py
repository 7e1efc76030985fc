"""Fetchers: what is done for each sample of a batch, by kind of dataset, and on which threads.

A fetcher turns a batch into jobs. Each job ends in exactly one of ``add``, ``fail`` or ``drop`` per sample.
"""

import asyncio
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Protocol

from aioload.context import HERE, Stage
from aioload.engine.batch import Batch, BatchState
from aioload.engine.pools import Job, Rest, ThreadPool, Worker
from aioload.engine.source import Source, refuse_coroutine
from aioload.engine.tasks import TaskPool
from aioload.errors import strip

SAMPLES_PER_JOB = 16
"""Samples that one job loads, of one batch, where they are tiny: it saves 2 of 15 us a sample."""

_PILE_S = 200e-6
"""Samples wait so long, at most, to be collated together with others, so that few, or small ones, do; but those that
are numbers wait for all of their job. Of samples of 1 ms that saves 25 of 35 us each."""

_SAMPLE, _OPEN = Stage.SAMPLE, BatchState.OPEN  # a member of an enum takes 0.1 us to look up


class Gate(Protocol):
    """Keeps jobs of batches beyond the window from starting, once it is known how large batches are."""

    @property
    def is_narrow(self) -> bool:
        """Whether any batch may be beyond the horizon."""
        ...

    @property
    def horizon(self) -> int:
        """The number of the first batch that must not be worked on yet."""
        ...

    @property
    def opening(self) -> dict[int, int]:
        """The number of the batch for which each thread is opening a file whose size is not known yet."""
        ...

    @property
    def unasked_bytes(self) -> int:
        """What a read that knows its size may bring without asking."""
        ...

    @property
    def assumed_bytes(self) -> int:
        """What a read is expected to bring that does not know its size beforehand."""
        ...

    @property
    def uncounted_bytes(self) -> int:
        """What a thread may have read, and not counted, before it decodes that."""
        ...

    def note_read(self, num_bytes: int) -> None:
        """Take notice of the size of a read."""
        ...

    def ask(self, batch: Batch, num_bytes: int) -> bool:
        """Whether a read of ``num_bytes`` may be begun; if so, they are counted for the batch."""
        ...

    def hold(self, job: Any, num_bytes: int = 0) -> None:
        """Keep a job until its batch, its second item, is within the window, and has been given ``num_bytes``."""
        ...

    def release(self) -> None:
        """Start the jobs that were held and need not wait any longer."""
        ...


def is_held(gate: Gate, job: Any) -> bool:
    """Whether a job has to wait, as its batch, its second item, is too far ahead for now. Then the gate keeps it."""
    if gate.is_narrow and job[1].number >= gate.horizon:
        gate.hold(job)
        return True
    return False


class Fetcher(Protocol):
    """How the batches of one kind of dataset are loaded."""

    def submit(self, batch: Batch) -> None:
        """Start loading ``batch``. Does not wait."""
        ...

    def resubmit(self, jobs: list[Any]) -> None:
        """Start jobs that had been held back."""
        ...


class SampleFetcher:
    """SINGLE: ``dataset[index]`` on the decode pool, a job per sample, or per few where one thread does them all.

    Where there is but one thread, a job is for the batch.
    """

    def __init__(self, source: Source, decode: ThreadPool, gate: Gate) -> None:
        self._source, self._pool, self._gate = source, decode, gate
        self._samples, self._context = source.samples, source.context

    def submit(self, batch: Batch) -> None:
        """Queue the jobs of a batch."""
        submit_if_empty(batch, self._pool)
        most = SAMPLES_PER_JOB if self._pool.is_alone else 1
        self.resubmit(jobs_for(self._fetch, batch, max(1, len(batch.indices)) if self._pool.is_single else most))

    def resubmit(self, jobs: list[Job]) -> None:
        """Queue the jobs."""
        self._pool.submit(jobs, len(jobs))

    def _fetch(self, worker: Worker, batch: Batch, start: int, stop: int) -> None:
        """Load samples ``start`` to ``stop``. Those that take no time, and numbers, are collated together."""
        pool, gate, again = self._pool, self._gate, self._fetch
        indices, marks, there = batch.indices, batch.marks, batch.there
        tally, clock = worker.tally, time.perf_counter
        here = [self._context, None, _SAMPLE, worker.number, None]
        HERE.set(here)  # once: it takes 0.3 us, and 0.7 beside other threads
        begun, pile = start, []  # what has been loaded, of samples that follow each other
        rest = share_out(worker, again, batch, start, stop)
        for position in iter(rest.pop, None):
            if gate.is_narrow and batch.number >= gate.horizon:
                rest.append(position)
                hold_rest(gate, again, batch, rest)
                break
            if not pool.is_calm and is_cut_short(pool, again, batch, start, position, rest):
                break
            if (batch.error is None and batch.state is _OPEN) or batch.wants(position):
                index = here[1] = indices[position]
                here[4] = None
                if marks is not None:
                    marks[position] = 2
                try:
                    pile.append(self._sample(index))
                    if marks is not None:
                        marks[position] = 0  # until it is collated
                    there.add(position)
                    if not gate.is_narrow:  # else it is to be counted at once
                        now = clock()
                        if now - worker.mark < _PILE_S:
                            continue
                        if batch.layout is not None and batch.layout.is_light:  # what does not fit it is kept anyway
                            tally.decode_s += now - worker.mark
                            worker.mark = now
                            continue
                except BaseException as exc:
                    settle(batch, batch.fail(position, strip(exc), "fetch"), worker)
            else:
                settle(batch, batch.drop(position), worker)
            _collate(worker, batch, begun, pile)
            begun, pile = position + 1, []
        worker.num_units = max(1, begun + len(pile) - start)
        _collate(worker, batch, begun, pile)

    def _sample(self, index: Any) -> Any:
        sample = self._samples[index]
        if type(sample) is CoroutineType:
            refuse_coroutine(sample, self._samples, "__getitem__")
        return sample


class AsyncFetcher:
    """ASYNC: ``await dataset[index]`` on the loop, a job per sample."""

    def __init__(self, source: Source, tasks: TaskPool, decode: ThreadPool, gate: Gate, *, by_rows: bool) -> None:
        self._source, self._tasks, self._decode_pool, self._gate = source, tasks, decode, gate
        self._by_rows = by_rows

    def submit(self, batch: Batch) -> None:
        """Queue a job per sample."""
        submit_if_empty(batch, self._decode_pool)
        self._tasks.submit((self._fetch, batch, position) for position in range(len(batch.indices)))

    def resubmit(self, jobs: list[Any]) -> None:
        """Queue the jobs."""
        self._tasks.submit(jobs)

    async def _fetch(self, batch: Batch, position: int) -> None:
        tally = self._tasks.tally
        if not batch.wants(position):
            self._settle(batch, batch.drop(position))
            return
        if is_held(self._gate, (self._fetch, batch, position)):
            return
        tally.reads_in_flight += 1
        started = time.perf_counter()
        index = batch.indices[position]
        HERE.set([self._source.context, index, _SAMPLE, 0, None])
        try:
            sample = await self._source.samples[index]
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError) and self._tasks.closed:
                raise  # the loader stops; this is not the dataset's doing
            self._settle(batch, batch.fail(position, strip(exc), "fetch"))
            return
        finally:
            tally.reads_in_flight -= 1
            tally.decode_s += time.perf_counter() - started
            HERE.set(None)
        started = time.perf_counter()
        complete = batch.add(position, sample)
        tally.collate_s += time.perf_counter() - started
        self._settle(batch, complete)

    def _settle(self, batch: Batch, complete: bool) -> None:
        if not complete:
            return
        if self._by_rows or batch.error is not None:
            batch.finish(self._tasks.tally)
        else:  # the user's collate_fn must not hold up the loop
            self._decode_pool.submit(((_finish, batch, None, None),), 1)


def jobs_for(function: Callable[[Worker, Batch, int, int], None], batch: Batch, most: int) -> list[Job]:
    """Return jobs for all samples of a batch, for at most so many each: where the first begins, and the last ends."""
    num_samples = len(batch.indices)
    return [(function, batch, start, min(start + most, num_samples)) for start in range(0, num_samples, most)]


def share_out(
    worker: Worker, function: Callable[[Worker, Batch, int, int], None], batch: Batch, start: int, stop: int
) -> Rest:
    """Return the positions of a job, for its thread to take them from the end; others may take over what is left."""
    positions: Rest = [None, *range(stop - 1, start - 1, -1)]
    worker.shared = function, batch, positions
    return positions


def _take_all(rest: Rest) -> list[int]:
    """Return what nobody has taken yet: it follows each other, as others take the last ones. The job is to end."""
    return list(iter(rest.pop, None))


def is_cut_short(
    pool: ThreadPool,
    function: Callable[[Worker, Batch, int, int], None],
    batch: Batch,
    start: int,
    position: int,
    rest: Rest,
) -> bool:
    """Leave the samples from ``position`` on to threads that would wait for them, or that may stay awake.

    Returns:
        Whether there are any: else the job, which began at ``start``, goes on.
    """
    if len(rest) <= 1 or (pool.is_alone and position == start):
        return False
    rest.append(position)
    left = _take_all(rest)
    if not pool.is_alone:
        pool.resume([(function, batch, each, each + 1) for each in left])
    elif left:
        pool.resume([(function, batch, left[0], left[-1] + 1)])
    return True


def hold_rest(gate: Gate, function: Callable[[Worker, Batch, int, int], None], batch: Batch, rest: Rest) -> None:
    """Keep what is left of a job until its batch is no longer too far ahead. The job is to end."""
    left = _take_all(rest)
    if left:
        gate.hold((function, batch, left[0], left[-1] + 1))


def settle(batch: Batch, complete: bool, worker: Worker) -> None:
    """Finish the batch if it is complete."""
    if complete:
        batch.finish(worker.tally)


def submit_if_empty(batch: Batch, pool: ThreadPool) -> None:
    """Queue the collation of a batch that no sample will complete."""
    if not batch.indices:  # collating nothing is an error that the user should see
        pool.submit(((_finish, batch, None, None),), 1)


def _finish(worker: Worker, batch: Batch, _: None, __: None) -> None:
    context = batch.recipe.context
    HERE.set([context, None, Stage.BATCH, worker.number % context.num_workers, None])
    batch.finish(worker.tally)
    lap_collate(worker)


def _collate(worker: Worker, batch: Batch, start: int, pile: list[Any]) -> None:
    if pile:
        lap_decode(worker)
        if batch.marks is not None:
            batch.marks[start : start + len(pile)] = b"\1" * len(pile)
        is_complete = batch.add_all(start, pile)
        pile.clear()  # who is woken up now may look for what of his is still alive
        if is_complete:
            batch.finish(worker.tally)
        lap_collate(worker)


def lap_decode(worker: Worker) -> None:
    """Count the time since the mark as spent in the dataset's code, and move the mark on."""
    now = time.perf_counter()
    worker.tally.decode_s += now - worker.mark
    worker.mark = now


def lap_collate(worker: Worker) -> None:
    """Count the time since the mark as spent collating, and move the mark on."""
    now = time.perf_counter()
    worker.tally.collate_s += now - worker.mark
    worker.mark = now
