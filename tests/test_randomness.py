"""``sample_rng()``: the numbers of a sample depend on the seed, the epoch and its index, and on nothing else."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from sampling import (
    MAKE,
    SIZE,
    Drawing,
    Files,
    Items,
    ManyDrawing,
    Shards,
    decode_where_it_was_read,
    draw,
    numbers_of,
    passes,
    passes_of_a_coroutine,
    plain,
)

from aioload import DataLoader, ShardedSampler, ShuffleSampler, sample_rng

WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 4},
    {"num_workers": 4, "num_concurrent_reads": 1},
    {"num_workers": 1, "num_concurrent_reads": 3},
    {"num_workers": 4, "persistent_workers": True},
]


@pytest.fixture(scope="module")
def expected() -> Any:
    """Two passes, one sample at a time."""
    return passes(Drawing(), num_workers=0)


@pytest.mark.parametrize("name", MAKE)
def test_the_same_numbers_however_samples_are_loaded(name: str, expected: Any, tmp_path: Path) -> None:
    dataset = MAKE[name](tmp_path)
    for way, load in itertools.product(WAYS, (passes, passes_of_a_coroutine)):
        assert load(dataset, **way) == expected, (way, load)
    for way in WAYS:
        for got, wanted in zip(passes(dataset, in_order=False, shuffle=True, **way), expected, strict=True):
            assert sorted(got) == wanted, way


def stacked() -> dict[str, Any]:
    """Return datasets made of two that draw, by torch's StackDataset."""
    drawing: Any = Drawing()
    whole = torch.utils.data.Subset(drawing, range(SIZE))
    halves: Any = torch.utils.data.ConcatDataset([torch.utils.data.Subset(drawing, range(SIZE // 2))] * 2)
    stack: Any = torch.utils.data.StackDataset
    return {
        "tuple": stack(drawing, drawing),
        "dict": stack(a=drawing, b=drawing),
        "of subsets": stack(whole, torch.utils.data.Subset(whole, range(SIZE))),
        "of parts": stack(halves, drawing),
        "of stacks": stack(stack(drawing, whole), stack(a=drawing)),
        "in a subset": torch.utils.data.Subset(stack(drawing, whole), range(SIZE - 1, -1, -1)),
    }


@pytest.mark.parametrize("name", stacked())
def test_members_of_a_stack_draw_one_after_the_other(name: str) -> None:
    dataset = stacked()[name]
    wanted = passes(Stacked(dataset), num_workers=0)
    for way, load in itertools.product(WAYS, (passes, passes_of_a_coroutine)):
        assert load(dataset, **way) == wanted, (way, load)
    numbers = re.findall(r"\d{5,}", str(wanted))
    assert len(set(numbers)) == len(numbers) >= 6 * SIZE


class Stacked(Drawing):
    """Asks for single samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_every_number_is_another(expected: Any) -> None:
    assert np.unique(numbers_of([*expected[0], *expected[1]])).size == 4 * SIZE


@pytest.mark.parametrize("inline", [False, True], ids=["decode threads", "read threads"])
def test_wherever_files_are_decoded(
    inline: bool, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_where_it_was_read(monkeypatch, always=inline)
    dataset = Files(tmp_path)
    locations = []
    for num_workers, batch_size, num_reads in ((1, 1, 1), (2, 1, 8), (3, 4, 1), (0, 1, 1)):
        sampler = [index % SIZE for index in range(SIZE * 30)]
        with DataLoader(
            dataset, batch_size, sampler=sampler, collate_fn=plain, seed=5, num_workers=num_workers,
            num_concurrent_reads=num_reads,
        ) as loader:  # fmt: skip
            got = [sample for batch in loader for sample in batch]
        assert got == expected[0] * 30
        assert ("aioload-read" in dataset.threads) is inline
        locations.append(dict(dataset.locations))
    assert locations == [locations[0]] * 4
    assert not set(locations[0].values()) & {number for sample in got for number in sample[1:]}


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("kind", [Items, Shards])
def test_items_of_an_iterable_dataset(kind: Any, num_lanes: int) -> None:
    wanted = passes(kind(), num_workers=0, iterable_workers=num_lanes)
    for way, load in itertools.product(WAYS, (passes, passes_of_a_coroutine)):
        assert load(kind(), iterable_workers=num_lanes, **way) == wanted, way
    num_numbers = len(wanted[0]) * 2
    assert np.unique(numbers_of([*wanted[0], *wanted[1]])).size == 2 * num_numbers


class Shuffled(Items):
    """Draws before there are items."""

    def __iter__(self) -> Any:
        order = sample_rng().permutation(SIZE)
        return ((int(index), draw()) for index in order)


def test_the_iterator_itself_may_draw_and_draws_the_same_after_a_resume() -> None:
    def new() -> DataLoader[Any]:
        return DataLoader(Shuffled(), 2, collate_fn=plain, seed=3, num_workers=1)

    with new() as loader:
        first, second = list(loader), list(loader)
    assert first != second
    order, number = np.random.default_rng(0), first[0][0][1]
    assert number not in {int(order.integers(1 << 62)), first[0][1][1]}
    with new() as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(2)] == first[:2]
        state = loader.state_dict()
    with new() as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="loaded again and dropped"):
            batches = iter(loader)
        assert list(batches) == first[2:]


def test_they_differ_by_seed_and_epoch() -> None:
    seen: set[int] = set()
    for seed in (0, 1, 2, (1 << 64) - 1):
        for samples in passes(Drawing(), num_passes=3, seed=seed, num_workers=2):
            seen |= {number for _, *numbers in samples for number in numbers}
    assert len(seen) == 4 * 3 * SIZE * 2
    with DataLoader(Drawing(), 3, collate_fn=plain, seed=2, num_workers=1) as loader:
        loader.set_epoch(1)
        (again,) = [[sample for batch in loader for sample in batch]]
    assert again == passes(Drawing(), seed=2, num_workers=0)[1]


def test_they_do_not_depend_on_how_many_ranks_there_are() -> None:
    whole = passes(Drawing(), shuffle=True, num_workers=0)
    for world_size in (2, 3):
        parts: list[list[Any]] = [[], []]
        for rank in range(world_size):
            sampler = ShardedSampler(ShuffleSampler(SIZE, 5), rank, world_size)
            for part, got in zip(parts, passes(Drawing(), sampler=sampler, num_workers=2), strict=True):
                part.extend(got)
        assert [sorted(part) for part in parts] == [sorted(part) for part in whole]


def test_an_index_that_is_given_begins_the_numbers_anew() -> None:
    class Again(Drawing):
        def __getitem__(self, index: int) -> Any:
            own = [draw() for _ in range(3)]
            given = sample_rng(index)
            return own == [int(given.integers(1 << 62)) for _ in range(3)], draw() != own[0], draw() != draw()

    for num_workers in (0, 2):
        assert set(passes(Again(), num_passes=1, num_workers=num_workers)[0]) == {(True, True, True)}


def test_the_same_index_twice_in_a_batch() -> None:
    for dataset in (Drawing(), ManyDrawing()):
        for num_workers in (0, 3):
            (got,) = passes(dataset, num_passes=1, sampler=[4, 4, 4, 4], num_workers=num_workers)
            assert got == got[:1] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_seed_they_follow_torchs_generators(num_workers: int) -> None:
    def by_manual_seed(seed: int) -> Any:
        torch.manual_seed(seed)
        return passes(Drawing(), seed=None, num_workers=num_workers)

    def by_generator(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return passes(Drawing(), seed=None, generator=generator, num_workers=num_workers)

    for follow in (by_manual_seed, by_generator):
        first = follow(1)
        assert follow(1) == first
        assert follow(2) != first
        assert np.unique(numbers_of([*first[0], *first[1], *follow(2)[0]])).size == 6 * SIZE


def test_neighbours_are_not_correlated() -> None:
    def row(seed: int, epoch: int, index: int) -> "np.ndarray[Any, Any]":
        class Long(Drawing):
            def __getitem__(self, _: Any) -> Any:
                return sample_rng().random(4000)

        loader = DataLoader(Long(), None, sampler=[index], seed=seed, num_workers=0, collate_fn=lambda each: each)
        loader.set_epoch(epoch)
        return next(iter(loader))

    rows = np.stack([row(*of) for of in itertools.product((0, 1, 2), (0, 1, 2), (0, 1, 2))])
    assert np.abs(rows.mean(1) - 0.5).max() < 5 * (1 / 12 / 4000) ** 0.5
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(correlations).max() < 5 / 4000**0.5
    shifted = [np.corrcoef(one[:-1], other[1:])[0, 1] for one, other in itertools.permutations(rows[:9], 2)]
    assert np.abs(shifted).max() < 5 / 4000**0.5
    assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 5 / len(rows) ** 0.5
