"""What all samplers have in common: epochs, positions, saved states and copies."""

import copy
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from aioload import DataLoader
from aioload.errors import AioloadError, ArgumentError
from aioload.samplers import (
    BucketBatchSampler,
    InfiniteSampler,
    Seekable,
    SeekableSampler,
    ShardedSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    WeightedSampler,
)
from aioload.samplers.base import growing
from aioload.samplers.seekable import JSON

deterministic = settings(deadline=None, derandomize=True, max_examples=50)

Make: TypeAlias = Callable[[], SeekableSampler[Any]]

LENGTHS = [(37 * i) % 101 for i in range(203)]
LABELS = [i * i % 7 for i in range(203)]

INDICES: dict[str, Make] = {
    "shuffle": lambda: ShuffleSampler(203, seed=5),
    "shuffle, large": lambda: ShuffleSampler(5003, seed=5),
    "weighted": lambda: WeightedSampler([1, 2, 0, 4], 157, seed=5),
    "infinite": lambda: InfiniteSampler(53, batch_size=7, num_batches=17, seed=5),
    "infinite, ranks": lambda: InfiniteSampler(53, batch_size=7, num_batches=17, seed=5, rank=1, world_size=3),
    "sharded": lambda: ShardedSampler(ShuffleSampler(203, seed=5), 2, 4),
    "sharded twice": lambda: ShardedSampler(ShardedSampler(ShuffleSampler(203), 1, 2, uneven="drop"), 2, 3),
    "sharded endless": lambda: ShardedSampler(InfiniteSampler(53, batch_size=7, num_batches=17), 2, 4),
    "sharded in order": lambda: ShardedSampler(203, 3, 4),
    "sharded, torch": lambda: ShardedSampler(torch.utils.data.SequentialSampler(range(203)), 3, 4),
    "sharded, user's": lambda: ShardedSampler(Countdown(203), 3, 4),
}
BATCHES: dict[str, Make] = {
    "bucket": lambda: BucketBatchSampler(LENGTHS, 4, seed=5, num_batches_per_bucket=8),
    "bucket, drop": lambda: BucketBatchSampler(LENGTHS, 4, seed=5, drop_last=True),
    "bucket, in order": lambda: BucketBatchSampler(LENGTHS, 4, shuffle=False, num_batches_per_bucket=8),
    "stratified": lambda: StratifiedBatchSampler(LABELS, 4, seed=5),
    "sharded batches": lambda: ShardedSampler(StratifiedBatchSampler(LABELS, 4, seed=5), 1, 2),
}
EVERY: dict[str, Make] = {**INDICES, **BATCHES}

EMPTY: list[Make] = [
    lambda: ShuffleSampler(0),
    lambda: ShuffleSampler([]),
    lambda: WeightedSampler([], 0),
    lambda: WeightedSampler([0.0], 0),
    lambda: BucketBatchSampler([], 4),
    lambda: BucketBatchSampler([1, 2], 4, drop_last=True),
    lambda: StratifiedBatchSampler([], 4),
    lambda: StratifiedBatchSampler([1, 2], 4, drop_last=True),
    lambda: ShardedSampler(0, 1, 2),
    lambda: ShardedSampler(1, 0, 2, uneven="drop"),
    lambda: ShardedSampler([], 1, 2),
    lambda: ShardedSampler(ShuffleSampler(0), 1, 2),
]


