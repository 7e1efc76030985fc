"""Persistent workers: the next pass begins to load early, yet every sample is of the dataset as it is by then."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset

from aioload import DataLoader

SIZE = 12


class Calls:
    """Counts samples asked for; a dataset that counted them itself would change by being used."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = 0

    def add(self) -> None:
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, timeout=60), self.count


CALLS = Calls()


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.count = 0


class Shift:
    def __init__(self) -> None:
        self.by = 0

    def __call__(self, value: int) -> int:
        return value + self.by


class WithSlots:
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 0

    def __call__(self, value: int) -> int:
        return value + self.by


class Changing(torch.utils.data.Dataset[int]):
    """Its samples are 100 times all that can be changed about it, plus the index."""

    def __init__(self) -> None:
        self.epoch = 0
        self.transform: Callable[[int], int] = Shift()
        self.slots = WithSlots()
        self.numbers = [0]
        self.table = {"a": [0]}
        self.members = {0}
        self.array = np.zeros(1, int)
        self.tensor = torch.zeros(1, dtype=torch.int64)
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        CALLS.add()
        total = self.transform(self.epoch) + self.slots(0) + self.numbers[-1] + self.table["a"][-1] + max(self.members)
        total += int(self.array[0]) + int(self.tensor[0]) + int(self.layer.weight.item())
        return 100 * total + index


def change_attribute(dataset: Changing) -> None:
    dataset.epoch += 1


def replace_transform(dataset: Changing) -> None:
    dataset.transform = lambda value: value + 7


def change_transform(dataset: Changing) -> None:
    assert isinstance(dataset.transform, Shift)
    dataset.transform.by += 1


def change_slot(dataset: Changing) -> None:
    dataset.slots.by += 1


def append(dataset: Changing) -> None:
    dataset.numbers.append(dataset.numbers[-1] + 1)


def change_item(dataset: Changing) -> None:
    dataset.numbers[0] += 1


def change_deep_item(dataset: Changing) -> None:
    dataset.table["a"][0] += 1


def change_members(dataset: Changing) -> None:
    dataset.members = {max(dataset.members) + 1}


def change_members_in_place(dataset: Changing) -> None:
    dataset.members.add(max(dataset.members) + 1)
    dataset.members.discard(0)


def change_array(dataset: Changing) -> None:
    dataset.array += 1


def change_tensor(dataset: Changing) -> None:
    dataset.tensor += 1


def train_layer(dataset: Changing) -> None:
    with torch.no_grad():
        dataset.layer.weight += 1


CHANGES: list[Callable[[Changing], None]] = [
    change_attribute,
    replace_transform,
    change_transform,
    change_slot,
    append,
    change_item,
    change_deep_item,
    change_members,
    change_members_in_place,
    change_array,
    change_tensor,
    train_layer,
]
WRAPPERS: dict[str, Callable[[Changing], Any]] = {
    "itself": lambda dataset: dataset,
    "subset": lambda dataset: Subset(dataset, range(1, SIZE)),
    "subset of subset": lambda dataset: Subset(Subset(dataset, range(1, SIZE)), range(1, SIZE - 2)),
    "concatenated": lambda dataset: ConcatDataset([dataset, Subset(dataset, [3, 1])]),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_change_between_passes_is_seen_by_every_sample_of_the_next(
    wrap: Callable[[Changing], Any], change: Callable[[Changing], None]
) -> None:
    for num_workers in (1, 2):
        changing = Changing()
        dataset = wrap(changing)
        with DataLoader(dataset, 2, num_workers=num_workers, persistent_workers=True) as loader:
            CALLS.count = 0
            before = [batch.tolist() for batch in loader]
            CALLS.wait_for(len(dataset) + 4 * num_workers)  # the next pass has begun
            change(changing)
            # Not by torch's loader, which draws a number: the pass that has begun would be given up for that.
            indices = [range(len(dataset))[start : start + 2] for start in range(0, len(dataset), 2)]
            expected = [[dataset[index] for index in batch] for batch in indices]
            assert expected[0] != before[0]
            assert [batch.tolist() for batch in loader] == expected


class Files(torch.utils.data.Dataset[int]):
    """Not to be taken for changed."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.paths = [f"{number}.png" for number in range(SIZE)]
        self.array = np.zeros(10_000)
        self.transform = torch.nn.Linear(1, 1)
        self.itself = self
        self.deep: list[Any] = []
        for _ in range(10_000):
            self.deep = [self.deep]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        CALLS.add()
        return index + self.rng.randrange(1)


def test_a_pass_over_an_unchanged_dataset_begins_while_the_one_before_ends() -> None:
    with DataLoader(Files(), 2, num_workers=2, persistent_workers=True) as loader:
        for number in range(1, 4):
            assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, SIZE, 2)]
            CALLS.wait_for(number * SIZE + 8)
            assert CALLS.count == number * SIZE + 8  # none was loaded twice


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_arguments_may_be_changed_between_passes_as_with_torch(num_workers: int) -> None:
    loader: DataLoader[Any] = DataLoader(range(4), 2, num_workers=num_workers, shuffle=True)
    generator = torch.Generator().manual_seed(1)
    with loader:
        assert sorted(number for batch in loader for number in batch.tolist()) == [0, 1, 2, 3]
        loader.collate_fn = sum
        assert sum(loader) == 6
        loader.generator = generator
        before = generator.get_state()
        assert sum(loader) == 6
        assert not torch.equal(before, generator.get_state())
        loader.num_workers = 1 - min(num_workers, 1)
        loader.prefetch_factor = 2
        assert sum(loader) == 6
