"""Each rank its part: together all of it, each equally much, as torch's DistributedSampler has it."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from aioload.errors import ArgumentError
from aioload.samplers import ShardedSampler, ShuffleSampler, StratifiedBatchSampler
from aioload.samplers.sharded import Uneven, process_group

deterministic = settings(deadline=None, derandomize=True, max_examples=25)
sizes, ranks = st.integers(0, 40), st.integers(1, 9)


def parts_of(sampler: Any, world_size: int, uneven: Uneven) -> list[list[Any]]:
    return [list(ShardedSampler(sampler, rank, world_size, uneven=uneven)) for rank in range(world_size)]


@deterministic
@given(st.integers(1, 40), ranks, st.booleans())
def test_the_indices_are_those_of_distributed_sampler(size: int, world_size: int, drop_last: bool) -> None:
    if drop_last and size < world_size:
        return  # torch's length is then that of a full round; ours is 0, see the empty samplers
    for rank in range(world_size):
        dataset: Any = range(size)
        theirs: Any = torch.utils.data.DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=False, drop_last=drop_last
        )
        expected = list(theirs)
        ours: list[Any] = [size, Sized(size), range(size), torch.utils.data.SequentialSampler(dataset)]
        ours += [torch.utils.data.TensorDataset(torch.zeros(size))]
        for sampler in ours:
            sharded = ShardedSampler(sampler, rank, world_size, uneven="drop" if drop_last else "pad")
            assert list(sharded) == expected
            assert len(sharded) == len(expected)


class Sized:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@deterministic
@given(sizes, ranks)
def test_together_the_ranks_have_all(size: int, world_size: int) -> None:
    for sampler in (ShuffleSampler(size), list(ShuffleSampler(size)), np.array(list(ShuffleSampler(size)))):
        order = list(ShuffleSampler(size))
        whole = len(order) - len(order) % world_size
        dropped = parts_of(sampler, world_size, "drop")
        assert list(chain.from_iterable(zip(*dropped, strict=True))) == order[:whole]
        padded = list(chain.from_iterable(zip(*parts_of(sampler, world_size, "pad"), strict=True)))
        assert padded[: len(order)] == order
        assert padded[len(order) :] == list(islice(order * world_size, len(padded) - len(order)))
        assert len(padded) - len(order) < world_size


def test_uneven_parts_are_refused_where_that_is_asked_for() -> None:
    assert sorted(chain.from_iterable(parts_of(ShuffleSampler(12), 4, "error"))) == list(range(12))
    with pytest.raises(ArgumentError, match=r"13 items cannot be shared equally among 4 ranks; choose uneven='drop'"):
        ShardedSampler(13, 0, 4, uneven="error")
    growing = list(range(12))
    sampler = ShardedSampler(growing, 0, 4, uneven="error")
    growing.append(12)
    with pytest.raises(ArgumentError, match="cannot be shared equally"):
        iter(sampler)


def test_batches_are_shared_whole() -> None:
    labels = [0, 1] * 20
    batches = list(StratifiedBatchSampler(labels, 4))
    for sampler in (StratifiedBatchSampler(labels, 4), batches, torch.utils.data.BatchSampler(range(40), 4, False)):
        parts = parts_of(sampler, 2, "error")
        assert list(chain.from_iterable(zip(*parts, strict=True))) == list(sampler)


def test_epochs_are_counted_here_and_passed_on() -> None:
    inner = ShuffleSampler(20)
    inner.set_epoch(7)
    sampler = ShardedSampler(inner, 1, 2)
    assert list(sampler) == list(ShuffleSampler(20).iter_from(0, 0))[1::2]
    assert list(sampler) == list(ShuffleSampler(20).iter_from(1, 0))[1::2]
    assert (inner.epoch, inner.next_epoch) == (7, 7)

    theirs: Any = torch.utils.data.DistributedSampler(range(20), num_replicas=1, rank=0)  # type: ignore[arg-type]
    nested = ShardedSampler(theirs, 1, 2)
    for epoch in (0, 1, 5):
        nested.set_epoch(epoch)
        got = list(nested)
        theirs.set_epoch(epoch)
        assert got == list(theirs)[1::2]


def test_another_sampler_is_asked_for_no_more_than_is_needed() -> None:
    drawn = []

    class Drawn:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            for index in range(10):
                drawn.append(index)
                yield index

    sampler = iter(ShardedSampler(Drawn(), 1, 4, uneven="drop"))
    assert drawn == []
    assert [next(sampler), len(drawn), next(sampler), len(drawn)] == [1, 2, 5, 6]
    assert list(ShardedSampler(Drawn(), 3, 4)) == [3, 7, 1]  # one pass, though it needs the first items once more


def test_a_state_of_one_rank_fits_all() -> None:
    first = ShardedSampler(ShuffleSampler(100), 0, 4)
    list(islice(first, 10))
    for rank in range(4):
        sampler = ShardedSampler(ShuffleSampler(100), rank, 4)
        sampler.load_state_dict(first.state_dict())
        assert list(sampler) == list(ShuffleSampler(100))[rank::4][10:]


def test_far_into_a_long_epoch_of_many_ranks() -> None:
    sampler = ShardedSampler(ShuffleSampler(10**12), 1000, 4096)
    position = 200_000_000
    indices = list(islice(sampler.iter_from(0, position), 3))
    places = (1000 + (position + number) * 4096 for number in range(3))
    assert indices == [next(ShuffleSampler(10**12).iter_from(0, place)) for place in places]


def test_rank_and_world_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = ShardedSampler(9)
    assert (sampler.rank, sampler.world_size, list(sampler)) == (2, 3, [2, 5, 8])
    assert list(ShardedSampler(9, rank=0)) == [0, 3, 6]
    assert list(ShardedSampler(9, world_size=9)) == [2]


def test_rank_and_world_size_from_the_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    sampler = ShardedSampler(10)
    assert (sampler.rank, sampler.world_size) == (4, 5)


def test_rank_and_world_size_from_nowhere() -> None:
    assert process_group({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    for environment in ({}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "one", "WORLD_SIZE": "2"}):
        with pytest.raises(ArgumentError, match="needs rank and world_size: pass both, or"):
            process_group(environment)


def test_bad_arguments() -> None:
    for rank, world_size in ((2, 2), (-1, 2), (0, 0), (0.5, 2), (0, "2")):
        with pytest.raises(ArgumentError, match=r"(rank|world_size) must be a whole number"):
            ShardedSampler(9, rank, world_size)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="uneven must be 'drop', 'pad' or 'error', got 'even'"):
        ShardedSampler(9, 0, 2, uneven="even")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="needs a sampler with a length, got <generator"):
        ShardedSampler((index for index in range(3)), 0, 2)
    for nothing in (None, -3, 2.5, object()):
        with pytest.raises(ArgumentError, match="data_source must be a number of samples or have a length"):
            ShardedSampler(nothing, 0, 2)  # type: ignore[arg-type]
