"""Batches come in the sampler's order, or as they are ready where that is asked for."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import of_async_iterator, of_iterator
from sharding import Sharded

from aioload import DataLoader
from aioload.engine.batch import Batch
from aioload.engine.order import AsCompleted, InOrder
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, Gates


class Numbered:
    def __init__(self, number: int) -> None:
        self.number = number


@given(st.permutations(range(8)))
def test_batches_leave_by_number_and_as_soon_as_that_allows(arrivals: list[int]) -> None:
    order = InOrder()
    left: list[int] = []
    for count, number in enumerate(arrivals, start=1):
        batch: Any = Numbered(number)
        left += [leaving.number for leaving in order.add(batch)]
        arrived = set(arrivals[:count])
        assert left == list(itertools.takewhile(arrived.__contains__, range(8)))


def test_batches_leave_as_they_come_where_order_does_not_count() -> None:
    batches: list[Any] = [Numbered(2), Numbered(0)]
    order = AsCompleted()
    leaving: list[list[Batch]] = [list(order.add(batch)) for batch in batches]
    assert leaving == [[batches[0]], [batches[1]]]


def make_gated(kind: str, size: int, folder: Path) -> Any:
    if kind == "files":
        return GatedFiles(folder, size)
    return GatedDataset(size) if kind == "map" else AsyncGatedDataset(size)


@pytest.mark.parametrize("kind", ["map", "async", "files"])
def test_the_samplers_order_whatever_is_ready_first(kind: str, tmp_path: Path) -> None:
    indices = [3, 1, 4, 1, 5, 9, 2, 6]
    for seed in range(5):
        with (
            make_gated(kind, 10, tmp_path) as dataset,
            DataLoader(
                dataset, batch_size=2, sampler=indices, num_workers=8, num_concurrent_reads=8, prefetch_factor=1
            ) as loader,
        ):
            batches = iter(loader)
            dataset.gates.wait_num_started(8)
            for index in random.Random(seed).sample(sorted(set(indices)), 7):
                dataset.gates.open(index)
                dataset.gates.wait_finished(index)
            assert of_iterator(batches) == [[3, 1], [4, 1], [5, 9], [2, 6]]


@pytest.mark.parametrize("kind", ["map", "async", "files"])
async def test_what_is_ready_first_where_order_does_not_count(kind: str, tmp_path: Path) -> None:
    with make_gated(kind, 4, tmp_path) as dataset:
        async with DataLoader(dataset, num_workers=4, in_order=False) as loader:
            batches = aiter(loader)
            for index in (2, 0, 3, 1):
                dataset.gates.open(index)
                assert (await anext(batches)).tolist() == [index]
            assert await of_async_iterator(batches) == []


def test_look_ahead_is_bounded_where_order_does_not_count() -> None:
    dataset = GatedDataset(100)
    with dataset, DataLoader(dataset, num_workers=2, prefetch_factor=2, in_order=False) as loader:
        batches = iter(loader)
        dataset.gates.wait_started(0, 1)
        for index in range(1, 50):  # batch 0 does not come
            dataset.gates.open(index)
            assert next(batches).tolist() == [index]
            assert max(dataset.gates.started) <= index + 4
        dataset.gates.open_all()
        assert sorted(of_iterator(batches)) == [[0], *([index] for index in range(50, 100))]


def test_a_batch_that_does_not_come_holds_back_those_after_it_and_no_more_are_started() -> None:
    with GatedDataset(100) as dataset:
        dataset.gates.open(*range(1, 100))
        with DataLoader(dataset, num_workers=2, prefetch_factor=3) as loader:
            batches = iter(loader)
            dataset.gates.wait_finished(1, 2, 3, 4, 5)
            assert sorted(dataset.gates.started) == [0, 1, 2, 3, 4, 5]
            dataset.gates.open(0)
            assert of_iterator(batches) == [[index] for index in range(100)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_items_keep_their_order_whatever_batch_is_ready_first(num_lanes: int, persistent: bool) -> None:
    gates = Gates()

    def collate(samples: list[int]) -> list[int]:
        gates.pass_through((epoch, samples[0]))
        return samples

    with DataLoader(
        Sharded(), 2, num_workers=3, iterable_workers=num_lanes, collate_fn=collate, persistent_workers=persistent
    ) as loader:
        lanes = [range(number, 12, num_lanes) for number in range(num_lanes)]
        expected = [list(lane[start : start + 2]) for start in range(0, len(lanes[0]), 2) for lane in lanes]
        for epoch in range(3):
            batches = iter(loader)
            gates.wait_num_started(epoch * 6 + 3)
            started = gates.started[epoch * 6 : epoch * 6 + 3]
            for key in sorted(started, reverse=True):
                gates.open(key)
                gates.wait_finished(key)
            gates.open(*((epoch, samples[0]) for samples in expected))
            assert of_iterator(batches) == expected
