"""What a state says, what it fits, and what may be done with it and with a loader that it was given to."""

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resuming import Backwards, Iterating, Stateful, Turning, TwoByTwo, numbers_in
from sampling import SIZE, Drawing, Items, Shards, plain
from scripts import Nursery
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, TensorDataset

from aioload import (
    BucketBatchSampler,
    DataLoader,
    InfiniteSampler,
    ShardedSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    WeightedSampler,
)
from aioload.errors import LoaderClosedError, StateError


def drawing(**arguments: Any) -> DataLoader[Any]:
    """Return a loader of six batches."""
    return DataLoader(**{"dataset": Drawing(), "batch_size": 2, "collate_fn": plain, "num_workers": 2, **arguments})


def after(num_batches: int, loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state after so many batches, and let the loader go."""
    for _ in itertools.islice(loader, num_batches):
        pass
    state = loader.state_dict()
    loader.close()
    return state


def test_the_end_of_a_pass_is_not_the_start_of_the_next() -> None:
    with drawing(shuffle=True, seed=1) as loader:
        first, second = list(loader), list(loader)
    with drawing(shuffle=True, seed=1) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(6)] == first
        end = loader.state_dict()
        assert (loader.num_yielded, next(batches, None), loader.num_yielded) == (6, None, 0)
        start = loader.state_dict()
    for state, num_yielded, expected in ((end, 6, [[], second]), (start, 0, [second])):
        with drawing(shuffle=True, seed=1) as loader:
            loader.load_state_dict(state)
            assert loader.num_yielded == num_yielded
            assert [list(loader) for _ in expected] == expected


def test_num_yielded_counts_the_batches_before_the_cut() -> None:
    state = after(3, drawing())
    assert state["num_yielded"] == 3
    with drawing() as loader:
        assert loader.num_yielded == 0
        loader.load_state_dict(state)
        seen = [loader.num_yielded for _ in loader]
    assert (seen, loader.num_yielded) == ([4, 5, 6], 0)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_no_sample_before_the_cut_is_loaded_again(num_workers: int) -> None:
    class Noting(Drawing):
        def __init__(self) -> None:
            self.loaded: set[int] = set()

        def __getitem__(self, index: int) -> int:
            self.loaded.add(index)
            return index

    for more in ({}, {"sampler": Backwards()}, {"shuffle": True, "generator": torch.Generator().manual_seed(1)}):
        before = drawing(**more, dataset=Noting())
        batches = iter(before)
        done = {sample for _ in range(4) for sample in next(batches)}
        state = before.state_dict()
        before.close()
        dataset = Noting()
        with drawing(**more, dataset=dataset, num_workers=num_workers) as loader:
            loader.load_state_dict(state)
            assert {sample for batch in loader for sample in batch} == dataset.loaded == set(range(SIZE)) - done


SMALL: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": dict,
    "shuffle": lambda: {"shuffle": True},
    "seed": lambda: {"shuffle": True, "seed": 2**64 - 1},
    "with replacement": lambda: {"sampler": RandomSampler(range(SIZE), True, 9)},
    "distributed": lambda: {"sampler": DistributedSampler(range(SIZE), 2, 1)},  # type: ignore[arg-type]
    "drop_last": lambda: {"batch_sampler": BatchSampler(ShuffleSampler(SIZE), 2, True)},
    "stratified": lambda: {"batch_sampler": StratifiedBatchSampler([0, 1] * 6, 2, seed=1)},
    "bucket": lambda: {"batch_sampler": BucketBatchSampler(list(range(SIZE)), 2, seed=1)},
    "sharded": lambda: {"sampler": ShardedSampler(ShuffleSampler(SIZE), 1, 2)},
    "infinite": lambda: {"sampler": InfiniteSampler(SIZE, batch_size=2, num_batches=10**6)},
    "weighted": lambda: {"sampler": WeightedSampler([1.0] * SIZE, 10**9)},
    "items": lambda: {"dataset": Items()},
    "shards": lambda: {"dataset": Shards(), "iterable_workers": 3},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_state_is_small(name: str) -> None:
    arguments = SMALL[name]()
    if "batch_sampler" in arguments:
        arguments |= {"batch_size": 1}
    with drawing(**arguments) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            assert len(json.dumps(loader.state_dict())) < 1000
        batches.close()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"dataset": TensorDataset(torch.arange(9))}, "dataset_length is 12 in the state and 9 here"),
        ({"batch_size": 3}, "batch_size is 2 in the state and 3 here"),
        ({"batch_size": None}, "batch_size is 2 in the state and None here"),
        ({"drop_last": True}, "drop_last is False in the state and True here"),
        ({"shuffle": True}, "sampler.name is 'SequentialSampler' in the state and 'RandomSampler' here"),
        ({"sampler": ShuffleSampler(SIZE)}, "sampler.seed is missing in the state and 0 here"),
        ({"sampler": range(9)}, "sampler.length is 12 in the state and 9 here"),
        ({"seed": 3}, "seed is None in the state and 3 here"),
        ({"generator": torch.Generator()}, "num_generators is 0 in the state and 1 here"),
        ({"batch_sampler": TwoByTwo(range(SIZE)), "batch_size": 1}, "sampler.batch_sampler is missing in the state"),
        ({"dataset": Items()}, "dataset_length is 12 in the state and missing here"),
    ],
)
def test_a_state_of_another_loader_is_refused_with_what_differs(arguments: dict[str, Any], field: str) -> None:
    state = after(1, drawing())
    with drawing(**arguments) as loader:
        with pytest.raises(StateError, match=f"The state is of another loader: .*{field}.* Make the loader with"):
            loader.load_state_dict(state)
        assert isinstance(loader.state_dict(), dict)
        assert next(iter(loader), None) is not None


def test_all_that_differs_is_listed() -> None:
    state = after(1, drawing(shuffle=True, seed=1))
    loader = drawing(dataset=range(9), batch_size=5, shuffle=True, seed=2)
    with pytest.raises(
        ValueError, match=r"batch_size is 2 .* dataset_length is 12 .* sampler\.seed is 1 .* seed is 1 "
    ):
        loader.load_state_dict(state)
    shards = after(1, drawing(dataset=Shards(), iterable_workers=2))
    with pytest.raises(StateError, match="iterable_workers is 2 in the state and 1 here"):
        drawing(dataset=Shards()).load_state_dict(shards)


@pytest.mark.parametrize("state", [None, {}, [], "state", {"epoch": 1}], ids=repr)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="load_state_dict needs what state_dict"):
        drawing().load_state_dict(state)
    with pytest.raises(StateError, match="version 0; this aioload knows version 1"):
        drawing().load_state_dict({**drawing().state_dict(), "version": 0})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sampler": Stateful()},
        {"shuffle": True, "generator": torch.Generator()},
        {"dataset": Turning()},
        {"dataset": Iterating()},
        {"dataset": Turning(), "iterable_workers": 2},
    ],
    ids=["map", "sampler", "generator", "dataset", "iterator", "shards"],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_does_not_change_later(arguments: dict[str, Any], num_workers: int) -> None:
    arguments = copy.copy(arguments)
    loader = drawing(**arguments, num_workers=num_workers)
    states = [loader.state_dict()]
    texts = [json.dumps(states[0])]
    for _ in range(2):
        for _ in loader:
            states.append(loader.state_dict())
            texts.append(json.dumps(states[-1]))
    assert list(map(json.dumps, states)) == texts
    loader.load_state_dict(states[2])
    loader.state_dict()["sampler"].clear()
    assert loader.state_dict() == states[2]
    list(loader)
    assert list(map(json.dumps, states)) == texts
    loader.close()


@pytest.mark.parametrize("more", [{}, {"generator": torch.Generator().manual_seed(3)}, {"seed": 1}])
def test_two_passes_at_once_have_a_state_each(more: dict[str, Any]) -> None:
    with drawing(shuffle=True, **more) as loader:
        one, other = iter(loader), iter(loader)
        taken = [next(one), next(other), next(other)]
        states = [one.state_dict(), other.state_dict()]
        assert loader.state_dict() == states[1]
        tails = [list(one), list(other)]
    assert (len(taken), list(map(len, tails))) == (3, [5, 4])
    for state, tail in zip(states, tails, strict=True):
        with drawing(shuffle=True, **more) as loader:
            loader.load_state_dict(state)
            assert list(loader) == tail


def test_who_looks_a_batch_ahead_takes_the_state_before_that() -> None:
    """As wrappers do that must know which batch is the last."""

    def wrapped(loader: DataLoader[Any], states: list[Any]) -> Any:
        batches = iter(loader)
        present = next(batches, None)
        while present is not None:
            state = loader.state_dict()
            after = next(batches, None)
            states.append(state)
            yield present
            present = after

    states: list[Any] = []
    with drawing(shuffle=True, seed=1) as loader:
        expected = list(wrapped(loader, states))
    assert len(states) == 6
    for number, state in enumerate(states):
        with drawing(shuffle=True, seed=1) as loader:
            loader.load_state_dict(state)
            assert list(wrapped(loader, [])) == expected[number + 1 :]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_goes_on_by_the_loaded_state_too(copied: Any) -> None:
    with drawing(shuffle=True, seed=1) as loader:
        expected = list(loader)
    loader = drawing(shuffle=True, seed=1)
    loader.load_state_dict(after(4, drawing(shuffle=True, seed=1)))
    with copied(loader) as other:
        assert other.state_dict() == loader.state_dict()
        assert list(other) == list(loader) == expected[4:]
    loader.close()


def test_a_closed_loader_tells_its_place_and_goes_on_from_it() -> None:
    with drawing(shuffle=True, seed=1) as loader:
        expected = list(loader)
    loader = drawing(shuffle=True, seed=1)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    loader.close()
    assert list(loader) == expected[1:]
    loader.close()


def test_a_new_process_goes_on(nursery: Nursery) -> None:
    sampler = SubsetRandomSampler(range(SIZE), generator=torch.Generator().manual_seed(4))
    with drawing(sampler=sampler) as loader:
        batches = iter(loader)
        next(batches)
        text = json.dumps(loader.state_dict())
        expected = numbers_in([list(batches), list(loader)])
    script = f"""
        import json
        import torch
        from torch.utils.data import SubsetRandomSampler
        from aioload import DataLoader
        from sampling import Drawing, SIZE, plain
        from resuming import numbers_in

        sampler = SubsetRandomSampler(range(SIZE), generator=torch.Generator())
        loader = DataLoader(Drawing(), 2, sampler=sampler, collate_fn=plain, num_workers=1)
        loader.load_state_dict(json.loads({text!r}))
        generator = torch.set_rng_state(torch.tensor({torch.get_rng_state().tolist()}, dtype=torch.uint8))
        print(json.dumps(numbers_in([list(loader)])))
    """
    assert json.loads(nursery.run_quietly(script)) == json.loads(json.dumps(expected))[:1]
