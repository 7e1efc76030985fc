"""FileDataset: a sample per file, made by a function of the file's bytes."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from aioload.datasets.base import Dataset, read_sample
from aioload.errors import ArgumentError

T_co = TypeVar("T_co", covariant=True)

FilePath: TypeAlias = str | os.PathLike[str]


class FileDataset(Dataset[T_co]):
    """A sample per file.

    It has two stages, so the loader keeps many reads waiting while few threads decode. It can be pickled when
    ``decode`` can.

    Args:
        paths: The files, in the order of their indices. It is kept, not copied.
        decode: ``decode(data, index)`` makes the sample from the file's ``bytes`` and the index as it was
            asked for. It runs on several threads at once.

    Raises:
        ArgumentError: ``paths`` is one path or no sequence, or ``decode`` cannot be called.
    """

    def __init__(self, paths: Sequence[FilePath], decode: Callable[[bytes, Any], T_co]) -> None:
        _check_arguments(paths, decode)
        self.paths = paths
        self._decode = decode

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def __getitem__(self, index: int) -> T_co:
        """Read and decode file ``index`` on the calling thread; an error carries a note with the path."""
        return read_sample(self, index)

    def location(self, index: int) -> FilePath:
        """Return the path of file ``index``; negative indices count from the end."""
        return self.paths[index]

    def decode(self, data: bytes, index: int) -> T_co:
        """Return the sample made from the file's bytes."""
        return self._decode(data, index)


def _check_arguments(paths: object, decode: object) -> None:
    if isinstance(paths, str | bytes | os.PathLike):
        msg = f"paths must be a sequence of paths, got one path, {paths!r}; write [{paths!r}] for one file"
        raise ArgumentError(msg)
    if isinstance(paths, Mapping) or not (hasattr(paths, "__getitem__") and hasattr(paths, "__len__")):
        msg = f"paths must be a sequence of paths, got {type(paths).__name__}; make it a list first"
        raise ArgumentError(msg)
    if not callable(decode):
        msg = f"decode must be a function of (data, index), got {decode!r}"
        raise ArgumentError(msg)
