"""Workers: what dataset code is told of the worker it runs in, by us and by torch's own function."""

import functools
import os
from typing import Any

import torch.utils.data._utils.worker as torch_worker

from aioload.context import HERE

_COLLATION = "torch.utils.data._utils.collate"


class WorkerInfo(torch_worker.WorkerInfo):
    """torch's own, with the number of the engine process that the worker is in, ``None`` for the consumer's process."""

    process: int | None


def get_worker_info() -> Any:
    """Return which worker runs the calling dataset code, as ``torch.utils.data.get_worker_info`` does.

    Returns:
        torch's ``WorkerInfo``, with a field more: ``id`` from 0 to ``num_workers - 1``, ``num_workers``, ``seed`` (the
        pass's base seed plus ``id``), ``dataset``, which is the loader's own object and no copy, and ``process``. Each
        decode thread is a worker. An iterable dataset is passed over by one worker, whatever ``num_workers`` is, or by
        ``iterable_workers`` of them, each with a copy of its own; an async one runs on one event loop and has one
        worker. ``location``, and a ``decode`` so cheap that it runs where the file was read, run on more threads than
        there are workers, so there two may have the same ``id`` at once, unless there is a ``worker_init_fn``.
        ``process`` is the number of the engine process that the thread belongs to, of which ``dataset`` is the copy,
        or ``None`` without ``processes``. ``None`` outside a loader's threads, so also with ``num_workers=0``.
    """
    current = HERE.get()
    if current is None or current[3] is None:
        return _of_torch()
    of = current[0]
    worker = of.first_worker + current[3]
    info = WorkerInfo(
        id=worker,
        num_workers=of.num_workers,
        seed=of.base_seed + worker,
        dataset=of.dataset,
        worker_method="thread" if of.process is None else "multiprocessing",
    )
    object.__setattr__(info, "process", of.process)
    return info


def _of_torch() -> Any:
    """Return what torch knows: this may be a worker process of torch's own loader."""
    return torch_worker._worker_info  # noqa: SLF001


def answer(asker: str) -> Any:
    """Return what a module of that name should be told.

    torch's collation puts tensors into shared memory where it finds itself in a worker. Ours need none.
    """
    return _of_torch() if asker == _COLLATION else get_worker_info()


def _asks_us() -> Any:
    import sys

    from aioload.workers import answer as ours

    return ours(sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001


@functools.cache
def answer_for_torch() -> None:
    """Have ``torch.utils.data.get_worker_info`` answer as ours does, once in a process.

    Its code is replaced, since datasets hold the function itself: ``from torch.utils.data import get_worker_info``.
    A process forked by dataset code, to be a worker of torch's own loader for instance, works for no sample of ours.
    """
    os.register_at_fork(after_in_child=functools.partial(HERE.set, None))
    torch_worker.get_worker_info.__code__ = _asks_us.__code__
