"""Runtime: what the passes of one loader share, and how a pass begins and ends.

A run has a crew of its own, or shares the loader's where workers are persistent. Then the next pass begins
while the present one ends: as batches of this one are consumed, batches of the next take their places, and
``iter()`` takes that pass up if the sampler would still draw the same and the dataset has not been changed.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from aioload.collate import collation_rules
from aioload.context import PassContext
from aioload.copier import Copier
from aioload.device import StreamlessBackend, pinned_memory
from aioload.engine.appearance import Appearance
from aioload.engine.beginning import Beginning, begin_worker
from aioload.engine.budget import Budget
from aioload.engine.crew import Crew
from aioload.engine.division import gang_for
from aioload.engine.gang import Gang
from aioload.engine.generators import StandIn
from aioload.engine.indices import IndexStream, Lookahead, can_run_ahead
from aioload.engine.inline import InlineRun
from aioload.engine.items import Items, Once
from aioload.engine.memory import available_bytes
from aioload.engine.pace import Pace
from aioload.engine.passes import CLOSE_TIMEOUT_S, Kept, Pass
from aioload.engine.plan import Plan
from aioload.engine.portal import Portal
from aioload.engine.regulator import Regulator, allowed_handles, most_reads
from aioload.engine.remote import RemoteFetcher
from aioload.engine.run import Run
from aioload.engine.source import Kind, Source, kind_of
from aioload.pinned import PinnedMemory
from aioload.ring import Ring
from aioload.stats import Ledger, LoaderStats
from aioload.workers import answer_for_torch

_PINNED_SHARE = 2
"""One part in this many of the memory that is available may be page-locked for one loader."""


class Runtime:
    """What the passes of one loader share: slots, counts, the loop of an async dataset, persistent workers.

    Belongs to the process that made it; after a fork the child's loader makes another.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        settings, backend = plan.settings, plan.backend
        new_memory, page_lock = pinned_memory if settings.pin else None, None
        if backend is not None and not isinstance(backend, StreamlessBackend):
            new_memory, page_lock = backend.host_memory, backend.page_lock
        num_slots = settings.max_batches + 2  # being consumed, and being put together
        self._pinned: PinnedMemory | None = None
        if new_memory is not None:
            most = max(settings.max_bytes, available_bytes() // _PINNED_SHARE)
            self._pinned = PinnedMemory(new_memory, most, page_lock=page_lock)
        self.ring = Ring(
            new_memory=None if self._pinned is None else self._pinned.allocate,
            page_lock=None if self._pinned is None or page_lock is None else self._pinned.lock,
            reuse=not settings.pin,
            max_free=num_slots,
            warn_held=max(32, 4 * num_slots),
        )
        self.budget = Budget(
            settings.max_bytes,
            num_makers=plan.num_makers,
            num_reads=plan.most_reads,
            num_copies=2 if settings.batched else 1,
            spares=self.ring,
        )
        self.ledger = Ledger()
        self.tally = self.ledger.open()
        self._pace = Pace()
        self._copier = None if backend is None else Copier(backend, self.ring, plan.device_transform)
        self._lock = threading.RLock()
        self._passes: weakref.WeakKeyDictionary[Pass, None] = weakref.WeakKeyDictionary()
        self._kept = Kept()
        self._next: tuple[Run, Lookahead] | None = None
        self._wasted_lookahead = False
        self._begun = Once()
        self._regulator: Regulator | None = None  # the latest crew's
        answer_for_torch()

    def stats(self) -> LoaderStats:
        """Return what has been done so far."""
        passes = self._living_passes()
        limits = [each.limits() for each in passes]
        reads, decodes, batches = (max(each) for each in zip((0, 0, 0), *limits, strict=True))
        return self.ledger.snapshot(
            reads_limit=reads,
            decode_limit=decodes,
            batches_limit=batches,
            bytes_in_flight=self.budget.num_bytes + sum(each.num_bytes for each in passes),
            peak_bytes_in_flight=self.budget.peak_bytes + self.ledger.peak_bytes_elsewhere,
            device_batches=sum(each.num_on_device for each in passes),
            pinned_bytes=0 if self._pinned is None else self._pinned.num_bytes,
        )

    @property
    def base_seed(self) -> int | None:
        """The number drawn for the workers that persist, if there are any."""
        return None if self._kept.crew is None else self._kept.base_seed

    def begin(self, plan: Plan, saved: Mapping[str, Any] | None = None) -> Pass:
        """Return a new pass over the data, not started yet; by a plan of its own, as arguments may be changed.

        Args:
            plan: What the loader's arguments are now.
            saved: The state of a pass that this one is to go on with.
        """
        with self._lock:  # so that passes which two threads begin are two epochs
            if not plan.loads_as(self._plan):
                self._drop_next()
            self._plan, self.budget.max_bytes = plan, plan.settings.max_bytes
            epoch = plan.epochs.next(plan.index_sampler) if saved is None else saved["epoch"]
            if plan.num_workers == 0:
                new = Pass(self._inline_run(epoch, saved), None, owns_crew=False)
            elif plan.persistent:
                new = Pass(*self._persistent_run(epoch, saved), owns_crew=False)
            else:
                new = self._single_pass(epoch, saved)
            plan.epochs.begin(plan.index_sampler, epoch, again=saved is not None)
        self._passes[new] = None
        return new

    def close_with(self, owner: object) -> None:
        """Have what is kept ended when ``owner``, which all passes keep alive, is collected."""
        weakref.finalize(owner, self._kept.collected)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End all passes, and stop persistent workers. The runtime may be used again afterwards."""
        deadline = time.monotonic() + timeout_s
        for each in self._living_passes():
            each.close(max(0.0, deadline - time.monotonic()))
        self._drop_next()
        self._kept.close(max(0.0, deadline - time.monotonic()))

    def _living_passes(self) -> list[Pass]:
        # keyrefs() takes a copy in one step: another thread may begin a pass at any time.
        return [each for ref in self._passes.keyrefs() if (each := ref()) is not None]

    def _inline_run(self, epoch: int, saved: Mapping[str, Any] | None) -> InlineRun:
        stream = self._stream(epoch, saved)
        return InlineRun(
            self._plan.settings,
            self._source(stream, saved),
            stream,
            portal=self._portal(keep_loop=True),
            copier=self._copier,
            tally=self.tally,
            pace=self._pace,
            saved=saved,
        )

    def _single_pass(self, epoch: int, saved: Mapping[str, Any] | None) -> Pass:
        stream = self._stream(epoch, saved)
        source = self._source(stream, saved)
        crew = self._new_crew(source)
        try:
            crew.start()
            run = self._new_run(source, stream, crew, self._plan.settings.max_batches, saved)
            return Pass(run, crew, owns_crew=True)
        except BaseException:
            crew.close()
            raise

    def _stream(
        self,
        epoch: int,
        saved: Mapping[str, Any] | None,
        base_seed: int | None = None,
        stand_in: StandIn | None = None,
    ) -> IndexStream:
        return IndexStream(
            self._plan.index_sampler,
            self._plan.generator,
            epoch=epoch,
            base_seed=base_seed,
            saved=saved,
            stand_in=stand_in,
        )

    def _source(self, stream: IndexStream, saved: Mapping[str, Any] | None, *, first: bool = True) -> Source:
        """Return the dataset for one pass; ``first`` is whether its workers are new."""
        plan, settings = self._plan, self._plan.settings
        kind = kind_of(plan.dataset, plan.reader, batched=settings.batched, by_rows=settings.by_rows)
        num_workers = {Kind.ITERABLE: plan.iterable_workers, Kind.ASYNC: 1}.get(kind, plan.num_workers)
        context = PassContext(plan.dataset, num_workers, stream.base_seed, plan.seed, stream.epoch)
        items = None
        if kind is Kind.ITERABLE:
            worker_init_fn = self._beginning(stream.base_seed) if plan.num_workers > 0 and not plan.processes else None
            if worker_init_fn is not None and plan.persistent and plan.iterable_workers == 1:  # copies all begin anew
                self._begun = Once() if first else self._begun
                worker_init_fn = functools.partial(self._begun.call, worker_init_fn)
            items = Items(
                context,
                num_lanes=plan.iterable_workers,
                threaded=plan.num_workers > 0,
                worker_init_fn=worker_init_fn,
                in_order=settings.in_order,
                saved=saved,
            )
        return Source(
            context,
            batched=settings.batched,
            by_rows=settings.by_rows,
            reader=plan.reader,
            default_reader=plan.default_reader,
            read_policy=settings.read_policy,
            cache=plan.cache,
            tally=self.tally,
            items=items,
        )

    def _beginning(self, base_seed: int) -> Callable[[int], None] | None:
        worker_init_fn = self._plan.worker_init_fn
        return None if worker_init_fn is None else Beginning(worker_init_fn, base_seed)

    def _portal(self, *, keep_loop: bool) -> Portal:
        if not keep_loop:
            return Portal(keep_loop=False)
        portal = self._kept.portal
        if portal is None:
            portal = self._kept.portal = Portal(keep_loop=True)
        return portal

    def _new_crew(self, source: Source) -> Crew | Gang:
        plan, kind = self._plan, source.kind
        if plan.processes:
            return gang_for(plan, kind, ring=self.ring, portal=self._portal(keep_loop=False), ledger=self.ledger)
        on_start = None if kind is Kind.ITERABLE else self._beginning(source.context.base_seed)
        if on_start is not None:
            context = replace(source.context, num_workers=plan.num_workers)
            on_start = functools.partial(begin_worker, on_start, context)
        return Crew(
            kind,
            num_workers=plan.num_workers,
            reads=self._reads_of(kind),
            worker_init_fn=on_start,
            portal=self._portal(keep_loop=kind in (Kind.ASYNC, Kind.AWAITED)),
            ledger=self.ledger,
            tally=self.tally,
            pace=self._pace,
        )

    def _reads_of(self, kind: Kind) -> int | Regulator:
        num_reads = self._plan.num_concurrent_reads
        if num_reads is not None:
            return num_reads
        if kind not in (Kind.STAGED, Kind.AWAITED, Kind.ASYNC):
            return 1  # there are none
        # Passes learn from those before them; of passes at once each finds what it may read beside the others.
        self._regulator = Regulator(most_reads(allowed_handles()), self._regulator)
        return self._regulator

    def _new_run(
        self,
        source: Source,
        stream: IndexStream,
        crew: Crew | Gang,
        max_batches: int,
        saved: Mapping[str, Any] | None = None,
        *,
        is_wanted: bool = True,
    ) -> Run:
        fetcher = None
        if isinstance(crew, Gang):
            lanes = None if saved is None else {name: saved[name] for name in ("lanes", "latest_lane") if name in saved}
            told = self._plan.epoch_told
            fetcher = RemoteFetcher(crew, stream.epoch, stream.base_seed, epoch_told=told, saved=lanes)
        run = Run(
            self._plan.settings,
            source,
            stream,
            crew,
            ring=self.ring,
            copier=self._copier,
            tally=self.tally,
            budget=self.budget,
            max_batches=max_batches,
            is_wanted=is_wanted,
            saved=saved,
            fetcher=fetcher,
        )
        crew.attach(run)
        return run

    # Persistent workers, and the pass that begins early.

    def _persistent_run(self, epoch: int, saved: Mapping[str, Any] | None) -> tuple[Run, Crew | Gang]:
        max_batches = self._plan.settings.max_batches
        crew, ahead, self._next = self._kept.crew, self._next, None
        if crew is not None and crew.crashed:
            crew.close()
            crew = None
        is_stale = isinstance(crew, Gang) and not self._is_still()
        if ahead is not None:
            run, lookahead = ahead
            is_taken_up = False
            try:
                if crew is not None and not is_stale and saved is None and lookahead.take_up(epoch):
                    run.on_exhausted = self._run_ahead
                    run.grant(max_batches, is_wanted=True)
                    is_taken_up = True
                    return run, crew
            finally:
                if not is_taken_up:
                    run.close()
            self._wasted_lookahead = saved is None
        # Without one, the state is from before any was drawn.
        keeps_seed = crew is not None and (saved is None or "base_seed" in saved)
        stream = self._stream(epoch, saved, self._kept.base_seed if keeps_seed else None)
        source = self._source(stream, saved, first=crew is None)
        if crew is not None and is_stale:  # processes have copies of what has been changed
            crew.close()
            crew = None
        if crew is None:
            crew = self._kept.crew = self._new_crew(source)
            try:
                crew.start()
            except BaseException:
                self._kept.crew = None
                crew.close()
                raise
            self._note_given()
        self._kept.base_seed = stream.base_seed
        run = self._new_run(source, stream, crew, max_batches, saved)
        run.on_exhausted = self._run_ahead
        return run, crew

    @contextlib.contextmanager
    def telling_epoch(self) -> Iterator[None]:
        """Tell the dataset the epoch: it changes, and persistent processes will be told as well."""
        was_still = self._is_still()
        yield
        if was_still:
            self._note_given()

    def _is_still(self) -> bool:
        return self._kept.given is not None and self._kept.given.is_still(*_given(self._plan))

    def _note_given(self) -> None:
        self._kept.given = Appearance(*_given(self._plan)) if isinstance(self._kept.crew, Gang) else None

    def _run_ahead(self, num_batches: int) -> None:
        """Let the next pass be ``num_batches`` ahead. In the consumer's thread."""
        plan, crew = self._plan, self._kept.crew
        if num_batches <= 0 or self._wasted_lookahead or crew is None or not can_run_ahead(plan.index_sampler):
            return
        with self._lock:  # passes that go on at once may end at once
            try:
                if self._next is None:
                    epoch = plan.epochs.next(plan.index_sampler)
                    others = plan.dataset, plan.reader, plan.settings.collate_fn, collation_rules()
                    lookahead = Lookahead(epoch, plan.index_sampler, plan.generator, *others)
                    lookahead.drawing(functools.partial(self._begin_next, lookahead, crew, num_batches))
                else:
                    run, lookahead = self._next
                    lookahead.drawing(functools.partial(run.grant, num_batches))
            except Exception:  # has nothing to do with this pass; iter() will meet it again
                self._wasted_lookahead = True
                self._drop_next()
            except BaseException:  # an interrupt: it is for the consumer of this pass, and for no other
                if self._next is not None and self._next[0].is_cut_short:
                    self._drop_next()
                raise

    def _begin_next(self, lookahead: Lookahead, crew: Crew | Gang, num_batches: int) -> None:
        stream = self._stream(lookahead.epoch, None, self._kept.base_seed, lookahead.stand_in)
        source = self._source(stream, None, first=False)
        run = self._new_run(source, stream, crew, num_batches, is_wanted=False)
        self._next = run, lookahead  # from here on an interrupt leaves a pass that goes on with what is missing
        run.start()

    def _drop_next(self) -> None:
        ahead, self._next = self._next, None
        if ahead is not None:
            ahead[0].close()


def _given(plan: Plan) -> tuple[Any, ...]:
    """Return what processes get a copy of."""
    tolerance = plan.settings.tolerance
    on_error = None if tolerance is None else tolerance.on_error
    return plan.dataset, plan.reader, plan.worker_init_fn, plan.settings.collate_fn, collation_rules(), on_error
