"""A training that is cut off, anywhere and any number of times, and goes on elsewhere gives what an uncut one gives."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming import (
    AsItGoes,
    Backwards,
    Iterating,
    Stateful,
    StatefulIterators,
    Turning,
    TwoByTwo,
    Way,
    train,
)
from sampling import MAKE, SIZE, Drawing, Items, Shards, plain
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from aioload import (
    BucketBatchSampler,
    DataLoader,
    InfiniteSampler,
    ShardedSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    WeightedSampler,
)

Arguments: TypeAlias = dict[str, Any]

deterministic = settings(deadline=None, derandomize=True, max_examples=3)
NUM_STEPS = 24
"""Three passes of six batches."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def weights() -> list[float]:
    return [0.5 + index for index in range(SIZE)]


def distributed() -> Any:
    return DistributedSampler(Drawing(), num_replicas=2, rank=1, seed=3)  # type: ignore[arg-type]


def sharing(kind: Any, *args: Any, **more: Any) -> Arguments:
    """Have loader and sampler draw from one generator."""
    shared = generator()
    return {"sampler": kind(*args, generator=shared, **more), "generator": shared}


SAMPLERS: dict[str, Callable[[], Arguments]] = {
    "none": lambda: {},
    "none, generator": lambda: {"generator": generator()},
    "shuffle": lambda: {"shuffle": True},
    "shuffle, generator": lambda: {"shuffle": True, "generator": generator()},
    "shuffle, seed": lambda: {"shuffle": True, "seed": 5},
    "shuffle, drop_last": lambda: {"shuffle": True, "batch_size": 5, "drop_last": True},
    "shuffle, samples": lambda: {"shuffle": True, "batch_size": None, "generator": generator()},
    "seed, samples": lambda: {"shuffle": True, "batch_size": None, "seed": 5},
    "list": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2]},
    "list of batches": lambda: {"batch_sampler": [[3, 1], [4], [1, 5, 9]]},
    "random twice": lambda: {"sampler": RandomSampler(range(SIZE), num_samples=25), "batch_size": 4},
    "with replacement": lambda: {"batch_size": 9, **sharing(RandomSampler, range(SIZE), True, 80)},
    "with replacement, global": lambda: {"batch_size": 9, "sampler": RandomSampler(range(SIZE), True, 80)},
    "sequential": lambda: {"sampler": SequentialSampler(range(SIZE)), "seed": 2},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(9))},
    "subset, generator": lambda: sharing(SubsetRandomSampler, range(9)),
    "weighted": lambda: {"sampler": WeightedRandomSampler(weights(), 11), "generator": generator()},
    "weighted, generator": lambda: {"sampler": WeightedRandomSampler(weights(), 11, generator=generator())},
    "distributed": lambda: {"sampler": distributed()},
    "batches of batches": lambda: {"sampler": BatchSampler(RandomSampler(range(SIZE)), 5, False), "batch_size": None},
    "drop_last": lambda: {"batch_sampler": BatchSampler(ShuffleSampler(SIZE, 3), 5, drop_last=True)},
    "stratified": lambda: {"batch_sampler": StratifiedBatchSampler([i % 3 for i in range(SIZE)], 5, seed=1)},
    "bucket": lambda: {"batch_sampler": BucketBatchSampler(list(range(SIZE)), 5, seed=1)},
    "sharded": lambda: {"sampler": ShardedSampler(ShuffleSampler(SIZE, 3), 1, 2)},
    "sharded, torch's": lambda: {"sampler": ShardedSampler(RandomSampler(range(SIZE), generator=generator()), 1, 2)},
    "sharded batches": lambda: {"batch_sampler": ShardedSampler(BatchSampler(ShuffleSampler(SIZE), 2, True), 1, 2)},
    "infinite": lambda: {"sampler": InfiniteSampler(SIZE, batch_size=2, num_batches=4, seed=1)},
    "weighted, ours": lambda: {"sampler": WeightedSampler(weights(), 11, seed=1)},
    "user's": lambda: {"sampler": Backwards()},
    "user's, as it goes": lambda: {"sampler": AsItGoes()},
    "user's, generator": lambda: {"sampler": AsItGoes(generator())},
    "user's, state": lambda: {"sampler": Stateful(), "generator": generator()},
    "user's, state, short batch": lambda: {"sampler": Stateful(), "batch_size": 5, "seed": 3},
    "user's, state of iterators": lambda: {"sampler": StatefulIterators(), "generator": generator()},
    "user's batches": lambda: {"batch_sampler": TwoByTwo(SequentialSampler(range(SIZE)), shuffle=True)},
    "user's batches, shuffled": lambda: {"batch_sampler": TwoByTwo(RandomSampler(range(SIZE)), shuffle=True)},
    "user's batches, ours": lambda: {"batch_sampler": TwoByTwo(ShuffleSampler(SIZE))},
    "user's batches, state": lambda: {"batch_sampler": TwoByTwo(Stateful())},
}


