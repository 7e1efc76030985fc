"""Arguments: whole numbers as the loader and the samplers take them, and what the loader refuses beyond torch."""

import functools
import operator
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


MAX_SAMPLES = 2**62
MAX_SEED = 2**64 - 1


def whole_number(name: str, value: object, minimum: int, maximum: int = MAX_SAMPLES) -> int:
    """Return ``value`` as an int, be it NumPy's or Python's.

    Raises:
        ArgumentError: It is no whole number, or not from ``minimum`` to ``maximum``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not minimum <= number <= maximum:
        limits = f"of at least {minimum}" if maximum == MAX_SAMPLES else f"from {minimum} to {maximum}"
        msg = f"{name} must be a whole number {limits}, got {value!r}"
        raise ArgumentError(msg)
    return number


def seed_number(value: object) -> int:
    """Return a seed: 64 bits, all of which count."""
    return whole_number("seed", value, 0, MAX_SEED)


def check_timeout(timeout: float, num_workers: int) -> None:
    """Refuse a timeout that nothing could keep.

    Raises:
        ArgumentError: There are no threads.
    """
    if num_workers == 0 and timeout > 0:
        message = f"timeout={timeout!r} needs num_workers > 0: without threads nothing can interrupt a sample."
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


def loader_seed(seed: Any, generator: torch.Generator | None) -> int | None:
    """Return the seed of a loader, ``None`` for none.

    Raises:
        ArgumentError: ``seed`` is no whole number of 64 bits, or there is a generator as well.
    """
    if seed is None:
        return None
    number = seed_number(seed)
    if generator is not None:
        message = f"seed={seed!r} fixes the order by itself, and so does generator. Leave one of them out."
        raise ArgumentError(message)
    return number


@functools.cache
def say_once_that_there_are_no_processes() -> None:
    """Warn that ``multiprocessing_context`` has no effect, once in a process."""
    warnings.warn(
        "multiprocessing_context has no effect: aioload has no worker processes, and num_workers counts threads.",
        UserWarning,
        stacklevel=3,  # the line that makes the loader
    )
