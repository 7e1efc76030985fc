"""Arguments: whole numbers as the loader and the samplers take them, and what the loader refuses beyond torch."""

import functools
import operator
import os
import sys
import warnings
from typing import Any, Literal

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


def reads_number(value: object) -> int | Literal["auto"]:
    """Return how many reads may be under way, ``"auto"`` for as many as are found to be best.

    Raises:
        ArgumentError: It is neither that nor a whole number from 1 up.
    """
    if isinstance(value, str) and value == "auto":
        return "auto"
    try:
        return whole_number("num_concurrent_reads", value, 1)
    except ArgumentError:
        msg = f'num_concurrent_reads must be "auto" or a whole number of at least 1, got {value!r}'
        raise ArgumentError(msg) from None


def check_on_error(on_error: Any, max_errors: Any, dataset: Any) -> None:
    """Refuse what is no way to deal with errors, or cannot be had for this dataset.

    Raises:
        ArgumentError: One of them has another form, or needs what the dataset lacks.
    """
    if on_error not in ("raise", "skip", "replace") and not callable(on_error):
        message = (
            "on_error must be 'raise', 'skip', 'replace' or a function that takes the exception and returns a sample; "
            f"got {on_error!r}."
        )
        raise ArgumentError(message)
    if on_error != "raise" and isinstance(dataset, torch_data.IterableDataset):
        message = (
            f"on_error={on_error!r} is for datasets that are asked by index; an iterator that has raised, as "
            f"{type(dataset).__name__}'s may, cannot be asked for the next item. Deal with errors in its __iter__."
        )
        raise ArgumentError(message)
    if max_errors is None:
        return
    if on_error == "raise":
        message = (
            f"max_errors={max_errors!r} needs on_error='skip', 'replace' or a function: else the first one is raised."
        )
        raise ArgumentError(message)
    if not isinstance(max_errors, float):
        whole_number("max_errors", max_errors, 0)
    elif not 0 <= max_errors < 1 or not hasattr(type(dataset), "__len__"):
        message = (
            "max_errors must be a whole number, or a float from 0 to below 1, which is a share of len(dataset); "
            f"got {max_errors!r} for {type(dataset).__name__}."
        )
        raise ArgumentError(message)


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


def check_processes(processes: int, num_workers: int, dataset: Any) -> None:
    """Refuse processes that have nothing to work with, or that this system cannot have.

    Raises:
        ArgumentError: There are no threads for them, or no such sockets.
    """
    if processes > 0 and num_workers == 0:
        message = f"processes={processes} needs num_workers > 0, which counts their threads, all together."
        raise ArgumentError(message)
    if 0 <= num_workers < processes and not isinstance(dataset, torch_data.IterableDataset):  # that is for one process
        message = (
            f"processes={processes} needs a num_workers of at least as many, which counts their threads, all together, "
            f"not {num_workers}. Ask for fewer processes, or for more threads."
        )
        raise ArgumentError(message)
    if processes > 0 and sys.platform != "linux":
        message = f"processes={processes} needs Linux; this is {sys.platform!r}. Leave processes out."
        raise ArgumentError(message)


def check_prefetch_factor(prefetch_factor: Any, num_workers: int) -> None:
    """Refuse to load nothing ahead, as torch does once a pass begins.

    Raises:
        ArgumentError: There are threads, and nothing for them to do.
    """
    if num_workers > 0 and prefetch_factor == 0:
        message = f"prefetch_factor must be at least 1 where num_workers is {num_workers}, got {prefetch_factor!r}."
        raise ArgumentError(message)


def warn_of_pinning(pin_memory: Any, pin_memory_device: str) -> None:
    """Warn that ``pin_memory`` or ``pin_memory_device`` have no effect, in torch's words, which filters may go by."""
    if not pin_memory:
        return
    if pin_memory_device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{pin_memory_device}'.",
            UserWarning,
            stacklevel=4,  # the line of the loop
        )
    why = _why_not_pinned()
    if why is not None:
        warnings.warn(
            f"'pin_memory' argument is set as true but {why}device pinned memory won't be used.",
            UserWarning,
            stacklevel=4,
        )


def _why_not_pinned() -> str | None:
    if not torch.accelerator.is_available():
        return "no accelerator is found, then "
    accelerator = torch.accelerator.current_accelerator()
    return "not supported on MPS now, " if accelerator is not None and accelerator.type == "mps" else None


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


def check_device_transform(device_transform: Any, device: Any) -> None:
    """Refuse a transform that cannot be called, or that has no device to run on.

    Raises:
        ArgumentError: It is no function, or batches stay on the CPU.
    """
    if device_transform is None:
        return
    if not callable(device_transform):
        message = f"device_transform must be a function of a batch that returns one; got {device_transform!r}."
        raise ArgumentError(message)
    if isinstance(device, torch.device) and device.type == "cpu":
        message = (
            f"device_transform={device_transform!r} needs a device other than the CPU, such as device='cuda'. "
            "On the CPU, use the dataset's transform or collate_fn."
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
        "multiprocessing_context has no effect without processes=, and num_workers counts threads.",
        UserWarning,
        stacklevel=3,  # the line that makes the loader
    )
