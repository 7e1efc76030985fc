"""Source: a dataset, seen through the protocol it follows."""

import enum
import functools
from collections.abc import Awaitable, Callable, Sequence
from types import CoroutineType
from typing import Any, Literal

import numpy as np
import torch.utils.data as torch_data

from aioload.cache import Cache
from aioload.context import HERE, PassContext, Stage
from aioload.datasets.tensors import TensorDataset
from aioload.engine.indices import IndexStream
from aioload.engine.items import Items
from aioload.engine.pace import Pace
from aioload.engine.position import Position
from aioload.engine.protocol import can_locate, gives_many, has_method, is_awaited, is_staged, is_stock
from aioload.engine.resume import Record
from aioload.engine.timely import TimelyReads
from aioload.errors import DatasetError, is_interrupt
from aioload.layout import Layout
from aioload.leaf import storage_of
from aioload.readers import LocalReader, Reader, ReadPolicy, SchemeReader, is_async, num_bytes, read_file
from aioload.readers.cached import CachedReads
from aioload.readers.local import UNASKED_BYTES, Admit
from aioload.stats import Tally

_BUFFER_BELOW_BYTES = 1 << 20


class Kind(enum.Enum):
    """How samples come out of a dataset, the first that applies."""

    ITERABLE = "iterable"  # items in the dataset's own order
    ASYNC = "async"  # await dataset[index]
    STAGED = "staged"  # dataset.decode(read(dataset.location(index)), index)
    AWAITED = "awaited"  # dataset.decode(await read(dataset.location(index)), index)
    TAKE = "take"  # rows of tensors, gathered a batch at a time
    MANY = "many"  # dataset.__getitems__(indices), a batch at a time
    SINGLE = "single"  # dataset[index]


