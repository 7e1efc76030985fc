"""Plan: what the loader's arguments come to at the start of a pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aioload.cache import Cache
from aioload.collate import rows_allowed
from aioload.device import DeviceBackend, backend_for, can_pin
from aioload.engine import window
from aioload.engine.epochs import Epochs
from aioload.engine.limit import START
from aioload.engine.memory import available_bytes
from aioload.engine.regulator import allowed_handles, most_reads
from aioload.engine.settings import Settings
from aioload.engine.source import Kind, kind_of
from aioload.readers import Reader, SchemeReader
from aioload.readers.kept import Kept

SLOW_AFTER_S = 30.0
"""A batch that is waited for longer than this is logged, with what is missing, once a wait."""

_MEMORY_SHARE = 4
"""What is in flight may by default fill one part in this many of the memory that is available."""

_default_readers = Kept[SchemeReader]()
"""Those of the loaders, so that connections last over epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a runtime needs to know of its loader."""

    dataset: Any
    reader: Reader | None
    default_reader: SchemeReader
    cache: Cache | None
    index_sampler: Any
    generator: torch.Generator | None
    backend: DeviceBackend | None
    """The device, ``None`` for the CPU."""
    device_transform: Callable[[Any], Any] | None
    num_workers: int
    num_concurrent_reads: int | None
    """``None`` for as many as are found to be best."""
    processes: int
    """Engine processes; 0 for threads of this one."""
    context: Any
    """How they are started, ``None`` for the usual way."""
    epoch_told: int | None
    """What ``set_epoch`` was last called with."""
    iterable_workers: int
    persistent: bool
    worker_init_fn: Callable[[int], None] | None
    seed: int | None
    epochs: Epochs
    settings: Settings

    @property
    def num_makers(self) -> int:
        """How many samples may be in the making at once."""
        kind = kind_of(self.dataset, self.reader, batched=self.settings.batched, by_rows=self.settings.by_rows)
        return self.most_reads if kind is Kind.ASYNC else self.num_workers

    @property
    def most_reads(self) -> int:
        """How many reads may ever be under way at once."""
        return most_reads(allowed_handles()) if self.num_concurrent_reads is None else self.num_concurrent_reads

    def loads_as(self, other: "Plan") -> bool:
        """Whether batches that were begun by the other plan will do for this one."""
        mine, others = self.settings, other.settings
        same = self.index_sampler is other.index_sampler and self.generator is other.generator
        same = same and mine.collate_fn is others.collate_fn and mine.by_rows == others.by_rows
        same = same and mine.num_device_batches == others.num_device_batches
        same = same and mine.tolerance == others.tolerance and mine.read_policy == others.read_policy
        return same and mine.in_order == others.in_order and mine.max_batches == others.max_batches


def plan_of(loader: Any, epochs: Epochs) -> Plan:
    """Return the plan for the arguments of ``loader``, a DataLoader, as they are now; most may be changed."""
    return Plan(
        dataset=loader.dataset,
        reader=loader.reader,
        default_reader=_default_readers.get(loader, "", SchemeReader),
        cache=loader.cache,
        index_sampler=loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
        generator=loader.generator,
        backend=backend_for(loader.device),
        device_transform=loader.device_transform,
        num_workers=loader.num_workers,
        num_concurrent_reads=_num_concurrent(loader),
        processes=loader.processes,
        context=loader.multiprocessing_context,
        epoch_told=loader.epoch_told,
        iterable_workers=loader.iterable_workers,
        persistent=loader.persistent_workers,
        worker_init_fn=loader.worker_init_fn,
        seed=loader.seed,
        epochs=epochs,
        settings=_settings_of(loader),
    )


def _settings_of(loader: Any) -> Settings:
    batched = loader.batch_sampler is not None
    by_rows = batched and loader.num_workers > 0 and rows_allowed(loader.collate_fn)
    kind = kind_of(loader.dataset, loader.reader, batched=batched, by_rows=by_rows)
    reads = _num_concurrent(loader) if kind in (Kind.STAGED, Kind.AWAITED, Kind.ASYNC) else 0
    return Settings(
        collate_fn=loader.collate_fn,
        batched=batched,
        by_rows=by_rows,
        drop_last=loader.drop_last,
        in_order=loader.in_order,
        pin=bool(loader.pin_memory) and backend_for(loader.device) is None and can_pin(),
        timeout_s=loader.timeout,
        slow_after_s=SLOW_AFTER_S,
        max_batches=window.max_batches(
            prefetch_factor=loader.prefetch_factor or 0,
            num_workers=loader.num_workers,
            batch_size=_batch_size(loader),
            num_concurrent=START if reads is None else reads,
        ),
        batch_size=_batch_size(loader),
        num_device_batches=loader.num_device_batches,
        max_bytes=loader.prefetch_bytes or available_bytes() // _MEMORY_SHARE,
        tolerance=loader.tolerance,
        read_policy=loader.read,
    )


def _num_concurrent(loader: Any) -> int | None:
    reads = loader.num_concurrent_reads
    return None if reads == "auto" else int(reads)


def _batch_size(loader: Any) -> int:
    return getattr(loader.batch_sampler, "batch_size", None) or 1
