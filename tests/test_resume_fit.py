"""Which states fit: a sampler that would draw other indices is found out, by what it is made of or by what it draws."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from resuming import Backwards, Iterating, Stateful, StatefulIterators, Turning, numbers_in
from sampling import SIZE, Items
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioload import DataLoader, ShardedSampler
from aioload.errors import StateError

Arguments: TypeAlias = dict[str, Any]
RANGE = range(SIZE)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(**arguments: Any) -> DataLoader[Any]:
    defaults: Arguments = {"dataset": RANGE, "num_workers": 2}
    if "batch_sampler" not in arguments:
        defaults["batch_size"] = 2
    return DataLoader(**{**defaults, **arguments})


def cut(arguments: Arguments, num_batches: int = 2) -> tuple[Arguments, list[Any]]:
    """Return the state after so many batches, through JSON, and what comes after it."""
    with loader(**arguments) as one:
        batches = iter(one)
        for _ in range(num_batches):
            next(batches)
        state = json.loads(json.dumps(one.state_dict()))
        return state, numbers_in(list(batches))


class Anything:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Any:
        return index


class Batches(Sampler[list[int]]):
    """A batch sampler of the user's."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self.sampler, self.size = sampler, batch_size

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.size)):
            yield batch


def weighted(weights: Any = (1.0,) * SIZE, **more: Any) -> Arguments:
    return {"sampler": WeightedRandomSampler(weights, 9, generator=seeded(), **more)}


def subset(indices: Any) -> Arguments:
    return {"sampler": SubsetRandomSampler(indices, generator=seeded()), "dataset": Anything()}


def distributed(dataset: Any = RANGE, num_replicas: int = 2, rank: int = 0, **more: Any) -> Any:
    return DistributedSampler(dataset, num_replicas, rank, **more)


def uniform(data_source: Any = RANGE, **more: Any) -> RandomSampler:
    return RandomSampler(data_source, num_samples=SIZE, generator=seeded(), **more)


def sharded(sampler: Any) -> Arguments:
    return {"sampler": ShardedSampler(sampler, 0, 1)}


