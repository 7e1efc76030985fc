"""Staged: files are read on one pool, and decoded where that is cheapest."""

import functools
import time
from types import CoroutineType
from typing import Any

from aioload.context import HERE, Stage
from aioload.engine import tuner
from aioload.engine.batch import Batch, BatchState
from aioload.engine.budget import NotYet
from aioload.engine.fetchers import (
    Gate,
    hold_rest,
    is_cut_short,
    is_held,
    jobs_for,
    lap_collate,
    lap_decode,
    settle,
    share_out,
    submit_if_empty,
)
from aioload.engine.pools import Job, ThreadPool, Worker
from aioload.engine.race import Overtaken, Race
from aioload.engine.source import Source, refuse_coroutine
from aioload.engine.watch import Watch
from aioload.engine.watched import WatchedReads
from aioload.engine.window import NOBODY
from aioload.errors import strip
from aioload.readers.local import Admit
from aioload.types import Location

INLINE_BELOW_S = 70e-6
"""A decode cheaper than this runs on the thread that read the file: handing it over costs 15-20 us of the
interpreter lock (62,000 samples of 4 KB a second against 25,000)."""

OFFLOAD_ABOVE_S = 140e-6
"""A decode dearer than this goes to the decode pool, so that decoding threads do not crowd each other out."""

_MEASURE_EVERY = 16

_MOST_PER_JOB, _JOB_S = 64, 16 * INLINE_BELOW_S
"""Samples that one thread loads in a row, where it does them all: at most as many as take so long to decode. By 16 at a
time, files of 4 KB take 1.06 times as much of the processor as by 64."""

_LOCATION, _SAMPLE, _OPEN = Stage.LOCATION, Stage.SAMPLE, BatchState.OPEN  # a member takes 0.1 us to look up


def samples_per_job(decode_cost_s: float) -> int:
    """Return how many samples a job is for where one thread loads them all, by what it takes to decode one."""
    return _MOST_PER_JOB if decode_cost_s * _MOST_PER_JOB <= _JOB_S else max(1, int(_JOB_S / decode_cost_s))


