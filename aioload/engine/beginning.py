"""Beginning: ``worker_init_fn`` in a worker, which shares its process, and so its random numbers, with the consumer.

Scripts seed ``random``, numpy and torch there, for worker processes of their own. Here that would seed the training
step. So the function finds the generators seeded for the worker, as torch seeds them, and they are put back afterwards.
"""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from aioload.context import HERE, PassContext, Stage


class Beginning:
    """Calls ``worker_init_fn`` for one worker at a time. Any thread may call it.

    Args:
        worker_init_fn: The user's function.
        base_seed: Worker ``number`` is seeded with ``base_seed + number``.
        puts_back: Whether the process's generators are afterwards what they were before: it is the consumer's.
    """

    _lock = threading.Lock()  # of all: the generators are the process's

    def __init__(self, worker_init_fn: Callable[[int], None], base_seed: int, *, puts_back: bool = True) -> None:
        self._worker_init_fn, self._base_seed, self._puts_back = worker_init_fn, base_seed, puts_back

    def __call__(self, number: int) -> None:
        """Call it for worker ``number``."""
        with self._lock, kept_generators() if self._puts_back else contextlib.nullcontext():
            seed_process(self._base_seed + number)
            self._worker_init_fn(number)


def begin_worker(worker_init_fn: Callable[[int], None], context: PassContext, number: int) -> None:
    """Call ``worker_init_fn`` for the ``number``-th worker of this process, in its thread."""
    HERE.set([context, None, Stage.BATCH, number, None])
    worker_init_fn(context.first_worker + number)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Put the global generators of ``random``, numpy and torch back at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _renew_lock() -> None:
    Beginning._lock = threading.Lock()  # noqa: SLF001  # a thread that does not exist here may have had it


os.register_at_fork(after_in_child=_renew_lock)


def seed_process(seed: int) -> None:
    """Seed the global generators of ``random``, numpy and torch, as torch does for a worker."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices too
