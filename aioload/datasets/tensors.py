"""TensorDataset: samples that lie in memory, one row of each tensor or array."""

import mmap
from typing import Any

import numpy as np
import torch

from aioload.datasets.base import Dataset
from aioload.errors import ArgumentError


class TensorDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Rows of tensors and NumPy arrays, which may be mixed.

    Memory is shared: ``ds[i]`` holds views of the tensors and arrays given, as with
    ``torch.utils.data.TensorDataset``. A tensor cannot be read-only, nor hold a foreign byte order, negative
    strides or strides that cut through elements, so an array that has one of these is copied, once, here. A
    read-only memory map is refused instead, since the copy would load the whole file.

    Args:
        tensors: Tensors or arrays of the same first dimension, that is the number of samples.

    Attributes:
        tensors: The tensors, in the order given; arrays have become tensors.

    Raises:
        ArgumentError: There is nothing to hold; something is no array or tensor, has no dimension or a dtype
            that PyTorch does not know; first dimensions differ; or a memory map is read-only.
    """

    def __init__(self, *tensors: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if not tensors:
            msg = "TensorDataset needs at least one tensor or array, got none"
            raise ArgumentError(msg)
        self.tensors = tuple(_as_tensor(value, position) for position, value in enumerate(tensors))
        sizes = [tensor.shape[0] for tensor in self.tensors]
        if len(set(sizes)) > 1:
            found = ", ".join(f"{size} at position {position}" for position, size in enumerate(sizes))
            msg = f"TensorDataset needs tensors of the same first dimension, got {found}"
            raise ArgumentError(msg)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.tensors[0].shape[0])

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, ...]:
        """Return row ``index`` of every tensor, as views of the dataset's memory."""
        return tuple(tensor[index] for tensor in self.tensors)


def _as_tensor(value: object, position: int) -> torch.Tensor:
    """Return ``value`` as a tensor that may be written to; the same memory where that is possible."""
    if not isinstance(value, torch.Tensor | np.ndarray):
        msg = f"TensorDataset needs tensors or arrays, got {type(value).__name__} at position {position}"
        raise ArgumentError(msg)
    if value.ndim == 0:
        msg = f"TensorDataset needs a first dimension to index, got a scalar at position {position}"
        raise ArgumentError(msg)
    if isinstance(value, torch.Tensor):
        return value
    if not value.flags.writeable and _is_mapped(value):
        msg = (
            f"TensorDataset cannot share a read-only memory map ({value.nbytes} bytes, position {position}); "
            "open it with mode 'c' (copy-on-write: nothing is loaded, the file stays as it is), or load it "
            "with numpy.array"
        )
        raise ArgumentError(msg)
    try:
        return torch.from_numpy(value if _is_shareable(value) else _native_copy(value))
    except TypeError as error:
        msg = f"TensorDataset cannot hold an array of dtype {value.dtype} (position {position}): {error}"
        raise ArgumentError(msg) from error


def _is_shareable(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether a tensor can stand for this memory as it is."""
    whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return array.flags.writeable and array.dtype.isnative and whole


def _native_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether the array's memory is a file's."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)
