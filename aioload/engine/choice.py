"""Choice: which fetcher loads which kind of dataset, with which of the crew's pools."""

from typing import Any, Protocol

from aioload.engine.awaited import AwaitedFetcher
from aioload.engine.fetchers import AsyncFetcher, Fetcher, Gate, SampleFetcher
from aioload.engine.regulator import Regulator
from aioload.engine.settings import Settings
from aioload.engine.source import Kind, Source
from aioload.engine.staged import StagedFetcher
from aioload.engine.whole import BatchFetcher, GatherFetcher
from aioload.stats import Tally


class Crew(Protocol):
    """The threads that a run works with; see :mod:`aioload.engine.crew`."""

    decode: Any
    reads: Any
    tasks: Any
    watch: Any
    portal: Any
    pace: Any
    may_inline: bool
    regulator: Regulator | None

    def begin(self) -> None:
        """Called when the first jobs have been queued."""
        ...

    @property
    def is_single(self) -> bool:
        """Whether there is but one thread, in each process, to load with."""
        ...

    def widen_if_stuck(self) -> None:
        """Let every thread work where jobs wait and none gets done."""
        ...


def fetcher_for(source: Source, crew: Crew, gate: Gate, settings: Settings, tally: Tally) -> Fetcher:
    """Return the fetcher of one run; what it does in the consumer's thread is counted in ``tally``."""
    if source.kind is Kind.STAGED:
        return StagedFetcher(source, crew.reads, crew.decode, gate, crew.watch, may_inline=crew.may_inline)
    if source.kind is Kind.AWAITED:
        return AwaitedFetcher(source, crew.tasks, crew.decode, gate, crew.pace)
    if source.kind is Kind.ASYNC:
        return AsyncFetcher(source, crew.tasks, crew.decode, gate, by_rows=settings.by_rows)
    if source.kind is Kind.SINGLE:
        return SampleFetcher(source, crew.decode, gate)
    if source.kind is Kind.TAKE:
        return GatherFetcher(source, crew.decode, tally)
    return BatchFetcher(source, crew.decode, gate, batched=settings.batched, drop_last=settings.drop_last)