class StagedFetcher:
    """STAGED: read on the read pool, decode where it is cheapest."""

    def __init__(
        self, source: Source, reads: ThreadPool, decode: ThreadPool, gate: Gate, watch: Watch, *, may_inline: bool
    ) -> None:
        self._source, self._reads, self._decode_pool, self._gate = source, reads, decode, gate
        self._samples, self._location = source.samples, source.samples.location
        self._opening = gate.opening
        self._context = source.context
        self._num_workers = source.context.num_workers
        self._policy = source.read_policy
        self._watched: WatchedReads | None = None
        if self._policy.is_watched:
            again, fail = self._read_again, self._fail
            self._watched = WatchedReads(source.read, self._policy, reads, watch, again=again, fail=fail)
        self._size_of = source.size_of
        self._unasked_bytes = gate.unasked_bytes
        asking = source.asking(self._read_url, self._unasked_bytes)
        if asking is None or self._watched is not None:  # of whose size nothing is known before
            asking, self._size_of = self._read_assumed, self._noted_size
        self._read_once = asking
        self._may_inline = may_inline
        self._is_cheap = False  # decoding: then several samples go together, and on the thread that read them if may be
        self._decode_cost_s: float | None = None
        self._num_decoded = self._num_jobs = 0

    def submit(self, batch: Batch) -> None:
        """Queue a read per sample, or per few samples where reads are so short that one thread does them all."""
        submit_if_empty(batch, self._decode_pool)
        if self._is_cheap and self._watched is None:
            most = samples_per_job(self._decode_cost_s or 0.0) if self._reads.is_alone else 1
            jobs = jobs_for(self._read_and_decode, batch, most)
        else:  # each read is on its own
            jobs = [(self._read, batch, position, 0) for position in range(len(batch.indices))]
        self._submit_reads(jobs)

    def resubmit(self, jobs: list[Job]) -> None:
        """Queue the jobs."""
        of_decoders = self._decode, self._decode_together
        decodes = [job for job in jobs if job[0] in of_decoders]
        if decodes:
            self._decode_pool.submit(decodes, len(decodes))
            jobs = [job for job in jobs if job[0] not in of_decoders]
        if jobs:
            self._submit_reads(jobs)

    def _submit_reads(self, jobs: list[Job]) -> None:
        self._reads.submit(jobs, len(jobs))
        if self._watched is not None:
            self._watched.arm()

    def _read(self, worker: Worker, batch: Batch, position: int, granted: int) -> None:
        """Read a sample, for which ``granted`` bytes have been counted already."""
        if not granted and self._gate.is_narrow and batch.number >= self._gate.horizon:
            self._gate.hold((self._read, batch, position, 0))
            return
        worker.claimed = granted
        if not batch.wants(position):
            self._give_back(worker, batch)
            settle(batch, batch.drop(position), worker)
            return
        self._load(worker, batch, position, None)

    def _read_again(self, worker: Worker, batch: Batch, position: int, race_and_pause: tuple[Race, float]) -> None:
        """Read a sample beside, or in place of, a thread that takes long."""
        race, pause_s = race_and_pause
        worker.claimed = race.claimed
        if batch.wants(position):
            self._load(worker, batch, position, race, pause_s)
        elif race.win():
            self._give_back(worker, batch)
            settle(batch, batch.drop(position), worker)

    def _load(self, worker: Worker, batch: Batch, position: int, race: Race | None, pause_s: float = 0.0) -> None:
        tally = worker.tally
        self._opening[worker.number] = NOBODY if worker.claimed else batch.number
        tally.reads_in_flight = 1
        index = batch.indices[position]
        HERE.set([self._context, index, _LOCATION, worker.number % self._num_workers, None])
        try:
            if self._watched is None:
                data = self._read_bytes(worker, self._location(index), functools.partial(self._admit, worker, batch))
            else:
                data = self._read_watched(self._watched, worker, batch, position, race, pause_s)
            num_bytes = self._size_of(data)
        except NotYet as refusal:
            self._gate.hold((self._read, batch, position, refusal.num_bytes), refusal.num_bytes)
            return
        except Overtaken:
            return
        except BaseException as exc:
            self._give_back(worker, batch)
            settle(batch, batch.fail(position, strip(exc), "read"), worker)
            return
        finally:
            tally.reads_in_flight, self._opening[worker.number] = 0, NOBODY
        tally.bytes_read += num_bytes
        batch.claim.correct_raw(worker.claimed, num_bytes)
        now = time.perf_counter()
        tally.read_s += now - worker.mark
        worker.mark = now
        if self._is_cheap and self._may_inline:
            self._decode(worker, batch, position, data)
        else:
            self._decode_pool.submit(((self._decode, batch, position, data),), 1)

    def _read_and_decode(self, worker: Worker, batch: Batch, start: int, stop: int) -> None:
        """Load samples ``start`` to ``stop``, on this thread if may be. The hottest loop there is: 0.1 us counts.

        Several are read, then decoded, then collated: a call for all of them takes little more than one for each.
        """
        if self._gate.is_narrow and batch.number >= self._gate.horizon:
            self._gate.hold((self._read_and_decode, batch, start, stop))
            return
        reads, tally, indices, marks = self._reads, worker.tally, batch.indices, batch.marks
        location, read, size_of = self._location, self._read_once, self._size_of
        again = self._read_and_decode
        dispose = self._decode_pile if self._may_inline else self._hand_over
        here = [self._context, None, _LOCATION, worker.number % self._num_workers, None]
        HERE.set(here)  # once: it takes 0.3 us, and 0.7 beside other threads
        admit = functools.partial(self._admit, worker, batch)
        worker.claimed, self._opening[worker.number] = 0, batch.number
        tally.reads_in_flight = 1
        most_bytes = self._gate.uncounted_bytes
        num_bytes = num_bytes_before = 0
        begun, pile = start, []  # what has been read, of samples that follow each other
        rest = share_out(worker, again, batch, start, stop)
        for position in iter(rest.pop, None):
            if not reads.is_calm and is_cut_short(reads, again, batch, start, position, rest):
                break
            if (batch.error is None and batch.state is _OPEN) or batch.wants(position):
                index = here[1] = indices[position]
                here[4] = None
                if marks is not None:
                    marks[position] = 2
                try:
                    path = location(index)
                    try:
                        data = read(path, admit)
                    except Exception as exc:
                        data = self._try_again(worker, path, admit, exc)
                    num_bytes += size_of(data)
                    pile.append(data)
                    if marks is not None:
                        marks[position] = 1  # of those in the pile, it is the one at work that brings a process down
                    if num_bytes - num_bytes_before < most_bytes and not worker.claimed:
                        continue
                except NotYet as refusal:
                    self._gate.hold((self._read, batch, position, refusal.num_bytes), refusal.num_bytes)
                except BaseException as exc:
                    settle(batch, batch.fail(position, strip(exc), "read"), worker)
                    self._give_back(worker, batch)
            else:
                settle(batch, batch.drop(position), worker)
            tally.bytes_read += num_bytes - num_bytes_before  # first: a batch that is done has been counted
            dispose(worker, batch, begun, pile, here)
            begun, pile, num_bytes_before = position + 1, [], num_bytes
            if self._gate.is_narrow and batch.number >= self._gate.horizon:
                hold_rest(self._gate, again, batch, rest)
                break
        num_samples = begun + len(pile) - start
        if pile:
            tally.bytes_read += num_bytes - num_bytes_before
            dispose(worker, batch, begun, pile, here)
        tally.reads_in_flight, self._opening[worker.number] = 0, NOBODY
        if self._may_inline:
            batch.claim.note_decoded(num_bytes, num_samples)
        if self._gate.is_narrow:
            self._gate.release()
        worker.num_units = max(1, num_samples)

    def _hand_over(self, worker: Worker, batch: Batch, start: int, pile: list[Any], _: list[Any]) -> None:
        """Have the samples from ``start`` on decoded by a thread that ``worker_init_fn`` has been called in."""
        num_bytes = sum(map(self._source.size_of, pile))
        batch.claim.correct_raw(worker.claimed, num_bytes)
        worker.claimed, before = 0, worker.mark
        worker.mark = time.perf_counter()
        worker.tally.read_s += worker.mark - before
        if pile:
            self._decode_pool.submit(((self._decode_together, batch, start, pile),), 1)

    def _decode_together(self, worker: Worker, batch: Batch, start: int, pile: list[Any]) -> None:
        if is_held(self._gate, (self._decode_together, batch, start, pile)):
            return
        here = [self._context, None, _SAMPLE, worker.number % self._num_workers, None]
        HERE.set(here)
        num_bytes = sum(map(self._source.size_of, pile))
        try:
            self._decode_pile(worker, batch, start, pile, here)
        finally:
            batch.claim.note_decoded(num_bytes, len(pile))
            batch.claim.give_raw(num_bytes)
        worker.num_units = len(pile)

    def _decode_pile(self, worker: Worker, batch: Batch, start: int, pile: list[Any], here: list[Any]) -> None:
        """Decode and collate what has been read of the samples from ``start`` on."""
        tally, indices, marks, clock = worker.tally, batch.indices, batch.marks, time.perf_counter
        decode, mark = self._samples.decode, clock()
        tally.read_s += mark - worker.mark
        here[2] = _SAMPLE
        self._num_jobs += 1
        is_measured = len(pile) > 1 or self._num_jobs % _MEASURE_EVERY == 1
        cpu_started = time.thread_time() if is_measured else 0.0
        samples = []
        for position, data in enumerate(pile, start):
            if (batch.error is None and batch.state is _OPEN) or batch.wants(position):
                index = here[1] = indices[position]
                here[4] = None
                if marks is not None:
                    marks[position] = 2
                try:
                    samples.append(decode(data, index))
                    if marks is not None:
                        marks[position] = 1
                    continue
                except BaseException as exc:
                    settle(batch, batch.fail(position, strip(exc), "decode"), worker)
            else:
                settle(batch, batch.drop(position), worker)
            self._collate(worker, batch, start, samples)
            start, samples = position + 1, []
        if is_measured and pile:
            self._place((time.thread_time() - cpu_started) / len(pile))
        mark, decode_began = clock(), mark
        tally.decode_s += mark - decode_began
        self._collate(worker, batch, start, samples)
        if worker.claimed:
            self._give_back(worker, batch)
        worker.mark = clock()
        tally.collate_s += worker.mark - mark
        here[2], here[4] = _LOCATION, None

    def _collate(self, worker: Worker, batch: Batch, start: int, samples: list[Any]) -> None:
        if samples and batch.add_all(start, samples):
            batch.finish(worker.tally)

    def _read_bytes(self, worker: Worker, location: Location, admit: Admit) -> Any:
        try:
            return self._read_once(location, admit)
        except Exception as exc:
            return self._try_again(worker, location, admit, exc)

    def _try_again(self, worker: Worker, location: Location, admit: Admit, exc: Exception) -> Any:
        def pause(seconds: float) -> bool:
            worker.tally.retries += 1
            return self._reads.pause(seconds)

        try:
            return self._policy.try_again(functools.partial(self._read_once, location, admit), exc, pause)
        finally:
            del exc  # it may be what is raised, and so refer to this call

    def _ask_assumed(self, admit: Admit) -> None:
        num_bytes = self._gate.assumed_bytes
        if num_bytes > self._unasked_bytes:
            admit(num_bytes)

    def _read_assumed(self, location: Any, admit: Admit) -> Any:
        self._ask_assumed(admit)
        return self._source.read(location)

    def _read_url(self, location: Any, admit: Admit) -> Any:
        data = self._read_assumed(location, admit)
        self._gate.note_read(len(data))
        return data

    def _noted_size(self, data: Any) -> int:
        num_bytes = self._source.size_of(data)
        self._gate.note_read(num_bytes)
        return num_bytes

    def _admit(self, worker: Worker, batch: Batch, num_bytes: int) -> None:
        """Have the bytes that a read will bring counted for its batch, or raise :class:`NotYet`."""
        if worker.claimed >= num_bytes:
            return
        self._give_back(worker, batch)
        if not self._gate.ask(batch, num_bytes):
            raise NotYet(num_bytes)
        worker.claimed, self._opening[worker.number] = num_bytes, NOBODY

    def _give_back(self, worker: Worker, batch: Batch) -> None:
        if worker.claimed:
            batch.claim.give_raw(worker.claimed)
            worker.claimed = 0

    def _read_watched(
        self, watched: WatchedReads, worker: Worker, batch: Batch, position: int, race: Race | None, pause_s: float
    ) -> Any:
        opening, cached = self._opening, self._source.cached
        if race is None:
            self._ask_assumed(functools.partial(self._admit, worker, batch))
            opening[worker.number] = NOBODY  # it may be stuck for good, and nobody is to wait for that
            location = self._location(batch.indices[position])
            data = None if cached is None else cached.look(location)
            if data is not None:
                return data
            race = watched.begin(batch, position, location, worker.claimed)
            data = watched.run(worker, race)
        else:
            opening[worker.number] = NOBODY
            watched.pause(worker, race, pause_s)
            data = watched.run(worker, race)
            worker.tally.hedges_won += race.is_hedged and pause_s == 0
        return data if cached is None else cached.keep(race.location, data)

    def _fail(self, race: Race, exc: BaseException) -> None:
        # On another thread: the user's on_error may block.
        self._decode_pool.submit(((self._settle_failed, race.batch, race, exc),), 1)

    def _settle_failed(self, worker: Worker, batch: Batch, race: Race, exc: BaseException) -> None:
        position = race.position
        race.give_back()
        HERE.set([self._context, batch.indices[position], _LOCATION, worker.number % self._num_workers, None])
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
        self._num_decoded += 1
        # Not by the wall clock: decoding threads wait for the interpreter lock, and for a core.
        measured = self._num_decoded <= _MEASURE_EVERY or self._num_decoded % _MEASURE_EVERY == 1
        cpu_started = time.thread_time() if measured else 0.0
        index = batch.indices[position]
        HERE.set([self._context, index, _SAMPLE, worker.number % self._num_workers, None])
        try:
            sample = self._samples.decode(data, index)
            if type(sample) is CoroutineType:
                refuse_coroutine(sample, self._samples, "decode")
        except BaseException as exc:
            settle(batch, batch.fail(position, strip(exc), "decode"), worker)
            return
        if measured:
            self._place(time.thread_time() - cpu_started)
        lap_decode(worker)
        if batch.add(position, sample):
            batch.finish(worker.tally)
        lap_collate(worker)

    def _place(self, cost_s: float) -> None:
        self._decode_cost_s = tuner.smoothed(self._decode_cost_s, cost_s)
        if self._decode_cost_s < INLINE_BELOW_S:
            self._is_cheap = True
        elif self._decode_cost_s > OFFLOAD_ABOVE_S:
            self._is_cheap = False
