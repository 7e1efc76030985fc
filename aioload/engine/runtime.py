"""Runtime: what the passes of one loader share, and how a pass begins and ends.

A run has a crew of its own, or shares the loader's where workers are persistent. Then the next pass begins
while the present one ends: as batches of this one are consumed, batches of the next take their places, and
``iter()`` takes that pass up if the sampler would still draw the same and the dataset has not been changed.
"""

import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aioload.copier import Copier, CudaCopier
from aioload.engine.crew import Crew
from aioload.engine.indices import IndexStream, Lookahead, can_run_ahead
from aioload.engine.inline import InlineRun
from aioload.engine.portal import Portal
from aioload.engine.run import Run, Settings
from aioload.engine.source import Kind, Source
from aioload.ring import Ring
from aioload.stats import Ledger, LoaderStats

CLOSE_TIMEOUT_S = 1.0
"""Seconds that closing waits for threads to end. One that is stuck in a read ends when the read does."""

_COLLECTED_TIMEOUT_S = 0.2
"""The same when an iterator was simply dropped, where nobody asked to wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a runtime needs to know of its loader."""

    dataset: Any
    index_sampler: Any
    generator: torch.Generator | None
    device: torch.device
    num_workers: int
    num_concurrent_reads: int
    persistent: bool
    worker_init_fn: Callable[[int], None] | None
    settings: Settings


