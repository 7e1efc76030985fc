"""Arguments: what a sampler may be given, checked once, where it is made."""

import hashlib
from collections.abc import Sized
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from aioload.arguments import whole_number
from aioload.errors import ArgumentError

Column: TypeAlias = ArrayLike | torch.Tensor
"""One value per sample: a sequence, an array or a tensor."""


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
