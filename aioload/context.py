"""Context: which sample, of which pass, the running code works for.

Set by whoever calls the user's code, read by :func:`~aioload.randomness.sample_rng` and
:func:`~aioload.workers.get_worker_info`. A context variable follows threads and tasks alike.
"""

import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """What is the same for all samples of a pass.

    Attributes:
        dataset: The dataset.
        num_workers: Workers that share it.
        base_seed: Drawn once for the workers, as torch does.
        seed: The loader's ``seed``, or ``None``.
        epoch: The number of the pass, from 0, unless ``set_epoch`` said otherwise.
        first_worker: The number of the first of the workers that are in this process.
        process: The number of this process among those that the loader has; ``None`` where that is the consumer's own.
    """

    dataset: Any
    num_workers: int
    base_seed: int
    seed: int | None
    epoch: int
    first_worker: int = 0
    process: int | None = None


class Stage(enum.IntEnum):
    """What is asked of the dataset; each stage of a sample has random numbers of its own."""

    SAMPLE = 0  # __getitem__, decode
    LOCATION = 1
    ITEM = 2  # of an iterable dataset
    BATCH = 3  # no single sample: __getitems__, collate_fn, worker_init_fn
    BEGIN = 4  # __iter__ of an iterable dataset


HERE: ContextVar[list[Any] | None] = ContextVar("aioload_here", default=None)
"""What the running code works for: ``[of, index, stage, worker, generator]``; ``None`` where no loader has called it.

``of`` is the pass. ``index`` is the sample's, or the item's place in the stream of an iterable dataset. ``worker`` is
the worker's number, ``None`` in the consumer's thread. ``generator`` holds the sample's random numbers once they have
been asked for: tasks and threads that work for the same sample inherit the list and so share them.

It is set for each sample, and so a list: an object with names takes longer to make. Tiny files that one thread loads in
a row share one, which is written to: it is right for as long as the sample's own code runs. Whoever waits for work sets
it to ``None``, so that a parked thread keeps no dataset alive.
"""


def leave_sample() -> None:
    """Have the code that runs next work for the batch and not for the sample before it."""
    current = HERE.get()
    if current is not None:
        HERE.set([current[0], None, Stage.BATCH, current[3], None])
