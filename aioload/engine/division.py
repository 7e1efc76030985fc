"""Division: what each of several engine processes is to do of what the loader's arguments ask for."""

from dataclasses import replace
from typing import Any

from aioload.engine.gang import Gang
from aioload.engine.member import check_may_start
from aioload.engine.plan import Plan
from aioload.engine.portal import Portal
from aioload.engine.regulator import allowed_handles, most_reads
from aioload.engine.server import new_context
from aioload.engine.settings import Part
from aioload.engine.source import Kind
from aioload.ring import Ring
from aioload.stats import Ledger


def shares_of(total: int, num_parts: int) -> list[int]:
    """Return ``total`` in parts as equal as can be, and none of them 0."""
    share, rest = divmod(total, num_parts)
    return [max(1, share + (part < rest)) for part in range(num_parts)]


def divide(
    num_processes: int, num_workers: int, num_reads: int | None, most_reads: int, num_all_workers: int | None = None
) -> list[Part]:
    """Return what each process is to do; ``num_workers``, and reads, are those of all of them together.

    Args:
        num_processes: How many there are.
        num_workers: Decode threads.
        num_reads: Reads under way, ``None`` for as many as they find best ...
        most_reads: ... which is no more than this.
        num_all_workers: How many workers the dataset is told that there are, if not ``num_workers``.
    """
    workers, maxima = shares_of(num_workers, num_processes), shares_of(most_reads, num_processes)
    reads = [None] * num_processes if num_reads is None else shares_of(num_reads, num_processes)
    return [
        Part(
            process=number,
            num_processes=num_processes,
            first_worker=sum(workers[:number]),
            num_workers=workers[number],
            num_all_workers=sum(workers) if num_all_workers is None else num_all_workers,
            num_reads=reads[number],
            most_reads=maxima[number],
        )
        for number in range(num_processes)
    ]


def gang_for(plan: Plan, kind: Kind, *, ring: Ring, portal: Portal, ledger: Ledger) -> Gang:
    """Return new engine processes for what the loader's arguments are now.

    Raises:
        ArgumentError: This process may not start any.
        TransferError: Something cannot be pickled.
    """
    check_may_start()
    # An iterable dataset is passed over once, and so by one process.
    num_processes = 1 if kind is Kind.ITERABLE else plan.processes
    num_workers = num_processes if kind is Kind.ASYNC else plan.num_workers
    settings = replace(plan.settings, max_bytes=max(1, plan.settings.max_bytes // num_processes))

    contents: dict[str, Any] = {
        "kind": kind,
        "dataset": plan.dataset,
        "reader": plan.reader,
        "cache": plan.cache,
        "worker_init_fn": plan.worker_init_fn,
        "seed": plan.seed,
        "settings": settings,
        "is_page_locked": ring.locks_pages,
    }

    return Gang(
        divide(
            num_processes,
            num_workers,
            plan.num_concurrent_reads,
            most_reads(allowed_handles()),
            plan.iterable_workers if kind is Kind.ITERABLE else None,
        ),
        contents,
        new_context(plan.context),
        ring=ring,
        portal=portal,
        ledger=ledger,
        has_beginning=plan.worker_init_fn is not None,
        epoch_told=plan.epoch_told,
        auto=plan.num_concurrent_reads is None and kind in (Kind.STAGED, Kind.AWAITED, Kind.ASYNC),
    )
