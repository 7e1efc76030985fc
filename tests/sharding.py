"""Sharding: iterable datasets of the numbers from 0, of which each worker yields a part."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils.data

SIZE = 12


class Sharded(torch.utils.data.IterableDataset[int]):
    """Shards itself, as in torch's documentation."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        if info is None:
            return iter(range(SIZE))
        return iter(range(info.id, SIZE, info.num_workers))


class Cut(torch.utils.data.IterableDataset[int]):
    """Is cut down to the worker's part by :func:`cut`."""

    def __init__(self) -> None:
        self.numbers = range(SIZE)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def cut(_: int) -> None:
    """Cut the dataset down to the worker's part, as in torch's documentation."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.numbers = dataset.numbers[info.id :: info.num_workers]


class Shards(torch.utils.data.IterableDataset[int]):
    """The worker ``i`` yields ``sizes[i]`` numbers, from ``100 * i`` on, and raises where ``errors`` has one."""

    def __init__(self, sizes: Sequence[int], errors: dict[int, BaseException] | None = None) -> None:
        self.sizes, self.errors = sizes, errors or {}

    def __deepcopy__(self, _: Any) -> "Shards":
        return type(self)(self.sizes, self.errors)  # the very errors

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        number = 0 if info is None else info.id
        return map(self.make, range(100 * number, 100 * number + self.sizes[number]))

    def make(self, number: int) -> int:
        if number in self.errors:
            raise self.errors[number]
        return number


class Stateful(Shards):
    """Is its own iterator: its place is an attribute."""

    def __iter__(self) -> Iterator[int]:
        self.items = super().__iter__()
        return self

    def __next__(self) -> int:
        return next(self.items)
