"""Source: a dataset, seen through the protocol it follows."""

import enum
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.utils.data as torch_data

from aioload.datasets.tensors import TensorDataset
from aioload.errors import DatasetError
from aioload.layout import Layout, storage_of
from aioload.readers import read_file


class Kind(enum.Enum):
    """How samples come out of a dataset, the first that applies."""

    ITERABLE = "iterable"  # items in the dataset's own order
    ASYNC = "async"  # await dataset[index]
    STAGED = "staged"  # dataset.decode(read(dataset.location(index)), index)
    TAKE = "take"  # rows of tensors, gathered a batch at a time
    MANY = "many"  # dataset.__getitems__(indices), a batch at a time
    SINGLE = "single"  # dataset[index]


class Source:
    """What the engine asks of a dataset, whatever its kind. Any thread may call any method.

    Args:
        dataset: The user's dataset.
        batched: Whether the index stream yields lists of indices.
        by_rows: Whether samples may be written into rows (the default collation).
    """

    def __init__(self, dataset: Any, *, batched: bool, by_rows: bool) -> None:
        self.dataset = dataset
        self._indices: Sequence[Any] | None = None
        if type(dataset) is torch_data.Subset and not _is_method(dataset.dataset, "__getitems__"):
            # Its own __getitems__ would load a whole batch one sample after the other.
            self._indices, dataset = dataset.indices, dataset.dataset
        self._inner = dataset
        self.kind = _kind_of(dataset, batched=batched, by_rows=by_rows)
        self._stream: ItemStream | None = None
        if self.kind is Kind.TAKE:
            self._arrays = [storage_of(tensor) for tensor in dataset.tensors]
        elif self.kind is Kind.ITERABLE:
            self._stream = ItemStream(dataset)

    def location(self, index: Any) -> Any:
        """Return where the sample's bytes are."""
        return self._inner.location(self._translate(index))

    def locate(self, index: Any) -> Any:
        """Return where a sample is, for a message, or ``None`` if the dataset cannot tell."""
        try:
            return self.location(index)
        except Exception:
            return None

    def read(self, index: Any) -> bytes:
        """Return the bytes of a sample. Blocks."""
        return read_file(self.location(index))

    def decode(self, data: bytes, index: Any) -> Any:
        """Return the sample made from its bytes."""
        return self._inner.decode(data, self._translate(index))

    def fetch(self, index: Any) -> Any:
        """Return a sample, or an awaitable of it for an async dataset."""
        return self._inner[self._translate(index)]

    def fetch_many(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples of a batch from ``__getitems__``."""
        return list(self._inner.__getitems__([self._translate(index) for index in indices]))

    @property
    def stream(self) -> "ItemStream":
        """The items of an ITERABLE dataset."""
        assert self._stream is not None
        return self._stream

    def take_layout(self) -> Layout | None:
        """Return the layout of the samples of a TAKE dataset."""
        return Layout.of(self._inner[0])

    def take(self, indices: Sequence[Any], columns: Sequence[Any]) -> None:
        """Gather the rows ``indices`` of every array into ``columns``, one ``(n, *shape)`` array each.

        Raises:
            IndexError: An index is out of range.
        """
        wanted = np.array([self._translate(index) for index in indices] if self._indices is not None else indices)
        size = len(self._arrays[0])
        if wanted.dtype.kind not in "iu" or (wanted.size and (wanted.min() < -size or wanted.max() >= size)):
            bad = [index for index in indices if not -size <= index < size]
            message = f"Indices {bad[:8]!r} are out of range for a dataset of {size} samples."
            raise IndexError(message)
        if wanted.size and wanted.min() < 0:
            wanted = np.where(wanted < 0, wanted + size, wanted)
        for array, column in zip(self._arrays, columns, strict=True):
            # The bounds are checked above; mode="raise" would go through a buffer.
            np.take(array, wanted, axis=0, out=column, mode="clip")

    def _translate(self, index: Any) -> Any:
        return index if self._indices is None else self._indices[index]


class ItemStream:
    """The items of an iterable dataset, in order, over once.

    ``lock`` admits one thread at a time. Jobs leave a queue in order, but one thread may overtake another on the
    way to the lock: ``expected`` holds the batches, and who gets the lock serves the first of them.
    """

    def __init__(self, dataset: Any) -> None:
        self.lock = threading.Lock()
        self.expected: deque[Any] = deque()
        self.position = 0
        self._dataset = dataset
        self._items: Iterator[Any] | None = None
        self._ended = False
        self._error: BaseException | None = None

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` items, fewer before the end or before an error.

        Raises:
            StopIteration: There are no more items.
            BaseException: What the dataset raised, once the items before it have been returned.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        items: list[Any] = []
        while len(items) < count:
            try:
                items.append(self._next())
            except StopIteration:
                if not items:
                    raise
                break
            except BaseException as exc:
                if not items:
                    raise
                self._error = exc
                break
        self.position += len(items)
        return items

    def _next(self) -> Any:
        if self._ended:  # an exhausted iterator is not asked again
            raise StopIteration
        if self._items is None:
            self._items = iter(self._dataset)
        try:
            return next(self._items)
        except StopIteration:
            self._ended, self._items = True, None
            raise


def _kind_of(dataset: Any, *, batched: bool, by_rows: bool) -> Kind:
    if isinstance(dataset, torch_data.IterableDataset):
        return Kind.ITERABLE
    getitem = getattr(type(dataset), "__getitem__", None)
    if inspect.iscoroutinefunction(getitem):
        return Kind.ASYNC
    if _is_method(dataset, "location") and _is_method(dataset, "decode"):
        return Kind.STAGED
    if batched and by_rows and _can_take(dataset):
        return Kind.TAKE
    if batched and _is_method(dataset, "__getitems__"):
        return Kind.MANY
    if getitem is None:
        message = (
            f"A dataset needs __getitem__ (plain or async), location and decode, or to be an IterableDataset; "
            f"got {type(dataset).__name__}, which has none of them."
        )
        raise DatasetError(message)
    return Kind.SINGLE


def _is_method(dataset: Any, name: str) -> bool:
    return callable(getattr(dataset, name, None))


def _can_take(dataset: Any) -> bool:
    stock: Callable[..., Any]
    for cls in (TensorDataset, torch_data.TensorDataset):
        stock = cls.__getitem__
        if isinstance(dataset, cls) and type(dataset).__getitem__ is stock and len(dataset) > 0:
            layout = Layout.of(dataset[0])
            return layout is not None and all(tensor.is_contiguous() for tensor in dataset.tensors)
    return False
