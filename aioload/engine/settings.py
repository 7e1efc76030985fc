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


class Answer(enum.Enum):
    """What asking for a batch may answer instead of one."""

    NOT_YET = "not yet"
    OVER = "over"