def loader(arguments: Callable[[], Arguments], num_workers: int, **more: Any) -> DataLoader[Any]:
    defaults = {"dataset": Drawing(), "collate_fn": plain}
    new = arguments()
    if "batch_sampler" not in new:
        defaults["batch_size"] = 2
    if new.get("batch_size", 2) is None:
        del defaults["collate_fn"]
    persistent = more.pop("persistent_workers", False) and num_workers > 0
    return DataLoader(**{**defaults, **new, **more}, num_workers=num_workers, persistent_workers=persistent)


def ways(num_workers: list[int]) -> st.SearchStrategy[Mapping[int, Way]]:
    """Return where a training is cut off, and by how many threads and what kind of loop it goes on each time."""
    return st.dictionaries(
        st.integers(0, NUM_STEPS - 1),
        st.builds(Way, st.sampled_from(num_workers), st.booleans()),
        min_size=2,
        max_size=6,
    )


@cache
def uncut(name: str, num_workers: int) -> list[list[Any]]:
    return train(lambda _: loader(SAMPLERS[name], num_workers, persistent_workers=True), NUM_STEPS)


@pytest.mark.parametrize("name", SAMPLERS)
@given(cuts=ways([0, 1, 3]))
@deterministic
def test_samplers(name: str, cuts: Mapping[int, Way]) -> None:
    assert train(partial(loader, SAMPLERS[name]), NUM_STEPS, cuts) == uncut(name, 0)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "user's" not in name or "," in name][::2])
@given(cuts=ways([1, 3]))
@deterministic
def test_samplers_with_persistent_workers(name: str, cuts: Mapping[int, Way]) -> None:
    got = train(lambda n: loader(SAMPLERS[name], n or 1, persistent_workers=True), NUM_STEPS, cuts)
    assert got == uncut(name, 1)


def shuffled(make: Callable[[Path], Any], folder: Path) -> Arguments:
    return {"dataset": make(folder), "shuffle": True}


DATASETS: dict[str, Callable[[Path], Arguments]] = {
    **{name: partial(shuffled, make) for name, make in MAKE.items()},
    "tensors": lambda _: {"dataset": TensorDataset(torch.arange(SIZE)), "shuffle": True, "collate_fn": None},
    "collated": lambda _: {"dataset": Drawing(), "shuffle": True, "collate_fn": None},
    "items": lambda _: {"dataset": Items()},
    "items, generator": lambda _: {"dataset": Items(), "generator": generator()},
    "items, drop_last": lambda _: {"dataset": Items(), "batch_size": 5, "drop_last": True},
    "items, samples": lambda _: {"dataset": Items(), "batch_size": None, "collate_fn": None},
    "shards": lambda _: {"dataset": Shards(), "iterable_workers": 3},
    "shards, seed": lambda _: {"dataset": Shards(), "iterable_workers": 3, "batch_size": 3, "seed": 5},
    "state": lambda _: {"dataset": Turning()},
    "state, shards": lambda _: {"dataset": Turning(), "iterable_workers": 3},
    "state of iterators": lambda _: {"dataset": Iterating(), "batch_size": 5},
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets(name: str, tmp_path: Path) -> None:
    def make(num_workers: int, **more: Any) -> DataLoader[Any]:
        return loader(partial(DATASETS[name], tmp_path), num_workers, **more)

    expected = train(make, NUM_STEPS)

    @given(cuts=ways([0, 1, 3]))
    @deterministic
    def check(cuts: Mapping[int, Way]) -> None:
        assert train(make, NUM_STEPS, cuts) == expected

    check()
