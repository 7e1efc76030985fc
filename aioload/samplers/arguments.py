"""Arguments: what a sampler may be given, checked once, where it is made."""

import hashlib
import operator
from collections.abc import Sized
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from aioload.errors import ArgumentError

Column: TypeAlias = ArrayLike | torch.Tensor
"""One value per sample: a sequence, an array or a tensor."""

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


def flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        msg = f"{name} must be True or False, got {value!r}"
        raise ArgumentError(msg)
    return value


def size_of(data_source: int | Sized) -> int:
    """Return the number of samples: that of something with a length, or the number itself."""
    try:
        return whole_number("data_source", len(data_source) if isinstance(data_source, Sized) else data_source, 0)
    except (ArgumentError, TypeError) as error:  # TypeError: an array without dimensions
        msg = f"data_source must be a number of samples or have a length, got {data_source!r}"
        raise ArgumentError(msg) from error


def column(name: str, values: Column) -> NDArray[Any]:
    """Return one value per sample as an array, which may be the memory given.

    Raises:
        ArgumentError: It has not exactly one dimension, or is a tensor of a dtype that NumPy does not have.
    """
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        msg = f"{name} must have one value per sample, in a dtype that NumPy knows: {error}"
        raise ArgumentError(msg) from error
    if array.ndim != 1:
        msg = f"{name} must have one value per sample, so one dimension, got shape {array.shape}"
        raise ArgumentError(msg)
    return array


def digest(array: NDArray[Any]) -> str:
    """Return a short hash of an array of numbers, the same on every platform."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.blake2b(little.data, digest_size=8).hexdigest()
