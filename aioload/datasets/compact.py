"""Compact: the long lists of a dataset, as a few arrays, of which processes need but one copy between them.

A million paths are as many objects: 120 MB, twice that with class indices, in each process. As one text with the places
where each ends they are 70 MB, once for all. An item is made when it is asked for, which takes about a microsecond.

Shorter lists save little memory, but time: a process that has to make 20,000 objects before it reads begins 5 ms
later. They travel in the same way, and are made as a whole when so many items have been asked for that it pays. So are
all where code of the user's writes to them.
"""

import itertools
import operator
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from aioload.datasets.files import FileDataset
from aioload.datasets.images import ImageFolder

_LEAST = 10_000
"""Shorter lists stay lists."""

_LEAST_SHARED = 100_000
"""Shorter ones become lists again: 12 MB at most, of which an item takes no microsecond."""

_PART_ASKED = 8
"""They do so when one item in so many has been asked for."""

_CODEC = "utf-8", "surrogatepass"  # the names of files may be no text that UTF-8 knows

T = TypeVar("T")


class _Compact(MutableSequence[T], Generic[T]):
    """What a list is to those who read it, and, at the price of one, to those who write to it."""

    __slots__ = ("_made", "_num_left", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: list[list[T]] = []
        """The list, once it has been made. Threads may make several at once: the first counts, which may be changed."""
        self._num_left = size // _PART_ASKED if size < _LEAST_SHARED else None
        """How many are asked for before they are all made, ``None`` for no end."""

    def __len__(self) -> int:
        """Return how many items there are."""
        made = self._made
        return len(made[0]) if made else self._size

    def _item(self, index: int) -> T:
        raise NotImplementedError

    def _all(self) -> list[T]:
        raise NotImplementedError

    def _list(self) -> list[T]:
        made = self._made
        if not made:
            made.append(self._all())
        return made[0]

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return an item, or a list of some. Any thread."""
        made = self._made
        if made:
            return made[0][index]
        if self._num_left is not None:  # threads may miscount: it need not be exact
            self._num_left -= 1
            if self._num_left < 0:
                return self._list()[index]
        size = self._size
        if type(index) is int and 0 <= index < size:
            return self._item(index)
        if isinstance(index, slice):
            return [self._item(each) for each in range(*index.indices(size))]
        index = operator.index(index)
        if not -size <= index < size:
            message = f"index {index} of {size} items"
            raise IndexError(message)
        return self._item(index if index >= 0 else index + size)

    def __eq__(self, other: object) -> bool:
        """Return whether the items are those of another such sequence, or of a list."""
        if not isinstance(other, _Compact | list):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} items>"

    def __setitem__(self, index: Any, value: Any) -> None:
        self._list()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._list()[index]

    def insert(self, index: int, value: T) -> None:
        """Put an item in front of another one."""
        self._list().insert(index, value)

    def sort(self, **arguments: Any) -> None:
        """Sort the items, as a list does."""
        self._list().sort(**arguments)

    def copy(self) -> list[T]:
        """Return a list of the items."""
        return self._list().copy()

    def __add__(self, other: Any) -> list[T]:
        return self._list() + list(other) if isinstance(other, _Compact | list) else NotImplemented

    def __radd__(self, other: Any) -> list[T]:
        return [*other, *self._list()] if isinstance(other, list) else NotImplemented

    def __mul__(self, times: int) -> list[T]:
        return self._list() * times

    __rmul__ = __mul__


class Texts(_Compact[str]):
    """Texts, one behind the other.

    Args:
        data: Their bytes, uint8.
        bounds: Where each of them begins and the one before it ends, int64; one more than there are texts.
    """

    __slots__ = ("_arrays", "_bounds", "_data")

    def __init__(self, data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
        super().__init__(len(bounds) - 1)
        self._arrays = data, bounds
        self._data, self._bounds = data.data, bounds.data  # whose items are had in a fraction of the time

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Texts":
        """Return what has the same items as ``texts``."""
        whole = "".join(texts)
        sizes: Iterable[int] = map(len, texts if whole.isascii() else (text.encode(*_CODEC) for text in texts))
        bounds = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(sizes, np.int64, len(texts)), out=bounds[1:])
        return cls(np.frombuffer(whole.encode(*_CODEC), np.uint8), bounds)

    def __reduce__(self) -> Any:
        return (list, (self._list(),)) if self._made else (Texts, self._arrays)

    def _item(self, index: int) -> str:
        bounds = self._bounds
        return str(self._data[bounds[index] : bounds[index + 1]], *_CODEC)

    def _all(self) -> list[str]:
        whole = str(self._data, *_CODEC)
        if not whole.isascii():
            return [self._item(index) for index in range(self._size)]
        return [whole[start:end] for start, end in itertools.pairwise(self._bounds.tolist())]


class Labelled(_Compact[tuple[str, int]]):
    """Texts, each with a number.

    Args:
        texts: The texts.
        labels: The numbers, int64.
    """

    __slots__ = ("_array", "_labels", "_texts")

    def __init__(self, texts: Texts, labels: NDArray[np.int64]) -> None:
        super().__init__(len(labels))
        self._texts, self._array = texts, labels
        self._labels = labels.data

    def __reduce__(self) -> Any:
        return (list, (self._list(),)) if self._made else (Labelled, (self._texts, self._array))

    def _item(self, index: int) -> tuple[str, int]:
        return self._texts._item(index), self._labels[index]  # noqa: SLF001  # it is a part of this

    def _all(self) -> list[tuple[str, int]]:
        return list(zip(self._texts._all(), self._labels.tolist(), strict=True))  # noqa: SLF001


_LISTS: Sequence[tuple[type[Any], str]] = ((FileDataset, "paths"), (ImageFolder, "samples"))
"""Attributes of ours that are read and not written to, and may be long."""


def reduce_compact(dataset: Any, protocol: int) -> Any:
    """Return how a dataset is pickled with its long list compact; ``None`` if it has none that could be."""
    name = next((name for kind, name in _LISTS if isinstance(dataset, kind)), None)
    if name is None:
        return None
    reduced = dataset.__reduce_ex__(protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or type(reduced[2]) is not dict:  # it has a way of its own
        return reduced
    compact = compact_of(reduced[2].get(name))
    return reduced if compact is None else (*reduced[:2], {**reduced[2], name: compact}, *reduced[3:])


def compact_of(items: Any) -> Texts | Labelled | None:
    """Return what has the same items as a long list of texts, or of texts with numbers; ``None`` for anything else."""
    if type(items) is not list or len(items) < _LEAST:
        return None
    if set(map(type, items)) == {str}:
        return Texts.of(items)
    if set(map(type, items)) != {tuple} or set(map(len, items)) != {2}:
        return None
    texts, labels = zip(*items, strict=True)
    if set(map(type, texts)) != {str} or set(map(type, labels)) != {int} or max(map(abs, labels)) >= 1 << 63:
        return None
    return Labelled(Texts.of(texts), np.array(labels, np.int64))
