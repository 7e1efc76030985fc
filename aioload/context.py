"""Context: which sample, of which pass, the running code works for.

Set by whoever calls the user's code, read by :func:`~aioload.randomness.sample_rng` and
:func:`~aioload.workers.get_worker_info`. A context variable follows threads and tasks alike.
"""

import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """What is the same for all samples of a pass.

    Attributes:
        dataset: The dataset.
        num_workers: Workers that share it.
        base_seed: Drawn once for the workers, as torch does.
        seed: The loader's ``seed``, or ``None``.
        epoch: The number of the pass, from 0, unless ``set_epoch`` said otherwise.
    """

    dataset: Any
    num_workers: int
    base_seed: int
    seed: int | None
    epoch: int


class Stage(enum.IntEnum):
    """What is asked of the dataset; each stage of a sample has random numbers of its own."""

    SAMPLE = 0  # __getitem__, decode
    LOCATION = 1
    ITEM = 2  # of an iterable dataset
    BATCH = 3  # no single sample: __getitems__, collate_fn, worker_init_fn


class Here(NamedTuple):
    """What the running code works for.

    Attributes:
        of: The pass.
        index: The sample's index, its place in the stream for iterable datasets.
        stage: What is asked for.
        worker: The worker's number; ``None`` in the consumer's thread.
    """

    of: PassContext
    index: Any
    stage: Stage
    worker: int | None


HERE: ContextVar[tuple[PassContext, Any, Stage, int | None] | None] = ContextVar("aioload_here", default=None)
"""A :class:`Here`, or the plain tuple of it, which takes a third of the time to make: it is set for each sample.

Whoever waits for work sets it to ``None``, so that a parked thread keeps no dataset alive.
"""


def here() -> Here | None:
    """Return what the running code works for; ``None`` where no loader has called it."""
    current = HERE.get()
    return None if current is None else Here(*current)


def leave_sample() -> None:
    """Have the code that runs next work for the batch and not for the sample before it."""
    current = HERE.get()
    if current is not None:
        HERE.set((current[0], None, Stage.BATCH, current[3]))