OTHERS: dict[str, tuple[Arguments, Arguments, str]] = {
    "weights": (weighted(), weighted([1.0] * (SIZE - 1) + [2.0]), r"sampler\.weights is '\w+' .* and '\w+' here"),
    "number of weights": (weighted(), weighted([1.0] * 11), "num_weights is 12 in the state and 11 here"),
    "weighted, replacement": (weighted(), weighted(replacement=False), "replacement is True in the state and False"),
    "subset": (subset(range(6)), subset(range(6, 12)), r"sampler\.indices is "),
    "subset, one index": (subset([5, 1, 2, 3]), subset([5, 1, 2, 4]), r"sampler\.indices is "),
    "subset of names": (subset(["a", "b", "c", "d", "e"]), subset(["a", "b", "c", "d", "f"]), r"sampler\.indices is "),
    "list": ({"sampler": [0, 1, 2, 3, 4]}, {"sampler": [0, 1, 2, 4, 3]}, r"sampler\.items is "),
    "tuple": ({"sampler": (0, 1, 2, 3, 4)}, {"sampler": (0, 1, 2, 4, 3)}, r"sampler\.items is "),
    "range": ({"sampler": range(0, 12, 2)}, {"sampler": range(1, 13, 2)}, r"sampler\.items is "),
    "list of batches": (
        {"batch_sampler": [[3, 1], [4], [1, 5]]},
        {"batch_sampler": [[3, 1], [4, 1], [5]]},
        r"sampler\.items is ",
    ),
    "source": ({"sampler": uniform()}, {"sampler": uniform(range(7))}, "num_to_draw_from is 12 in the state and 7"),
    "replacement": (
        {"sampler": uniform()},
        {"sampler": uniform(replacement=True)},
        "replacement is False in the state and True",
    ),
    "distributed, dataset": (
        {"sampler": distributed(range(12))},
        {"sampler": distributed(range(11))},
        "dataset_length is 12 in the state and 11 here",
    ),
    "distributed, drop_last": (
        {"sampler": distributed(range(12))},
        {"sampler": distributed(range(12), drop_last=True)},
        "drop_last is False in the state and True here",
    ),
    "distributed, seed": (
        {"sampler": distributed(seed=1)},
        {"sampler": distributed(seed=2)},
        "seed is 1 in the state and 2",
    ),
    "sharded, replacement": (
        sharded(uniform()),
        sharded(uniform(replacement=True)),
        r"sampler\.sampler\.replacement is False in the state and True",
    ),
    "sharded, seed": (
        sharded(distributed(seed=1)),
        sharded(distributed(seed=2)),
        r"sampler\.sampler\.seed is 1 in the state and 2",
    ),
    "sharded list": (sharded([0, 1, 2, 3, 4]), sharded([0, 1, 2, 4, 3]), r"sampler\.sampler\.items is "),
    "sharded batches": (
        {"batch_sampler": ShardedSampler(BatchSampler(uniform(), 2, False), 0, 1)},
        {"batch_sampler": ShardedSampler(BatchSampler(uniform(), 3, False), 0, 1)},
        r"sampler\.sampler\.batch_size is 2 in the state and 3",
    ),
    "user's batches": (
        {"batch_sampler": Batches(SequentialSampler(RANGE), 2)},
        {"batch_sampler": Batches(SequentialSampler(RANGE), 3)},
        "num_batches is 6 in the state and 4 here",
    ),
    "a generator of its own": (
        {"shuffle": True, "generator": seeded()},
        {"sampler": RandomSampler(RANGE, generator=seeded())},
        "has_generator is True in the state and False here",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("num_batches", [0, 2])
def test_a_state_of_a_sampler_made_of_something_else_is_refused(name: str, num_batches: int) -> None:
    arguments, others, difference = OTHERS[name]
    state, rest = cut(arguments, num_batches)
    with loader(**others) as other, pytest.raises(StateError, match=difference):
        other.load_state_dict(state)
    with loader(**arguments) as same:
        same.load_state_dict(state)
        if num_batches:
            assert numbers_in(list(same)) == rest


def test_what_the_numbers_are_kept_in_is_the_same() -> None:
    indices = [3, 1, 4, 5, 9, 2]
    state, rest = cut(subset(indices), 1)
    for kept in (tuple(indices), np.array(indices, np.int32), torch.tensor(indices)):
        with loader(**subset(kept)) as other:
            other.load_state_dict(state)
            assert numbers_in(list(other)) == rest


def test_a_state_of_long_lists_is_small_and_notices_most() -> None:
    long = list(range(70_000))
    for arguments in ({"sampler": long}, subset(long), weighted(np.ones(70_000))):
        state, _ = cut({**arguments, "dataset": range(70_000), "batch_size": 25_000}, 0)
        assert len(json.dumps(state)) < 1000
    with loader(dataset=range(70_000), batch_size=25_000, sampler=long[::-1]) as other:
        state, _ = cut({"sampler": long, "dataset": range(70_000), "batch_size": 25_000}, 1)
        with pytest.raises(StateError, match=r"sampler\.items is "):
            other.load_state_dict(state)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(RANGE)


class OfIterator(Numbers):
    """Its iterator has no state any more."""

    def __iter__(self) -> Iterator[int]:
        return map(int, RANGE)


def test_a_dataset_that_has_lost_its_state_is_refused() -> None:
    state, _ = cut({"dataset": Turning(), "collate_fn": list})
    with loader(dataset=Items()) as other, pytest.raises(StateError, match=r"dataset_has_state is True .* False here"):
        other.load_state_dict(state)
    with (
        loader(dataset=Turning()) as other,
        pytest.raises(StateError, match=r"dataset_has_state is False .* True here"),
    ):
        other.load_state_dict(cut({"dataset": Items(), "collate_fn": list})[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_has_lost_its_state_is_an_error_at_its_first_batch(num_workers: int) -> None:
    state, _ = cut({"dataset": Iterating(), "collate_fn": list})
    with loader(dataset=OfIterator(), num_workers=num_workers) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match="one of an iterator over the dataset, and map has no load_state_dict"):
            next(iter(other))


def test_a_sampler_that_has_lost_its_state_is_refused() -> None:
    state, _ = cut({"sampler": Stateful()})
    without = type("Stateful", (Backwards,), {})()
    with loader(sampler=without) as other, pytest.raises(StateError, match=r"sampler\.has_state is True .* missing"):
        other.load_state_dict(state)
    state, _ = cut({"sampler": StatefulIterators(), "batch_size": None})
    without = type("StatefulIterators", (Backwards,), {})()
    with loader(sampler=without, batch_size=None) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match=r"one of the sampler's iterator, and .* has no load_state_dict"):
            iter(other)


class OwnNumbers(Sampler[int]):
    """Reshuffles by random numbers of its own, in a way that nobody can know of."""

    def __init__(self, kind: str = "numpy", seed: int = 0) -> None:
        self.numpy, self.torch, self.python = np.random.default_rng(seed), seeded(seed), random.Random(seed)
        self.kind = kind

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        if self.kind == "numpy":
            return iter(self.numpy.permutation(SIZE).tolist())
        if self.kind == "torch":
            return iter(torch.randperm(SIZE, generator=self.torch).tolist())
        return iter(self.python.sample(RANGE, SIZE))


WRAPPED: dict[str, Callable[[Any], Arguments]] = {
    "sampler": lambda sampler: {"sampler": sampler},
    "samples": lambda sampler: {"sampler": sampler, "batch_size": None},
    "batches": lambda sampler: {"batch_sampler": BatchSampler(sampler, 2, True)},
    "own batches": lambda sampler: {"batch_sampler": Batches(sampler, 2)},
    "sharded": lambda sampler: {"sampler": ShardedSampler(sampler, 0, 2)},
}


@pytest.mark.parametrize("kind", ["numpy", "torch", "python"])
@pytest.mark.parametrize("way", WRAPPED)
def test_a_sampler_that_draws_other_indices_is_found_out(kind: str, way: str) -> None:
    with loader(**WRAPPED[way](OwnNumbers(kind))) as one:
        list(one)  # it is another order in each pass
        batches = iter(one)
        states = [json.loads(json.dumps(one.state_dict())) for _ in itertools.islice(batches, 3)]
    for state in states:
        with loader(**WRAPPED[way](OwnNumbers(kind))) as other:
            other.load_state_dict(state)
            with pytest.raises(StateError, match=r"draws other indices than before .* state_dict and load_state_dict"):
                iter(other)


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_draws_the_same_goes_on_without_a_word(way: str, num_workers: int) -> None:
    for sampler in (OwnNumbers, Backwards):  # the one in its first pass, which it can draw again
        for num_batches in range(3):
            state, rest = cut(WRAPPED[way](sampler()), num_batches)
            with loader(**WRAPPED[way](sampler()), num_workers=num_workers) as other:
                other.load_state_dict(state)
                batches = iter(other)
                head = numbers_in([next(batches)])
                again = other.state_dict()  # which still says what was drawn before
                assert head + numbers_in(list(batches)) == rest
            with loader(**WRAPPED[way](sampler())) as other:
                other.load_state_dict(again)
                assert numbers_in(list(other)) == rest[1:]


def test_batches_of_any_kind_of_index_are_compared() -> None:
    kinds: dict[str, Callable[[int], Any]] = {
        "names": lambda index: f"sample {index}",
        "pairs": lambda index: (index, [index / 2, None]),
        "tensors": torch.tensor,
        "numpy": np.int32,
        "large": lambda index: 2**70 + index,
        "objects": lambda index: Index(index),
    }
    for kind, make in kinds.items():

        class Sampling(Backwards):
            def __init__(self, shift: int, make: Any = make) -> None:
                self.make, self.shift = make, shift

            def __iter__(self) -> Iterator[Any]:
                return iter([self.make(index + self.shift) for index in RANGE])

        arguments = {"dataset": Anything(), "collate_fn": len}
        state, rest = cut({**arguments, "sampler": Sampling(0)})
        with loader(**arguments, sampler=Sampling(0)) as same:
            same.load_state_dict(state)
            assert list(same) == rest
        with loader(**arguments, sampler=Sampling(1)) as other:
            other.load_state_dict(state)
            if kind == "objects":  # which may look different wherever they are the same
                assert list(other) == rest
            else:
                with pytest.raises(StateError, match="draws other indices"):
                    iter(other)


class Index:
    def __init__(self, number: int) -> None:
        self.number = number


def test_a_state_of_the_users_sampler_fits_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranked(Backwards):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[int]:
            return iter(RANGE[self.rank :: 2])

    class ByProcess(Backwards):
        def __init__(self, rank: int) -> None:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            self.__rank = rank

        def __iter__(self) -> Iterator[int]:
            return iter(RANGE[self.__rank :: 2])

    for kind in (Ranked, ByProcess):
        state, _ = cut({"sampler": kind(0)}, 1)
        with loader(sampler=kind(1)) as other:
            other.load_state_dict(state)
            assert numbers_in(list(other)) == [[5, 7], [9, 11]]


def test_a_sampler_may_have_another_length_in_another_epoch() -> None:
    class Growing(Backwards):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 6 + self.epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self)))

    with loader(sampler=Growing()) as one:
        one.set_epoch(3)
        next(iter(one))
        state = one.state_dict()
    with loader(sampler=Growing()) as other:
        other.load_state_dict(state)
        assert numbers_in(list(other)) == [[2, 3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize("in_order", [True, False])
def test_what_is_drawn_ahead_does_not_count(in_order: bool) -> None:
    class Ending(Backwards):
        """Draws its last indices as it is told."""

        def __init__(self, last: int) -> None:
            self.last = last

        def __iter__(self) -> Iterator[int]:
            return iter([0, 1, 2, 3, self.last, self.last])

    state, _ = cut({"sampler": Ending(4), "in_order": in_order, "num_workers": 1, "prefetch_factor": 9})
    with loader(sampler=Ending(5)) as other:
        other.load_state_dict(state)
        assert numbers_in(list(other)) == [[5, 5]]
