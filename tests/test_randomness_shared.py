"""The process's own generators: threads share them, so no two samples draw the same, and no epoch repeats another."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from sampling import SIZE, Drawing, plain

from aioload import DataLoader, sample_rng


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))]


class Shared(Drawing):
    """Each sample is what it draws."""

    def __getitem__(self, _: Any) -> Any:
        return draw()


class AsyncShared(Drawing):
    async def __getitem__(self, _: Any) -> Any:
        return draw()


class SharedItems(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (draw() for _ in range(SIZE))


def seed_all(number: int) -> None:
    """Do what trainers do in each worker, by its number alone."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "without threads": {"num_workers": 0},
    "threads": {"num_workers": 4},
    "persistent": {"num_workers": 4, "persistent_workers": True},
    "seeded workers": {"num_workers": 4, "worker_init_fn": seed_all},
    "persistent seeded workers": {"num_workers": 4, "worker_init_fn": seed_all, "persistent_workers": True},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
@pytest.mark.parametrize("kind", [Shared, AsyncShared, SharedItems])
def test_no_number_is_drawn_twice(kind: Callable[[], Any], arguments: dict[str, Any]) -> None:
    others: dict[str, Any] = {"iterable_workers": 3} if kind is SharedItems else {"shuffle": True}
    for more in (dict[str, Any](), others):
        with DataLoader(kind(), 2, collate_fn=plain, **more, **arguments) as loader:
            drawn = [number for _ in range(3) for batch in loader for sample in batch for number in sample]
        assert len(drawn) == len(set(drawn)) == 3 * 3 * SIZE * more.get("iterable_workers", 1)


class OfTheSample(Drawing):
    def __getitem__(self, index: int) -> Any:
        return index, float(sample_rng().random())


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_a_seed_for_everything_fixes_a_run_and_not_its_epochs(arguments: dict[str, Any]) -> None:
    def run(seed: int) -> list[Any]:
        seed_all(seed)
        with DataLoader(OfTheSample(), 2, shuffle=True, collate_fn=plain, **arguments) as loader:
            return [dict(sample for batch in loader for sample in batch) for _ in range(3)]

    first, other = run(1), run(2)
    assert run(1) == first
    for index in range(SIZE):
        assert len({epoch[index] for epoch in first + other}) == 6
    assert len({tuple(epoch) for epoch in first + other}) == 6  # in another order each