class Source:
    """What the engine asks of a dataset, whatever its kind. Any thread may call any method.

    Args:
        context: The user's dataset, and what its code is told of the pass.
        batched: Whether the index stream yields lists of indices.
        by_rows: Whether samples may be written into rows (the default collation).
        reader: What reads for a STAGED or AWAITED dataset; ``None`` is for ``default_reader``.
        default_reader: What reads then what is no path.
        read_policy: What is done about reads that fail.
        cache: What a STAGED or AWAITED dataset's bytes are looked for in before they are read.
        tally: Where its hits are counted.
        items: What comes out of an ITERABLE dataset.
        kind: The kind of dataset, where it is known: to find it out takes a new process a millisecond.
    """

    def __init__(
        self,
        context: PassContext,
        *,
        batched: bool,
        by_rows: bool,
        reader: Reader | None,
        default_reader: SchemeReader,
        read_policy: ReadPolicy,
        cache: Cache | None,
        tally: Tally,
        items: Items | None = None,
        kind: Kind | None = None,
    ) -> None:
        self.context, dataset = context, context.dataset
        self.read_policy = read_policy
        self.samples = _without_subsets(dataset, batched=batched)
        """What ``[index]``, ``location`` and ``decode`` are asked of."""
        self.kind = kind or _kind_of(self.samples, reader, batched=batched, by_rows=by_rows)
        self.read: Callable[[Any], Any] = read_file if reader is not None else default_reader.beside(read_file)
        """Returns what is at a location; for an AWAITED dataset, an awaitable of it."""
        self.size_of: Callable[[Any], int] = len
        """Returns the bytes of what was read, or says that it has none."""
        if reader is not None and type(reader) is not LocalReader:
            self.read, self.size_of = reader.read, functools.partial(num_bytes, reader=reader)
        self._beside = None if reader is not None or cache is not None else default_reader.beside
        self.cached: CachedReads | None = None
        """What comes before ``read``, if anything, where a read is not to be timed with it."""
        if cache is not None:
            self.cached, self.size_of = CachedReads(cache, self.read, self.size_of, tally), len
            if self.kind is not Kind.AWAITED and not read_policy.is_watched:
                self.read, self.cached = self.cached.read, None
        self._has_location = self.kind is not Kind.ITERABLE and can_locate(self.samples)
        self._items = items
        if self.kind is Kind.TAKE:
            self._arrays = [storage_of(tensor) for tensor in dataset.tensors]

    def record(self, stream: IndexStream, num_yielded: int) -> Record:
        """Return the record of a pass that begins, of which the consumer has had ``num_yielded`` batches before."""
        if self._items is None:
            return Record(stream, Position([stream.progress], num_yielded))
        position = Position(self._items.progress, num_yielded, self._items.latest_lane)
        return Record(stream, position, [lane.start for lane in self._items.lanes])

    def locate(self, index: Any) -> Any:
        """Return where a sample is, for a message, or ``None`` if the dataset cannot tell."""
        if not self._has_location:
            return None
        before = HERE.get()
        worker = None if before is None else before[3]
        HERE.set([self.context, index, Stage.LOCATION, worker, None])  # a path drawn at random is the same again
        try:
            return self.samples.location(index)
        except BaseException as exc:
            if is_interrupt(exc):
                raise
            return None
        finally:
            HERE.set(before)

    def asking(self, read_url: Callable[[Any, Admit], Any], unasked_bytes: int) -> Callable[[Any, Admit], Any] | None:
        """Return what reads from a location and asks for the room, ``None`` if it cannot know the size of anything.

        Args:
            read_url: Reads what is no path. It has to ask by itself.
            unasked_bytes: What is read of a file without asking.
        """
        read_path: Callable[..., bytes] = read_file
        if unasked_bytes < UNASKED_BYTES:
            read_path = functools.partial(read_file, unasked_bytes=unasked_bytes)
        if self.read is read_file:
            return read_path
        return None if self._beside is None else self._beside(read_path, read_url)

    def read_patiently(self, location: Any, pause: Callable[[float], bool]) -> Any:
        """Return what is at the ``location`` of a STAGED dataset, with a ``pause`` before each further try. Blocks."""
        data = None if self.cached is None else self.cached.look(location)
        if data is not None:
            return data
        try:
            data = self.read(location)
        except Exception as exc:
            data = self.read_policy.try_again(functools.partial(self.read, location), exc, pause)
        return data if self.cached is None else self.cached.keep(location, data)

    def patient(self, pace: Pace, tally: Tally) -> Callable[[Any], Awaitable[Any]]:
        """Return what awaits what is at a location of an AWAITED dataset, in as many tries as the policy has.

        Args:
            pace: What the loader's reads have shown.
            tally: Where further tries are counted.
        """
        policy, read, cached = self.read_policy, self.read, self.cached
        if policy.is_watched:
            read = TimelyReads(read, policy, pace, tally).read

        async def read_patiently(location: Any) -> Any:
            try:
                return await read(location)
            except Exception as exc:
                return await policy.try_again_async(functools.partial(read, location), exc, tally)

        if cached is None:
            return read_patiently

        async def read_if_need_be(location: Any) -> Any:
            data = await cached.look_async(location)
            return await cached.keep_async(location, await read_patiently(location)) if data is None else data

        return read_if_need_be

    def fetch_many(self, indices: Sequence[Any]) -> Any:
        """Return what ``__getitems__`` gives for a batch: a list of samples, or whatever ``collate_fn`` takes."""
        samples = self.samples.__getitems__(indices)
        if type(samples) is CoroutineType:
            refuse_coroutine(samples, self.samples, "__getitems__")
        return samples

    @property
    def has_single(self) -> bool:
        """Whether samples can be had one by one."""
        return hasattr(type(self.samples), "__getitem__")

    @property
    def items(self) -> Items:
        """What comes out of an ITERABLE dataset."""
        assert self._items is not None
        return self._items

    def take_layout(self) -> Layout | None:
        """Return the layout of the samples of a TAKE dataset."""
        return Layout.of(self.samples[0])

    def take(self, indices: Sequence[Any], columns: Sequence[Any]) -> bool:
        """Gather the rows ``indices`` of every array into ``columns``, one ``(n, *shape)`` array each.

        Returns:
            Whether they are row numbers. What else tensors can be indexed with is for ``samples[index]``.

        Raises:
            IndexError: An index is out of range.
        """
        try:
            wanted = np.array(indices)
        except ValueError:  # lists of different lengths
            return False
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            return False
        size = len(self._arrays[0])
        mode: Literal["raise", "clip"] = "raise"  # checks the bounds, but goes through a buffer
        if sum(column.nbytes for column in columns) > _BUFFER_BELOW_BYTES:
            if wanted.min() < -size or wanted.max() >= size:
                bad = [index for index in indices if not -size <= index < size]
                message = f"Indices {bad[:8]!r} are out of range for a dataset of {size} samples."
                raise IndexError(message)
            wanted, mode = np.where(wanted < 0, wanted + size, wanted), "clip"
        for array, column in zip(self._arrays, columns, strict=True):
            array.take(wanted, 0, column, mode)  # np.take(array, ...) costs 5 us more
        return True