class Pass:
    """A run and the crew it works with, as an iterator holds them."""

    def __init__(self, run: Run | InlineRun, crew: Crew | None, *, owns_crew: bool) -> None:
        self.run, self._crew, self._owns_crew = run, crew, owns_crew

    @property
    def reads_limit(self) -> int:
        """Reads that may be under way at present."""
        return 0 if self._crew is None or self.run.closed else self._crew.reads_limit

    def start_on_loop(self) -> "concurrent.futures.Future[None]":
        """Start loading from the loop thread: a sampler may think for long before its first index.

        Returns:
            A future that is done when the first indices have been drawn. It must not be cancelled.
        """
        started: concurrent.futures.Future[None] = concurrent.futures.Future()

        def start() -> None:
            self.run.start()
            started.set_result(None)

        if self._crew is None or not self._crew.portal.call(start):
            start()
        return started

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the pass; threads that are its own are waited for, at most ``timeout_s``. Any thread, any time."""
        if self._crew is not None and self._owns_crew:
            self._crew.close()
        self.run.close()
        if self._crew is not None and self._owns_crew and timeout_s > 0:
            self._crew.join(timeout_s)

    def collected(self) -> None:
        """End the pass because its iterator is gone."""
        self.close(_COLLECTED_TIMEOUT_S)


class Runtime:
    """What the passes of one loader share: slots, counts, the loop of an async dataset, persistent workers.

    Belongs to the process that made it; after a fork the child's loader makes another.
    """

    def __init__(self, plan: Plan) -> None:
        self.pid = os.getpid()
        self._plan = plan
        settings = plan.settings
        cuda = plan.device.type == "cuda"
        pin = settings.pin or cuda
        num_slots = settings.max_batches + 2  # being consumed, and being put together
        self.ring = Ring(pinned=pin, reuse=cuda or not pin, max_free=num_slots, warn_held=max(32, 4 * num_slots))
        self.ledger = Ledger()
        self.tally = self.ledger.open()
        self._copier: Copier | None = CudaCopier(plan.device, self.ring) if cuda else None
        self._lock = threading.Lock()
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._crew: Crew | None = None
        self._next: tuple[Run, Lookahead] | None = None
        self._wasted_lookahead = False
        self._kept_portal: Portal | None = None

    def stats(self) -> LoaderStats:
        """Return what has been done so far."""
        limits = [each.reads_limit for each in list(self._passes)]
        return self.ledger.snapshot(max(limits, default=0))

    def begin(self) -> Pass:
        """Return a new pass over the data, not started yet."""
        plan = self._plan
        if plan.num_workers == 0:
            return self._add(Pass(self._inline_run(), None, owns_crew=False))
        if plan.persistent:
            with self._lock:
                run, crew = self._persistent_run()
            return self._add(Pass(run, crew, owns_crew=False))
        source, stream = self._source(), self._stream()
        crew = self._new_crew(source.kind)
        run = self._new_run(source, stream, crew, plan.settings.max_batches)
        return self._add(Pass(run, crew, owns_crew=True))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End all passes, and stop persistent workers. The runtime may be used again afterwards."""
        deadline = time.monotonic() + timeout_s
        for each in list(self._passes):
            each.close(max(0.0, deadline - time.monotonic()))
        crew, self._crew = self._crew, None
        self._drop_next()
        if crew is not None:
            crew.close()
            crew.join(max(0.0, deadline - time.monotonic()))
        if self._kept_portal is not None and self.pid == os.getpid():
            self._kept_portal.join(deadline)
            self._kept_portal.close()

    def _add(self, new: Pass) -> Pass:
        self._passes.add(new)
        return new

    def _inline_run(self) -> InlineRun:
        return InlineRun(
            self._plan.settings,
            self._source(),
            self._stream(),
            portal=self._portal(keep_loop=True),
            copier=self._copier,
            tally=self.tally,
        )

    def _source(self) -> Source:
        settings = self._plan.settings
        return Source(self._plan.dataset, batched=settings.batched, by_rows=settings.by_rows)

    def _stream(self) -> IndexStream:
        return IndexStream(self._plan.index_sampler, self._plan.generator)

    def _portal(self, *, keep_loop: bool) -> Portal:
        if not keep_loop:
            return Portal(keep_loop=False)
        if self._kept_portal is None:
            self._kept_portal = Portal(keep_loop=True)
        return self._kept_portal

    def _new_crew(self, kind: Kind) -> Crew:
        plan = self._plan
        return Crew(
            kind,
            num_workers=plan.num_workers,
            num_concurrent_reads=plan.num_concurrent_reads,
            worker_init_fn=plan.worker_init_fn,
            portal=self._portal(keep_loop=kind is Kind.ASYNC),
            ledger=self.ledger,
        )

    def _new_run(self, source: Source, stream: IndexStream, crew: Crew, max_batches: int) -> Run:
        run = Run(
            self._plan.settings,
            source,
            stream,
            crew,
            ring=self.ring,
            copier=self._copier,
            tally=self.tally,
            max_batches=max_batches,
        )
        crew.attach(run)
        return run

    # Persistent workers, and the pass that begins early.

    def _persistent_run(self) -> tuple[Run, Crew]:
        max_batches = self._plan.settings.max_batches
        if self._crew is not None and self._crew.crashed:
            self._crew.close()
            self._crew = None
            self._drop_next()
        if self._next is not None and self._crew is not None:
            (run, lookahead), self._next = self._next, None
            if lookahead.take_up():
                run.on_exhausted = self._run_ahead
                run.grant(max_batches)
                return run, self._crew
            run.close()
            self._wasted_lookahead = True
        source = self._source()
        if self._crew is None:
            self._crew = self._new_crew(source.kind)
        run = self._new_run(source, self._stream(), self._crew, max_batches)
        run.on_exhausted = self._run_ahead
        return run, self._crew

    def _run_ahead(self, num_batches: int) -> None:
        """Let the next pass be ``num_batches`` ahead. In the consumer's thread."""
        plan = self._plan
        if num_batches <= 0 or self._wasted_lookahead or self._crew is None:
            return
        if not can_run_ahead(plan.index_sampler):
            return
        if self._next is not None:
            run, lookahead = self._next
            with lookahead.drawing():
                run.grant(num_batches)
            return
        lookahead = Lookahead(plan.index_sampler, plan.generator, plan.dataset)
        with lookahead.drawing():
            run = self._new_run(self._source(), self._stream(), self._crew, num_batches)
            run.start()
        self._next = run, lookahead

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next[0].close()
            self._next = None
