"""Paths: a list of strings as it travels to another process, where each becomes a string when it is asked for.

To make 20,000 strings takes a new process some 5 ms, for the most part in page faults; to get hold of one text, none.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_BITS = 6
"""Strings are made 64 at once, in 4 us, and kept: so one costs 0.1 us more than in a list, in whatever order."""

_BLOCK, _MASK = 1 << _BITS, (1 << _BITS) - 1

_SEPARATOR = "\0"
_ENCODING = "utf-8", "surrogatepass"  # as names of files may have them


class Paths(Sequence[str]):
    """Strings in one text. Any thread may call any method.

    Args:
        text: All of them in UTF-8, each followed by a zero.
        starts: Where each block of 64 begins, and where the last one ends.
        length: How many there are.
    """

    def __init__(self, text: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> None:
        self._text, self._starts, self._length = text, starts, length
        self._blocks: list[list[str] | None] = [None] * (len(starts) - 1)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: Any) -> Any:
        """Return one of them, or a list of those in a slice."""
        try:
            if index >= 0:
                return self._blocks[index >> _BITS][index & _MASK]
        except (TypeError, IndexError):  # a block that is not there yet, a slice, or none of them
            pass
        return self._made(index)

    def __repr__(self) -> str:
        return f"<{self._length} paths>"

    def __reduce__(self) -> Any:
        return Paths, (self._text, self._starts, self._length)

    def _made(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._length))]
        index = range(self._length)[index]
        which = index >> _BITS
        start, stop = self._starts[which : which + 2]
        # Two threads may do so at once: it is the same.
        block = self._blocks[which] = self._text[start:stop].tobytes().decode(*_ENCODING).split(_SEPARATOR)[:-1]
        return block[index & _MASK]


def packed(paths: Sequence[Any]) -> Sequence[Any]:
    """Return a list of strings as :class:`Paths`; whatever else it is, as it is."""
    if type(paths) is not list or set(map(type, paths)) != {str}:
        return paths
    text = np.frombuffer((_SEPARATOR.join(paths) + _SEPARATOR).encode(*_ENCODING), np.uint8)
    ends = np.flatnonzero(text == 0) + 1
    if len(ends) != len(paths):  # there is a zero in one of them
        return paths
    starts = np.concatenate(([0], ends[_BLOCK - 1 : -1 : _BLOCK], ends[-1:]))
    return Paths(text, starts, len(paths))