class _Subset:
    """``torch.utils.data.Subset``, nested or not, seen as the dataset it is taken from.

    Its own ``__getitems__`` would load a whole batch one sample after the other, and hide the stages.
    """

    def __init__(self, dataset: Any, index_maps: Sequence[Sequence[Any]], *, batched: bool) -> None:
        self.dataset, self._index_maps = dataset, index_maps
        there = {"location": can_locate(dataset), "decode": is_staged(dataset, batched=batched)}
        for name in there:
            if not there[name]:
                setattr(self, name, None)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self._translate(index)]

    def location(self, index: Any) -> Any:
        return self.dataset.location(self._translate(index))

    def decode(self, data: bytes, index: Any) -> Any:
        return self.dataset.decode(data, self._translate(index))

    def _translate(self, index: Any) -> Any:
        for index_map in self._index_maps:
            index = [index_map[each] for each in index] if isinstance(index, list) else index_map[index]
        return index


class _AsyncSubset(_Subset):
    async def __getitem__(self, index: Any) -> Any:
        return await self.dataset[self._translate(index)]


def _without_subsets(dataset: Any, *, batched: bool) -> Any:
    inner, index_maps = dataset, []
    while is_stock(inner, torch_data.Subset):
        index_maps.append(inner.indices)
        inner = inner.dataset
    if not index_maps or gives_many(inner, batched=batched):
        return dataset
    return (_AsyncSubset if is_awaited(inner) else _Subset)(inner, index_maps, batched=batched)


def refuse_coroutine(sample: Any, dataset: Any, method: str) -> None:
    """Raise :class:`~aioload.errors.DatasetError` because ``method`` returned the coroutine ``sample``."""
    sample.close()
    owner = dataset.dataset if isinstance(dataset, _Subset) else dataset
    message = f"{type(owner).__name__}.{method} returned a coroutine"
    if method == "__getitem__":
        message += (
            " but is not declared 'async def'. "
            "Declare it so (a wrapper that hides it must be 'async def' too), and the loader awaits it."
        )
    else:
        message += ", but of a dataset's methods the loader awaits __getitem__ alone. Declare it with a plain 'def'."
    raise DatasetError(message)


def kind_of(dataset: Any, reader: Reader | None, *, batched: bool, by_rows: bool) -> Kind:
    """Return how samples will come out of ``dataset``, read by ``reader`` where they have to be read."""
    return _kind_of(_without_subsets(dataset, batched=batched), reader, batched=batched, by_rows=by_rows)


def _kind_of(dataset: Any, reader: Reader | None, *, batched: bool, by_rows: bool) -> Kind:
    if isinstance(dataset, torch_data.IterableDataset):
        return Kind.ITERABLE
    if is_awaited(dataset):
        return Kind.ASYNC
    if is_staged(dataset, batched=batched):
        return Kind.AWAITED if reader is not None and is_async(reader) else Kind.STAGED
    if batched and by_rows and _can_take(dataset):
        return Kind.TAKE
    if gives_many(dataset, batched=batched):
        return Kind.MANY
    if not hasattr(type(dataset), "__getitem__"):
        message = (
            f"A dataset needs __getitem__ (plain or async), location and decode, or to be an IterableDataset; "
            f"got {type(dataset).__name__}, which has none of them."
        )
        raise DatasetError(message)
    return Kind.SINGLE


def _can_take(dataset: Any) -> bool:
    stock: Callable[..., Any]
    if has_method(dataset, "__getitems__"):
        return False
    for cls in (TensorDataset, torch_data.TensorDataset):
        stock = cls.__getitem__
        if isinstance(dataset, cls) and type(dataset).__getitem__ is stock and len(dataset) > 0:
            layout = Layout.of(dataset[0])
            return layout is not None and all(tensor.is_contiguous() for tensor in dataset.tensors)
    return False
