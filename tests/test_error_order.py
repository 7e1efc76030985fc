"""Which error comes first follows from the order of the indices, and no error waits for what comes after it."""

import itertools
import random
from typing import Any

import pytest
from outcomes import EVERY_WAY, of_iterator

from aioload import DataLoader, error_context
from aioload.testing import GatedDataset


@pytest.mark.parametrize("failing", [(1, 3), (0, 2), (2, 3)])
def test_the_failure_of_the_lowest_index_comes_whatever_fails_first(failing: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(4)):
        with GatedDataset(4) as dataset, DataLoader(dataset, batch_size=4, num_workers=4) as loader:
            errors = {index: ValueError(index) for index in failing}
            for index, error in errors.items():
                dataset.gates.fail(index, error)
            batches = iter(loader)
            dataset.gates.wait_started(*range(4))
            for index in order:
                dataset.gates.open(index)
                dataset.gates.wait_finished(index)
            assert of_iterator(batches) == [errors[min(failing)]]


def test_an_error_waits_for_no_later_sample_of_its_batch() -> None:
    error = ValueError()
    with GatedDataset(4) as dataset:
        dataset.gates.fail(1, error)
        dataset.gates.open(0, 1, 2)
        batches = iter(DataLoader(dataset, batch_size=4, num_workers=4))
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            next(batches)
        assert caught.value is error
        assert 3 not in dataset.gates.finished
        dataset.gates.open_all()
        assert of_iterator(batches) == []


def test_an_error_comes_at_its_batch_after_those_before_it() -> None:
    error = ValueError()
    with GatedDataset(3) as dataset, DataLoader(dataset, num_workers=3) as loader:
        dataset.gates.fail(1, error)
        batches = iter(loader)
        for index in (2, 1, 0):
            dataset.gates.open(index)
            dataset.gates.wait_finished(index)
        assert of_iterator(batches) == [[0], error, [2]]


def test_an_error_comes_when_it_happens_where_order_does_not_count() -> None:
    error = ValueError()
    with GatedDataset(3) as dataset, DataLoader(dataset, num_workers=3, in_order=False) as loader:
        dataset.gates.fail(1, error)
        batches = iter(loader)
        dataset.gates.open(1)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            next(batches)
        assert caught.value is error
        dataset.gates.open(2)
        assert next(batches).tolist() == [2]
        dataset.gates.open(0)
        assert of_iterator(batches) == [[0]]


class Risky:
    """Fails at random, but for the same indices each time."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.failing = {index for index in range(40) if generator.random() < 0.3}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index in self.failing:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("batch_size", [None, 1])
def test_every_sample_is_delivered_or_raised(batch_size: int | None) -> None:
    for seed in range(100):
        dataset = Risky(seed)
        got = EVERY_WAY[seed % 4](dataset, batch_size=batch_size)
        assert [_index_of(each) for each in got] == list(range(40))
        assert {index for index, each in enumerate(got) if isinstance(each, ValueError)} == dataset.failing


def test_every_batch_is_delivered_or_raises_its_first_failure() -> None:
    for seed in range(100):
        dataset = Risky(seed)
        expected = []
        for start in range(0, 40, 4):
            indices = range(start, start + 4)
            bad = [index for index in indices if index in dataset.failing]
            expected.append(bad[0] if bad else list(indices))
        got = EVERY_WAY[seed % 4](dataset, batch_size=4)
        assert [_index_of(each) if isinstance(each, ValueError) else each for each in got] == expected


def _index_of(outcome: Any) -> Any:
    if isinstance(outcome, BaseException):
        context = error_context(outcome)
        assert context is not None
        assert outcome.args == (context.index,)
        return context.index
    return outcome[0] if isinstance(outcome, list) else outcome
