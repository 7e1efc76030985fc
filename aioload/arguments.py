"""Arguments: what the loader refuses of those that torch does not know, and the default for workers."""

import functools
import os
import warnings
from typing import Any

import torch
import torch.utils.data as torch_data

from aioload.errors import ArgumentError


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_timeout(timeout: float, num_workers: int) -> None:
    """Refuse a timeout that nothing could keep.

    Raises:
        ArgumentError: There are no threads.
    """
    if num_workers == 0 and timeout > 0:
        message = f"timeout={timeout!r} needs num_workers > 0: without threads nothing can interrupt a sample."
        raise ArgumentError(message)


def check_count(name: str, value: Any) -> None:
    """Refuse what is no number of things.

    Raises:
        ArgumentError: It is no whole number from 1 up.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"{name} needs a whole number from 1 up; got {value!r}."
        raise ArgumentError(message)


def check_iterable_workers(iterable_workers: int, dataset: Any) -> None:
    """Refuse several iterators over a dataset that is not iterated over.

    Raises:
        ArgumentError: It is none.
    """
    if iterable_workers > 1 and not isinstance(dataset, torch_data.IterableDataset):
        message = (
            f"iterable_workers={iterable_workers} is for an IterableDataset; got {type(dataset).__name__}, whose "
            "samples num_workers threads load. Leave it out."
        )
        raise ArgumentError(message)


def check_seed(seed: Any, generator: torch.Generator | None) -> None:
    """Refuse what is no seed, and two sources of one order.

    Raises:
        ArgumentError: ``seed`` is not ``None`` and no whole number of 64 bits, or there is a generator as well.
    """
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        message = f"seed needs a whole number from 0 to 2**64 - 1; got {seed!r}."
        raise ArgumentError(message)
    if generator is not None:
        message = f"seed={seed!r} fixes the order by itself, and so does generator. Leave one of them out."
        raise ArgumentError(message)


@functools.cache
def say_once_that_there_are_no_processes() -> None:
    """Warn that ``multiprocessing_context`` has no effect, once in a process."""
    warnings.warn(
        "multiprocessing_context has no effect: aioload has no worker processes, and num_workers counts threads.",
        UserWarning,
        stacklevel=3,  # the line that makes the loader
    )
