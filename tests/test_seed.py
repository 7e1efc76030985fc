"""``seed=``: the order of ``shuffle=True`` is the same in every run, and another in each epoch."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from outcomes import EVERY_WAY, Load, by_for
from torch.utils.data import RandomSampler, SequentialSampler

from aioload import DataLoader, ShardedSampler, ShuffleSampler, TensorDataset
from aioload.errors import ArgumentError

SIZE = 20


def epochs(num_epochs: int = 3, dataset: Any = range(SIZE), **arguments: Any) -> list[list[int]]:
    with DataLoader(dataset, 3, **{"num_workers": 2, **arguments}) as loader:
        return [[int(number) for batch in loader for number in batch] for _ in range(num_epochs)]


def test_two_runs_have_the_same_order_whatever_was_drawn_meanwhile() -> None:
    torch.manual_seed(1)
    first = epochs(shuffle=True, seed=3)
    torch.manual_seed(2)
    for more in ({"num_workers": 0}, {"num_workers": 4}, {"persistent_workers": True}):
        assert epochs(shuffle=True, seed=3, **more) == first
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in first)
    assert len({tuple(epoch) for epoch in (*first, *epochs(shuffle=True, seed=4))}) == 6


def test_the_order_is_that_of_a_shuffle_sampler() -> None:
    sampler = ShuffleSampler(SIZE, 3)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    assert epochs(shuffle=True, seed=3) == expected
    assert epochs(sampler=ShuffleSampler(SIZE, 3)) == expected
    parts = [epochs(sampler=ShardedSampler(ShuffleSampler(SIZE, 3), rank, 2)) for rank in range(2)]
    assert [
        [number for pair in zip(*both, strict=True) for number in pair] for both in zip(*parts, strict=True)
    ] == expected


def test_the_first_epoch_can_be_chosen_and_gone_back_to() -> None:
    expected = epochs(4, shuffle=True, seed=3)
    for persistent in (False, True):
        with DataLoader(
            range(SIZE), SIZE, shuffle=True, seed=3, num_workers=1, persistent_workers=persistent
        ) as loader:
            for epoch in (2, 0, 0, 3):
                loader.set_epoch(epoch)
                (batch,) = loader
                assert batch.tolist() == expected[epoch]
            loader.set_epoch(1)
            for epoch in (1, 2, 3):
                (batch,) = loader
                assert batch.tolist() == expected[epoch]


def test_a_pass_that_is_broken_off_was_an_epoch() -> None:
    expected = epochs(3, shuffle=True, seed=3)
    for persistent in (False, True):
        with DataLoader(range(SIZE), 3, shuffle=True, seed=3, num_workers=1, persistent_workers=persistent) as loader:
            next(iter(loader))
            iter(loader)
            assert [number for batch in loader for number in batch.tolist()] == expected[2]


@pytest.mark.parametrize("load", EVERY_WAY)
@pytest.mark.parametrize("dataset", [[7], TensorDataset(torch.tensor([7]))], ids=["map", "tensors"])
def test_a_single_sample(dataset: Any, load: Load) -> None:
    assert load(dataset, shuffle=True, seed=0) == [[7]]


def test_nothing_to_shuffle_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="num_samples"):
        DataLoader([], shuffle=True)
    assert by_for([], seed=3) == []


def test_without_shuffle_or_with_a_sampler_of_its_own_the_order_is_not_touched() -> None:
    assert epochs(seed=3) == [list(range(SIZE))] * 3
    assert epochs(seed=3, shuffle=False) == [list(range(SIZE))] * 3
    assert epochs(seed=3, sampler=[5, 3]) == [[5, 3]] * 3
    assert by_for(range(9), seed=3, batch_sampler=[[5, 3], [1]]) == [[5, 3], [1]]
    assert type(DataLoader(range(3), seed=3).sampler) is SequentialSampler
    assert type(DataLoader(range(3), shuffle=True).sampler) is RandomSampler
    assert type(DataLoader(range(3), shuffle=True, seed=0).sampler) is ShuffleSampler


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def test_an_iterable_dataset_cannot_be_shuffled_by_it() -> None:
    assert epochs(dataset=Stream(), seed=3) == [list(range(SIZE))] * 3
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(Stream(), seed=3, shuffle=True)
    for more in ({"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(ValueError, match="IterableDataset"):
            DataLoader(Stream(), seed=3, **more)


def test_shuffle_and_a_sampler_exclude_each_other_as_in_torch() -> None:
    for more in ({"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(ValueError, match="shuffle"):
            DataLoader(range(3), seed=3, shuffle=True, **more)


def test_two_passes_at_once_are_two_epochs() -> None:
    expected = epochs(4, shuffle=True, seed=3)
    for persistent in (False, True):
        with DataLoader(
            range(SIZE), SIZE, shuffle=True, seed=3, num_workers=1, persistent_workers=persistent
        ) as loader:
            for first in (0, 2):
                ((one, other),) = zip(loader, loader, strict=True)
                assert [one.tolist(), other.tolist()] == expected[first : first + 2]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_default_device_has_no_part_in_the_order(device: str, num_workers: int) -> None:
    def orders(**arguments: Any) -> list[Any]:
        torch.manual_seed(1)
        return epochs(dataset=list(range(SIZE)), num_workers=num_workers, collate_fn=list, **arguments)

    for make in (
        lambda: {"shuffle": True},
        lambda: {"shuffle": True, "seed": 3},
        lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(2)},
        lambda: {"shuffle": True, "persistent_workers": num_workers > 0},
        lambda: {"sampler": torch.utils.data.WeightedRandomSampler([0.5] * SIZE, SIZE)},
        lambda: {"sampler": torch.utils.data.SubsetRandomSampler(range(SIZE))},
    ):
        expected, arguments = orders(**make()), make()
        before = torch.get_default_device()
        torch.set_default_device(device)
        try:
            assert orders(**arguments) == expected
            assert torch.get_default_device().type == device
        finally:
            torch.set_default_device(None)
        assert torch.get_default_device() == before


def test_numbers_may_be_numpys_and_what_is_none_is_refused() -> None:
    numbers: dict[str, Any] = {"seed": np.uint64(2**64 - 1), "num_concurrent_reads": np.int32(3)}
    loader = DataLoader(range(SIZE), shuffle=True, num_workers=0, **numbers)
    loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
    same = DataLoader(range(SIZE), shuffle=True, num_workers=0, seed=2**64 - 1, num_concurrent_reads=3)
    same.set_epoch(2)
    assert loader.state_dict() == same.state_dict()
    assert json.loads(json.dumps(loader.state_dict())) == same.state_dict()
    wrong: list[Any] = [True, 1.0, "1", -1]
    for name in ("seed", "num_concurrent_reads", "iterable_workers"):
        for value in wrong:
            refused: dict[str, Any] = {name: value}
            with pytest.raises(ArgumentError, match=f"{name} must be .*whole number"):
                DataLoader(range(SIZE), **refused)
