"""Lengths: ``len(loader)`` is the number of batches that come, of each epoch and on each rank."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from sharding import Sharded
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioload import (
    BucketBatchSampler,
    DataLoader,
    InfiniteSampler,
    ShardedSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    WeightedSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This pass has the same order:UserWarning")  # of DistributedSampler


class Items(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


Make = Callable[[int], Any]
SAMPLERS: dict[str, Make] = {
    "none": lambda size: None,
    "list": lambda size: [0] * (size + 1),
    "sequential": lambda size: SequentialSampler(range(size)),
    "random": lambda size: RandomSampler(range(size)),
    "random twice": lambda size: RandomSampler(range(size), num_samples=2 * size + 1),
    "with replacement": lambda size: RandomSampler(range(size), replacement=True, num_samples=size + 2),
    "subset": lambda size: SubsetRandomSampler(range(0, size, 2)),
    "weighted": lambda size: WeightedRandomSampler([1.0] * size, size + 1),
    "distributed": lambda size: distributed(size, 0),
    "shuffle": ShuffleSampler,
    "weighted, ours": lambda size: WeightedSampler([1.0] * size, size + 1),
    "sharded": lambda size: ShardedSampler(ShuffleSampler(size), 1, 2, uneven="drop"),
    "infinite": lambda size: InfiniteSampler(size, batch_size=3, num_batches=4),
}
BATCH_SAMPLERS: dict[str, Make] = {
    "list of batches": lambda size: [[0]] * size,
    "batches": lambda size: BatchSampler(RandomSampler(range(size)), 3, drop_last=False),
    "whole batches": lambda size: BatchSampler(RandomSampler(range(size)), 3, drop_last=True),
    "bucket": lambda size: BucketBatchSampler(list(range(size)), 3),
    "stratified": lambda size: StratifiedBatchSampler([index % 2 for index in range(size)], 2),
    "sharded": lambda size: ShardedSampler(BatchSampler(range(size), 2, drop_last=False), 0, 2),
}


def distributed(size: int, rank: int, **arguments: Any) -> Any:
    return DistributedSampler(range(size), num_replicas=2, rank=rank, **arguments)  # type: ignore[arg-type]


def assert_true(loader: Any) -> None:
    """Compare lengths with what comes, and with what torch's loader says of the same sampler."""
    with loader:
        for _ in range(2):
            batches = iter(loader)
            said = len(loader), len(batches)
            assert said == (sum(1 for _ in batches),) * 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_of_a_sampler(name: str, num_workers: int) -> None:
    for size, batch_size, drop_last in itertools.product((1, 5, 12), (None, 1, 3, 13), (False, True)):
        if batch_size is None and drop_last:
            continue
        arguments = {"batch_size": batch_size, "drop_last": drop_last, "sampler": SAMPLERS[name](size)}
        assert_true(DataLoader(range(size), num_workers=num_workers, **arguments))
        assert len(DataLoader(range(size), **arguments)) == len(torch.utils.data.DataLoader(range(size), **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_of_a_batch_sampler(name: str, num_workers: int) -> None:
    for size in (2, 5, 12):
        assert_true(DataLoader(range(size), batch_sampler=BATCH_SAMPLERS[name](size), num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_items_that_say_how_many_they_are(num_workers: int) -> None:
    for size, batch_size, drop_last in itertools.product((0, 5, 6), (1, 2, 3), (False, True)):
        assert_true(DataLoader(Items(size), batch_size, drop_last=drop_last, num_workers=num_workers))
    assert_true(DataLoader(Items(5), None, num_workers=num_workers))


def test_where_nobody_knows() -> None:
    for arguments in ({}, {"batch_size": None}, {"iterable_workers": 2}):
        loader: Any = DataLoader(Sharded(), **arguments)
        with pytest.raises(TypeError):
            len(loader)
        with pytest.raises(TypeError):
            len(iter(loader))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_have_equally_many_batches_of_equal_sizes(num_workers: int, drop_last: bool) -> None:
    """So that none waits in vain for another, at the end of an epoch, to exchange gradients."""
    makes: list[Callable[[int, int], Any]] = [
        lambda size, rank: ShardedSampler(ShuffleSampler(size), rank, 2, uneven="pad"),
        lambda size, rank: ShardedSampler(ShuffleSampler(size), rank, 2, uneven="drop"),
        lambda size, rank: distributed(size, rank),
        lambda size, rank: distributed(size, rank, drop_last=True),
    ]
    for size, make in itertools.product((11, 12, 17), makes):
        sizes = []
        for rank in (0, 1):
            sampler = make(size, rank)
            with DataLoader(range(size), 4, sampler=sampler, drop_last=drop_last, num_workers=num_workers) as loader:
                sizes.append([[len(batch) for batch in loader] for _ in range(2)])
                assert [len(epoch) for epoch in sizes[-1]] == [len(loader)] * 2
        assert sizes[0] == sizes[1]
        assert drop_last is False or {number for epoch in sizes[0] for number in epoch} <= {4}


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_ranks_have_equally_many_batches_of_a_batch_sampler(uneven: Any) -> None:
    for size in (11, 12, 17):
        lengths = []
        for rank in (0, 1, 2):
            batches = ShardedSampler(BatchSampler(range(size), 4, drop_last=False), rank, 3, uneven=uneven)
            with DataLoader(range(size), batch_sampler=batches, num_workers=1) as loader:
                lengths.append((len(loader), len(list(loader))))
        assert len({number for both in lengths for number in both}) == 1
