"""Each rank its part: together all of it, each equally much, as torch's DistributedSampler has it."""

import itertools
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
from oracle import torch_loader

from aioload import DataLoader
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


class Recounting:
    """Has another order each time it has been passed over, and notes the ends."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.num_passes = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from ((index * 3 + self.num_passes) % self.size for index in range(self.size))
        self.num_passes += 1


class Keeping:
    """Keeps its place in itself, as samplers that can be resumed do."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.place = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        while self.place < self.size:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def drawing() -> Any:
    return torch.utils.data.RandomSampler(range(10), generator=torch.Generator().manual_seed(3))


OTHERS: dict[str, Any] = {
    "recounting": Recounting,
    "keeping": Keeping,
    "random": drawing,
    "sharded": lambda: ShardedSampler(Recounting(), 0, 1),
    "random, sharded": lambda: ShardedSampler(drawing(), 0, 1),
}


def loaded(sampler: Any, num_workers: int, **arguments: Any) -> Any:
    return DataLoader(range(10), None, sampler=sampler, num_workers=num_workers, **arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_another_sampler_is_passed_over_to_its_end_as_torch_does(make: Any, num_workers: int) -> None:
    theirs = torch_loader(range(10), batch_size=None, sampler=make())
    epochs = [list(theirs) for _ in range(3)]
    assert make in (Keeping,) or len({tuple(epoch) for epoch in epochs}) == 3
    for world_size, uneven in itertools.product((1, 2, 4, 11), ("pad", "drop")):
        parts: list[list[Any]] = []
        for rank in range(world_size):
            sampler: Any = ShardedSampler(make(), rank, world_size, uneven=uneven)  # type: ignore[arg-type]
            with loaded(sampler, num_workers) as loader:
                parts.append([list(loader) for _ in range(3)])
        for order, epoch in zip(epochs, zip(*parts, strict=True), strict=True):
            got = list(chain.from_iterable(zip(*epoch, strict=True)))
            whole = len(order) - len(order) % world_size
            wanted = order[:whole] if uneven == "drop" else (order * 2)[: -(-len(order) // world_size) * world_size]
            assert got == wanted, (world_size, uneven)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_that_is_dropped_has_no_end(num_workers: int) -> None:
    inner = Recounting(1000)
    dataset: Any = range(1000)
    with DataLoader(dataset, None, sampler=ShardedSampler(inner, 0, 2), num_workers=num_workers) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 6, 12]
        del batches
        assert inner.num_passes == 0
        assert list(loader)[:3] == [0, 6, 12]
        assert inner.num_passes == 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [Keeping, drawing], ids=["keeping", "random"])
@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_a_loader_resumes_in_the_middle_of_another_sampler(make: Any, uneven: Uneven, num_workers: int) -> None:
    def new() -> Any:
        return loaded(ShardedSampler(make(), 1, 3, uneven=uneven), num_workers)

    with new() as loader:
        epochs = [list(loader) for _ in range(2)]
    for num_epochs, num_batches in itertools.product(range(2), range(5)):
        with new() as loader:
            assert [list(loader) for _ in range(num_epochs)] == epochs[:num_epochs]
            batches = iter(loader)
            taken = list(islice(batches, num_batches))
            state = loader.state_dict()
        with new() as loader:
            loader.load_state_dict(state)
            if len(taken) == num_batches:  # it is not over, though nothing may be left
                rest = list(loader)
                assert taken + rest == epochs[num_epochs], (num_epochs, num_batches)
            if num_epochs == 0:
                assert list(loader) == epochs[1], num_batches


class Fewer(Recounting):
    """Has fewer items than it says."""

    def __init__(self, size: int, num_items: int) -> None:
        super().__init__(size)
        self.num_items = num_items

    def __iter__(self) -> Iterator[int]:
        yield from range(self.num_items)
        self.num_passes += 1


@deterministic
@given(st.integers(0, 20), st.integers(0, 20), ranks)
def test_what_a_sampler_has_is_shared_though_it_is_less_than_it_says(size: int, less: int, world_size: int) -> None:
    num_items = max(0, size - less)
    samplers = [Fewer(size, num_items) for _ in range(world_size)]
    parts = [list(ShardedSampler(sampler, rank, world_size)) for rank, sampler in enumerate(samplers)]
    padded = list(chain.from_iterable(zip(*parts, strict=True)))
    assert padded == list(islice(itertools.cycle(range(num_items)), -(-num_items // world_size) * world_size))
    assert {sampler.num_passes for sampler in samplers} == {1}


def test_items_that_turn_out_uneven_are_refused_where_that_is_asked_for() -> None:
    sampler = ShardedSampler(Fewer(12, 7), 0, 4, uneven="error")
    with DataLoader(range(12), None, sampler=sampler, num_workers=1) as loader:
        batches = iter(loader)
        assert list(islice(batches, 2)) == [0, 4]
        with pytest.raises(ArgumentError, match="7 items cannot be shared equally among 4 ranks"):
            next(batches)


def test_a_sampler_without_end_is_left_at_its_length() -> None:
    class Endless(Recounting):
        def __iter__(self) -> Iterator[int]:
            for self.latest in itertools.count():
                yield self.latest

    for world_size, part in ((2, [1, 3, 0]), (5, [1]), (7, [1])):
        sampler = Endless(5)
        assert list(ShardedSampler(sampler, 1, world_size)) == part
        assert sampler.latest == 5


def test_an_error_at_the_end_of_another_sampler_is_raised() -> None:
    error = OSError("at the end")

    class Failing(Recounting):
        def __iter__(self) -> Iterator[int]:
            yield from range(self.size)
            raise error

    for num_workers, world_size in itertools.product((0, 2), (1, 4)):
        with loaded(ShardedSampler(Failing(), 0, world_size), num_workers) as loader:
            got, batches = [], iter(loader)
            with pytest.raises(OSError, match="at the end") as caught:
                got.extend(batches)
            assert caught.value is error


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
