"""Endings within a process: whatever ends a pass, its threads end and its slots come back."""

import functools
import gc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from conftest import join_all, loader_threads, slots_in_use

from aioload import DataLoader
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems

Make: TypeAlias = Callable[..., Any]
"""Makes a gated dataset of so many samples."""

SIZE = 40


@pytest.fixture(params=[GatedDataset, AsyncGatedDataset, GatedItems, GatedFiles], ids=lambda kind: kind.__name__)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    kind: Make = request.param
    return functools.partial(GatedFiles, tmp_path) if kind is GatedFiles else kind


WAYS: dict[str, dict[str, Any]] = {
    "own threads": {"num_workers": 2},
    "persistent threads": {"num_workers": 2, "persistent_workers": True},
    "no threads": {"num_workers": 0},
}


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def arguments(request: pytest.FixtureRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = request.param
    return arguments


def assert_ended(loader: DataLoader[Any]) -> None:
    """Only persistent threads may be left, and they go with ``close``."""
    if loader.persistent_workers:
        assert loader_threads()
        loader.close()
    assert join_all(loader_threads()) == set()
    assert slots_in_use() == []


def values(batches: Iterable[Any]) -> list[int]:
    return [int(value) for batch in batches for value in batch]


async def avalues(batches: AsyncIterator[Any]) -> list[int]:
    return [int(value) async for batch in batches for value in batch]


# The loop ends.


def test_exhaustion(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)
    batches = iter(loader)
    assert values(batches) == list(range(SIZE))
    assert list(batches) == []
    assert_ended(loader)


async def test_exhaustion_in_a_coroutine(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)
    batches = aiter(loader)
    assert await avalues(batches) == list(range(SIZE))
    assert await avalues(batches) == []
    assert_ended(loader)


def test_break(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)
    for batch in loader:
        assert values([batch]) == [0, 1, 2, 3]
        del batch
        break
    assert_ended(loader)


async def test_break_in_a_coroutine(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)
    async for batch in loader:
        assert values([batch]) == [0, 1, 2, 3]
        del batch
        break
    assert_ended(loader)


def test_exception_in_the_loop(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)

    def consume() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert_ended(loader)


async def test_exception_in_the_loop_of_a_coroutine(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)

    async def consume() -> None:
        async for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()
    assert_ended(loader)


def test_exception_in_the_dataset(make: Make, arguments: dict[str, Any]) -> None:
    dataset = make(SIZE, opened=True)
    dataset.gates.fail(5, ZeroDivisionError())
    loader = DataLoader(dataset, 4, **arguments)

    def consume() -> None:
        for _ in loader:
            pass

    with pytest.raises(ZeroDivisionError):
        consume()
    dataset.gates.fail(5, LookupError())  # lets the traceback go, and the frame that holds the iterator
    assert_ended(loader)


def test_a_new_pass_after_each_ending(make: Make, arguments: dict[str, Any]) -> None:
    with DataLoader(make(SIZE, opened=True), 4, **arguments) as loader:
        for _ in range(3):
            assert values([next(iter(loader))]) == [0, 1, 2, 3]
            assert values(loader) == list(range(SIZE))
            loader.close()


# Nobody refers to it any more.


def test_an_iterator_in_a_cycle(make: Make, arguments: dict[str, Any]) -> None:
    loader = DataLoader(make(SIZE, opened=True), 4, **arguments)
    batches: Any = iter(loader)
    next(batches)
    batches.itself = batches
    del batches
    gc.collect()
    assert_ended(loader)


class Trainer:
    """Keeps a loader and its iterator, and is what the loader calls."""

    def __init__(self, role: str, arguments: dict[str, Any]) -> None:
        roles: dict[str, dict[str, Any]] = {
            "dataset": {"dataset": self},
            "collate_fn": {"dataset": range(SIZE), "collate_fn": self.collate},
            "sampler": {"dataset": range(SIZE), "sampler": self},
            "worker_init_fn": {"dataset": range(SIZE), "worker_init_fn": self.begin},
            "async dataset": {"dataset": AsyncTrainer(self)},
        }
        self.loader = DataLoader(**roles[role], **arguments)
        self.batches = iter(self.loader)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples)

    def begin(self, number: int) -> None:
        pass


class AsyncTrainer:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return SIZE

    async def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("role", ["dataset", "collate_fn", "sampler", "worker_init_fn", "async dataset"])
def test_a_loader_whose_owner_it_refers_to(role: str, arguments: dict[str, Any]) -> None:
    trainer = Trainer(role, arguments)
    assert values([next(trainer.batches), next(trainer.batches)]) == [0, 1]
    del trainer
    assert collect_until_ended()


def collect_until_ended() -> bool:
    """Collect garbage until there are no threads: jobs under way refer to the dataset, and end when they end."""
    for _ in range(1000):
        gc.collect()
        threads = loader_threads()
        if not threads:
            return True
        threads.pop().join(0.01)
    return False