class Countdown(SeekableSampler[int]):
    """A sampler as a user may write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __len__(self) -> int:
        return self.size

    def blocks(self, epoch: int, positions: range) -> Iterator[Sequence[int]]:
        yield [self.size - 1 - position for position in positions]

    def fingerprint(self) -> dict[str, JSON]:
        return {"name": "Countdown", "size": self.size}


class Bare:
    """Follows the protocol of the loader and nothing else."""

    next_epoch = next_position = 0

    def __init__(self, sampler: SeekableSampler[Any]) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def iter_from(self, epoch: int, position: int, /) -> Iterator[Any]:
        return self._sampler.iter_from(epoch, position)

    def fingerprint(self) -> dict[str, JSON]:
        return {"name": "Bare"}


def test_each_pass_is_the_next_epoch() -> None:
    for make in EVERY.values():
        sampler = make()
        assert isinstance(sampler, Seekable)
        assert (sampler.epoch, sampler.next_epoch, sampler.next_position) == (0, 0, 0)
        epochs = [list(sampler.iter_from(epoch, 0)) for epoch in range(4)]
        assert all(len(items) == len(sampler) for items in epochs)
        assert list(sampler) == epochs[0]
        assert (sampler.epoch, sampler.next_epoch) == (0, 1)
        assert next(iter(sampler)) == epochs[1][0]
        assert (sampler.epoch, sampler.next_epoch) == (1, 2)
        assert list(sampler) == epochs[2]
        sampler.set_epoch(1)
        assert (sampler.epoch, sampler.next_epoch) == (1, 1)
        assert list(sampler) == epochs[1]
        assert list(sampler) == epochs[2]
        assert list(make()) == epochs[0]


def test_what_is_yielded_are_plain_numbers() -> None:
    for make in INDICES.values():
        assert {type(index) for index in make()} == {int}
    for make in BATCHES.values():
        batches = list(make())
        assert {type(batch) for batch in batches} == {list}
        assert {type(index) for batch in batches for index in batch} == {int}


def test_the_items_at_any_positions() -> None:
    for make in EVERY.values():
        sampler = make()
        for epoch in (0, 3):
            items = list(sampler.iter_from(epoch, 0))
            for position in (0, 1, 5, len(items) // 2, len(items) - 1, len(items)):
                assert list(sampler.iter_from(epoch, position)) == items[position:]
            for positions in (range(1, 17, 5), range(3, 4), range(4, 4), range(2, len(items), 7)):
                found = [item for block in sampler.blocks(epoch, positions) for item in block]
                assert found == items[positions.start : positions.stop : positions.step]


@deterministic
@given(st.sampled_from(sorted(EVERY)), st.lists(st.integers(0, 5200), max_size=4))
def test_interruptions_do_not_show(name: str, cuts: list[int]) -> None:
    make = EVERY[name]
    whole = make()
    expected = [*whole, *whole]
    position, got = 0, []
    sampler = make()
    for cut in sorted(cut % (len(expected) + 1) for cut in cuts):
        while position < cut:  # an interrupted run goes on into the next epoch as an uninterrupted one does
            taken = list(islice(iter(sampler), cut - position))
            got += taken
            position += len(taken)
        state = json.loads(json.dumps(sampler.state_dict()))
        sampler = make()
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
    while len(got) < len(expected):
        got += list(sampler)
    assert got == expected


def test_the_state_says_what_has_been_yielded() -> None:
    for make in EVERY.values():
        sampler = make()
        for epoch in range(2):
            items = iter(sampler)
            for position in range(len(sampler)):
                state = sampler.state_dict()
                assert (state["epoch"], state["position"]) == (epoch, position)
                next(items)
            state = sampler.state_dict()
            assert (state["epoch"], state["position"]) == (epoch + 1, 0)
            assert list(items) == []
            assert sampler.state_dict() == state
        assert len(json.dumps(state)) < 300


def test_looking_elsewhere_does_not_change_the_place() -> None:
    for make in EVERY.values():
        sampler = make()
        items = iter(sampler)
        seen = list(islice(items, 9))
        state = sampler.state_dict()
        first, second = sampler.iter_from(5, 2), sampler.iter_from(0, 0)
        pairs = list(zip(first, second, strict=False))
        assert [b for _, b in pairs][:9] == seen
        assert sampler.state_dict() == state
        assert (sampler.epoch, sampler.next_epoch) == (0, 1)
        assert next(items) == next(sampler.iter_from(0, 9))


def test_a_loop_that_sets_each_epoch_is_resumed_in_the_middle_of_one() -> None:
    sampler = ShuffleSampler(100)
    sampler.set_epoch(3)
    expected = list(sampler)
    sampler.set_epoch(3)
    assert list(islice(iter(sampler), 60)) == expected[:60]
    resumed = ShuffleSampler(100)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.epoch, resumed.next_epoch, resumed.next_position) == (3, 3, 60)
    resumed.set_epoch(3)
    assert list(resumed) == expected[60:]
    resumed.set_epoch(3)
    assert list(resumed) == expected
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(4)
    resumed.set_epoch(3)
    assert list(resumed) == expected


def test_copies_are_at_the_same_place() -> None:
    for make in EVERY.values():
        sampler = make()
        items = iter(sampler)
        seen = list(islice(items, 11))
        copies = [copy.deepcopy(sampler), copy.copy(sampler), pickle.loads(pickle.dumps(sampler))]
        for each in copies:
            assert each.state_dict() == sampler.state_dict()
            assert (each.epoch, each.next_epoch) == (0, 1)
            continued = make()
            continued.load_state_dict(each.state_dict())
            assert list(continued) == list(sampler.iter_from(0, len(seen)))
            assert list(each) == list(sampler.iter_from(1, 0))
        assert seen + list(items) == list(sampler.iter_from(0, 0))


def test_any_loader_takes_them() -> None:
    for make in INDICES.values():
        sampler = make()
        dataset = np.arange(len(sampler) * 50)
        expected = [[int(i) for i in sampler.iter_from(epoch, 0)] for epoch in (0, 1)]
        theirs: Any = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=make())  # type: ignore[arg-type]
        assert [torch.cat(list(theirs)).tolist() for _ in range(2)] == expected
        with DataLoader(dataset, batch_size=8, sampler=make(), num_workers=0) as ours:
            assert [torch.cat(list(ours)).tolist() for _ in range(2)] == expected
    for make in BATCHES.values():
        sampler = make()
        batches = list(sampler.iter_from(0, 0))
        loaded: Any = torch.utils.data.DataLoader(range(203), batch_sampler=make())  # type: ignore[arg-type]
        assert [batch.tolist() for batch in loaded] == batches
        with DataLoader(range(203), batch_sampler=make(), num_workers=0) as ours:
            assert [batch.tolist() for batch in ours] == batches


def test_nothing_to_yield() -> None:
    for make in EMPTY:
        sampler = make()
        assert len(sampler) == 0
        assert list(sampler) == []
        assert sampler.state_dict()["epoch"] == 1
        state = sampler.state_dict()
        sampler = make()
        sampler.load_state_dict(state)
        assert list(sampler) == []
        assert (sampler.epoch, sampler.next_epoch) == (1, 2)


def test_one_sample() -> None:
    assert list(ShuffleSampler(1)) == list(WeightedSampler([3], 1)) == [0]
    assert list(InfiniteSampler(1, batch_size=2, num_batches=2, rank=1, world_size=2)) == [0] * 4
    assert list(BucketBatchSampler([7], 4)) == list(StratifiedBatchSampler(["a"], 4)) == [[0]]
    assert list(ShardedSampler(1, 1, 2)) == list(ShardedSampler([0], 1, 2)) == [0]


def test_a_state_of_another_sampler_is_refused_and_the_differences_named() -> None:
    state = ShuffleSampler(100, seed=1).state_dict()
    sampler = ShuffleSampler(90, seed=2)
    with pytest.raises(ArgumentError) as caught:
        sampler.load_state_dict(state)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AioloadError)
    message = str(caught.value)
    assert "num_samples is 100 in the state and 90 here; seed is 1 in the state and 2 here" in message
    assert sampler.state_dict() == ShuffleSampler(90, seed=2).state_dict()

    inner = ShardedSampler(ShuffleSampler(100, seed=1), 0, 2).state_dict()
    with pytest.raises(ArgumentError, match=r"sampler\.seed is 1 in the state and 4 here"):
        ShardedSampler(ShuffleSampler(100, seed=4), 0, 2).load_state_dict(inner)
    with pytest.raises(ArgumentError, match="world_size is missing in the state and 2 here"):
        ShardedSampler(ShuffleSampler(100, seed=1), 0, 2).load_state_dict(state)
    with pytest.raises(ArgumentError, match="name is 'ShardedSampler' in the state and 'ShuffleSampler' here"):
        ShuffleSampler(100, seed=1).load_state_dict(inner)


def test_arrays_that_differ_are_noticed() -> None:
    pairs: list[tuple[SeekableSampler[Any], SeekableSampler[Any], str]] = [
        (WeightedSampler([1, 2, 3], 5), WeightedSampler([1, 3, 2], 5), "weights"),
        (BucketBatchSampler([1, 2, 3], 2), BucketBatchSampler([1, 3, 2], 2), "lengths"),
        (StratifiedBatchSampler([0, 0, 1], 2), StratifiedBatchSampler([0, 1, 1], 2), "labels"),
    ]
    for saved, other, name in pairs:
        with pytest.raises(ArgumentError, match=f"{name} is '[0-9a-f]+' in the state and '[0-9a-f]+' here"):
            other.load_state_dict(saved.state_dict())
    same = BucketBatchSampler(np.array([1, 2, 3], dtype=np.int16), 2)
    same.load_state_dict(pairs[1][0].state_dict())


def test_what_is_no_state() -> None:
    sampler = ShuffleSampler(10)
    good = sampler.state_dict()
    for bad in (None, 3, {}, {"epoch": 0}, {**good, "more": 1}, {**good, "sampler": None}):
        with pytest.raises(ArgumentError):
            sampler.load_state_dict(bad)  # type: ignore[arg-type]
    for field, value in (("epoch", -1), ("epoch", "0"), ("position", 10), ("position", -1), ("position", 1.0)):
        with pytest.raises(ArgumentError, match=f"The state's {field} must be a whole number"):
            sampler.load_state_dict({**good, field: value})
    assert sampler.state_dict() == good


def test_places_there_are_not() -> None:
    sampler = ShuffleSampler(10)
    for epoch, position in ((-1, 0), (0, -1), (0, 11), (0.5, 0), (0, None), (True, 0)):
        with pytest.raises(ArgumentError):
            sampler.iter_from(epoch, position)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="epoch must be a whole number of at least 0, got -1"):
        sampler.set_epoch(-1)
    sampler.set_epoch(np.int64(2))  # type: ignore[arg-type]
    assert type(sampler.state_dict()["epoch"]) is int


def test_a_sampler_that_only_follows_the_protocol_is_shared_too() -> None:
    for size in (10, 3, 1):
        for rank in range(4):
            expected = ShardedSampler(ShuffleSampler(size), rank, 4)
            sampler = ShardedSampler(Bare(ShuffleSampler(size)), rank, 4)
            assert list(sampler) == list(expected)
            assert list(sampler.iter_from(3, 1)) == list(expected.iter_from(3, 1))


def test_parts_grow_up_to_a_bound() -> None:
    parts = list(growing(range(5, 10**6, 3), 1000))
    assert [place for part in parts for place in part] == list(range(5, 10**6, 3))
    lengths = [len(part) for part in parts]
    assert lengths[:-1] == sorted(lengths[:-1])
    assert lengths[0] <= 64
    assert max(lengths) == 1000
