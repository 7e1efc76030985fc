"""Share: the batches of one pass that an engine process loads: the counterpart of a run, without a consumer.

It is given indices, batch by batch, and told when the consumer has taken a batch; that is all it knows of the consumer.
Batches go by their number within the share.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aioload.engine.appetite import Appetite
from aioload.engine.batch import Batch
from aioload.engine.budget import Budget, Claim
from aioload.engine.choice import Crew, fetcher_for
from aioload.engine.recipe import Recipe
from aioload.engine.settings import Settings
from aioload.engine.source import Kind, Source
from aioload.engine.whole import GatherFetcher
from aioload.engine.window import Window
from aioload.ring import Ring
from aioload.stats import Tally


class _Marked(Batch):
    """A batch that tells the other process which of its samples are being loaded, also when this process has died."""

    def __init__(
        self,
        number: int,
        indices: Sequence[Any],
        recipe: Recipe,
        on_done: Callable[[Batch], None],
        claim: Claim,
        marks: memoryview,
    ) -> None:
        super().__init__(number, indices, recipe, on_done, claim)
        self.marks: memoryview = marks

    def wants(self, position: int) -> bool:
        wanted = super().wants(position)
        if wanted:  # once for each stage, and again whenever it was held back
            self.marks[position] = (self.marks[position] & 127) + 1
        return wanted

    def _settle(self, start: int, num_samples: int = 1) -> bool:
        self.marks[start : start + num_samples] = bytes(num_samples)
        return super()._settle(start, num_samples)


class Share:
    """The batches of one pass that this process loads. One thread calls its methods, the workers report.

    Args:
        settings: What the loader's arguments come to.
        source: The dataset.
        crew: Threads and loop.
        ring: Slots.
        tally: What is done in the caller's thread.
        budget: The bytes in flight in this process.
        on_done: Called with each finished batch and the indices it was asked for, by the thread that finished it.
        on_broken: Called with the error if the crew cannot go on.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        crew: Crew,
        *,
        ring: Ring,
        tally: Tally,
        budget: Budget,
        on_done: Callable[[Batch, Sequence[Any]], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._crew, self._budget = crew, budget
        self._on_done, self.break_ = on_done, on_broken
        self._num_granted = 1
        self._window = Window(1, budget, self._resubmit)
        self._open: dict[int, Batch] = {}
        self._unfinished: deque[None] = deque()  # as many as batches that are being loaded: it is atomic
        self._num_loaded = 0
        self._closed = False
        self._recipe = Recipe(
            context=source.context,
            collate_fn=settings.collate_fn,
            batched=settings.batched,
            by_rows=settings.by_rows,
            on_device=True,  # a slot is not lent here
            pin=False,
            ring=ring,
            locate=source.locate,
            on_size=self._window.note_size,
            tolerance=settings.tolerance,
            bundles=False,
        )
        self._appetite = None if crew.regulator is None else Appetite(crew.regulator.demand)
        self._fetcher = fetcher_for(source, crew, self._window, settings, tally)
        self._by_loop = source.kind in (Kind.ASYNC, Kind.AWAITED)
        self._by_sample = source.kind in (Kind.STAGED, Kind.AWAITED, Kind.ASYNC, Kind.SINGLE)

    def __repr__(self) -> str:
        return f"<Share {sorted(self._open)}{' closed' if self._closed else ''}>"

    def load(self, number: int, indices: Sequence[Any], marks: memoryview) -> None:
        """Start to load the batch of that number, unless it was started before: an interrupt may have it sent twice.

        Args:
            number: Its number.
            indices: Of its samples.
            marks: For the samples, if there is room.
        """
        if number < self._num_loaded or self._closed:
            return
        if not self._num_loaded and self._appetite is not None:
            self._appetite.begin()
        self._num_loaded = number + 1
        num_ahead = number + 1 - self._window.delivered
        if num_ahead > self._num_granted:  # how far ahead the consumer's side decides; here only bytes count
            self._num_granted = num_ahead
            self._window.grant(num_ahead)
        on_done = functools.partial(self._report, given=indices)
        claim = Claim(self._budget, number)
        if self._by_sample and marks:
            batch: Batch = _Marked(number, indices, self._recipe, on_done, claim, marks)
        else:
            batch = Batch(number, indices, self._recipe, on_done, claim)
        self._open[number] = batch
        self._unfinished.append(None)
        self._fetcher.submit(batch)

    @property
    def is_idle(self) -> bool:
        """Whether all batches that it was asked for are done."""
        return not self._unfinished

    def note_taken(self, number: int) -> None:
        """Take notice that the consumer has a batch; its bytes are no longer in flight."""
        batch = self._open.pop(number, None)
        if batch is None:
            return
        batch.claim.close()
        if self._appetite is not None:
            self._appetite.note_taken()
        self._window.delivered += 1
        self._window.oldest = min(self._open, default=self._num_loaded)
        self._budget.changed()

    def close(self) -> None:
        """Let all batches go."""
        self._closed = True
        for batch in list(self._open.values()):
            batch.cancel()
        self._open.clear()
        self._window.clear()
        if self._appetite is not None:
            self._appetite.end()

    def _resubmit(self, jobs: list[Any]) -> None:
        self._fetcher.resubmit(jobs)

    def _report(self, batch: Batch, given: Sequence[Any]) -> None:
        self._unfinished.pop()
        if self._appetite is not None:
            self._appetite.note_done()
        if isinstance(self._fetcher, GatherFetcher) and self._fetcher.is_direct:
            self._on_done(batch, given)
        elif self._by_loop:  # they are lost with the loop, so that one error comes, and not two
            self._crew.portal.call(self._on_done, batch, given)
        else:
            self._crew.portal.pass_through(self._on_done, batch, given)
