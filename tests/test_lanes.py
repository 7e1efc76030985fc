"""Lanes: iterable datasets that are their own iterators, or whose iterators have a state, and lanes that are slow."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from aioload import DataLoader, get_worker_info
from aioload.testing import Gates


class Countdown(IterableDataset[int]):
    """Is its own iterator, and never begins anew."""

    def __init__(self) -> None:
        self.left = 5

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_dataset_that_is_its_own_iterator_begins_anew_each_epoch(num_workers: int, persistent: bool) -> None:
    with DataLoader(Countdown(), None, num_workers=num_workers, persistent_workers=persistent) as loader:
        assert [list(loader) for _ in range(3)] == [[4, 3, 2, 1, 0]] * 3


class Draws:
    """Its state is more than its place."""

    def __init__(self, seed: int, size: int) -> None:
        self.left, self.random = size, random.Random(seed)

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> float:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]
        self.random.setstate(state["random"])


class Drawing(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        return iter(Draws(number, 4 + 3 * number))


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_iterators_with_a_state_go_on_from_anywhere(num_lanes: int, in_order: bool) -> None:
    arguments: dict[str, Any] = {"collate_fn": tuple, "num_workers": 2, "iterable_workers": num_lanes}
    arguments |= {"batch_size": 2, "in_order": in_order}
    with DataLoader(Drawing(), **arguments) as loader:
        whole = list(loader)
        for num_before in range(len(whole) + 1):
            batches = iter(loader)
            got = [next(batches) for _ in range(num_before)]
            state = loader.state_dict()
            with DataLoader(Drawing(), **arguments) as other:
                other.load_state_dict(state)
                got += list(other)
            assert got == whole if in_order else sorted(got) == sorted(whole)


class OneIsSlow(IterableDataset[int]):
    gates = Gates()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for position in range(3):
            if info.id == 1:
                type(self).gates.pass_through(position)
            yield 10 * info.id + position


def test_without_order_a_slow_lane_keeps_the_others_waiting_for_nothing() -> None:
    OneIsSlow.gates = Gates()
    with DataLoader(OneIsSlow(), None, num_workers=2, iterable_workers=2, in_order=False) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        OneIsSlow.gates.open_all()
        assert sorted(batches) == [10, 11, 12]
