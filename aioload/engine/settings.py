"""Settings: what the loader's arguments come to, for the engine; and what the engine answers."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioload.engine.tolerance import Tolerance
from aioload.readers import ReadPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the loader's arguments come to, for the engine."""

    collate_fn: Callable[[Any], Any]
    batched: bool
    by_rows: bool
    drop_last: bool
    in_order: bool
    pin: bool
    timeout_s: float
    slow_after_s: float
    max_batches: int
    batch_size: int
    """Samples of a usual batch, 1 if unknown."""
    max_bytes: int
    num_device_batches: int
    """Batches that may be on the device ahead of the consumer."""
    tolerance: Tolerance | None
    read_policy: ReadPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one of several processes is to do of the whole.

    Attributes:
        process: Its number.
        num_processes: How many there are.
        first_worker: The number of the first of its workers.
        num_workers: Its decode threads.
        num_all_workers: Those of all processes.
        num_reads: Its reads under way, ``None`` for as many as it finds best.
        most_reads: What that never exceeds.
    """

    process: int
    num_processes: int
    first_worker: int
    num_workers: int
    num_all_workers: int
    num_reads: int | None
    most_reads: int


class Answer(enum.Enum):
    """What asking for a batch may answer instead of one."""

    NOT_YET = "not yet"
    OVER = "over"
