"""The order of samples, and what is drawn from which generator, are those of torch's DataLoader."""

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
import torch.utils.data
from oracle import WAYS, Way, by_async_for, by_for, outcomes
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from aioload import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This pass has the same order:UserWarning")  # of DistributedSampler

Generator: TypeAlias = "torch.Generator | None"

SIZE = 11


class Numbers:
    """Has no rows to gather, other than a TensorDataset."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Any:
        return [range(SIZE)[each] for each in index] if isinstance(index, list) else range(SIZE)[index]


class EveryOther(torch.utils.data.Sampler[int]):
    """A sampler of the user's that keeps a state of its own and draws as it goes."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.epoch = generator, 0

    def __len__(self) -> int:
        return len(range((self.epoch + 1) % 2, SIZE, 2))

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        for index in range(self.epoch % 2, SIZE, 2):
            yield (index + int(torch.randint(SIZE, (), generator=self.generator))) % SIZE


SAMPLERS: dict[str, Callable[[Generator], dict[str, Any]]] = {
    "none": lambda g: {"batch_size": 2, "generator": g},
    "shuffle": lambda g: {"batch_size": 2, "shuffle": True, "generator": g},
    "shuffle of another": lambda g: {"batch_size": 2, "sampler": RandomSampler(range(SIZE)), "generator": g},
    "shuffle, samples": lambda g: {"batch_size": None, "shuffle": True, "generator": g},
    "shuffle, drop_last": lambda g: {"batch_size": 4, "shuffle": True, "drop_last": True, "generator": g},
    "random": lambda g: {"batch_size": 2, "sampler": RandomSampler(range(SIZE), generator=g)},
    "random twice": lambda g: {"batch_size": 3, "sampler": RandomSampler(range(SIZE), num_samples=25, generator=g)},
    "with replacement": lambda g: {
        "batch_size": 4,
        "sampler": RandomSampler(range(SIZE), replacement=True, num_samples=80, generator=g),
        "generator": g,
    },
    "subset": lambda g: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, 9), generator=g)},
    "weighted": lambda g: {"batch_size": 2, "sampler": WeightedRandomSampler([0.1, 0.9, 1], 9, generator=g)},
    "sequential": lambda g: {"batch_size": 2, "sampler": SequentialSampler(range(SIZE)), "generator": g},
    "batches": lambda g: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE), generator=g), 2, drop_last=True)},
    "batches of batches": lambda g: {
        "batch_size": None,
        "sampler": BatchSampler(SubsetRandomSampler(range(SIZE), generator=g), 3, drop_last=False),
        "generator": g,
    },
    "distributed": lambda g: {
        "sampler": DistributedSampler(range(SIZE), num_replicas=2, rank=1, seed=3),  # type: ignore[arg-type]
        "generator": g,
    },
    "list": lambda g: {"batch_size": 2, "sampler": [3, 1, 2], "generator": g},
    "batches in a list": lambda g: {"batch_sampler": [[3, 1], [2]], "generator": g},
    "of the user's": lambda g: {"batch_size": 2, "sampler": EveryOther(g)},
}
every_sampler = pytest.mark.parametrize("arguments", SAMPLERS.values(), ids=SAMPLERS.keys())
DATASETS = {"numbers": Numbers(), "tensors": TensorDataset(torch.arange(SIZE))}

Between: TypeAlias = Callable[[Generator], object]
"""What the user does between two passes."""


def nothing(generator: Generator) -> None:
    pass


def draw(generator: Generator) -> list[float]:
    return [float(torch.rand(())), float(torch.rand((), generator=generator))]


def seed(generator: Generator) -> None:
    torch.manual_seed(7)
    if generator is not None:
        generator.manual_seed(8)


def seed_as_before(generator: Generator) -> None:
    torch.manual_seed(1)
    if generator is not None:
        generator.manual_seed(2)


def draw_and_put_back(generator: Generator) -> list[float]:
    states = torch.get_rng_state(), None if generator is None else generator.get_state()
    drawn = draw(generator)
    torch.set_rng_state(states[0])
    if generator is not None and states[1] is not None:
        generator.set_state(states[1])
    return drawn


BETWEEN = [nothing, draw, seed, seed_as_before, draw_and_put_back]


def by_torch(loader: Any) -> list[Any]:
    return outcomes(iter(loader))


def history(
    kind: type, face: Callable[[Any], Any], given: bool, between: Between, dataset: Any, arguments: Any, **more: Any
) -> list[Any]:
    """Return all that can be seen of three passes and of the generators."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2) if given else None
    seen: list[Any] = []
    loader = kind(dataset, **arguments(generator), **more)
    for _ in range(3):
        seen.append(numbers_in(face(loader)))
        seen.append(state_of(generator))
        seen.append(between(generator))
    if kind is DataLoader:
        loader.close()
    seen.append(state_of(generator))
    return seen


def numbers_in(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [numbers_in(part) for part in batch] if isinstance(batch, list | tuple) else batch


def state_of(generator: Generator) -> list[bytes]:
    states = [torch.get_rng_state()] + ([] if generator is None else [generator.get_state()])
    return [bytes(state.numpy()) for state in states]


@pytest.mark.parametrize("given", [True, False], ids=["generator", "manual_seed"])
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS.keys())
@every_sampler
def test_three_passes(arguments: Any, dataset: Any, given: bool) -> None:
    expected = history(torch.utils.data.DataLoader, by_torch, given, draw, dataset, arguments)
    for way in WAYS:
        got = history(DataLoader, way.face, given, draw, dataset, arguments, num_workers=way.num_workers)
        assert got == expected, way


class LookingAhead(torch.utils.data.DataLoader[Any]):
    """Draws indices, and base seeds, when torch's loader with ``num_workers`` processes does, without the processes."""

    def __init__(self, *args: Any, num_workers: int, persistent_workers: bool = False, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.num_ahead, self.persistent, self.has_seed = 2 * num_workers, persistent_workers, False

    def __iter__(self) -> Any:
        indices = iter(self.batch_sampler or self.sampler)
        if not (self.persistent and self.has_seed):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self.has_seed = True
        return self._batches(indices, collections.deque(itertools.islice(indices, self.num_ahead)))

    def _batches(self, indices: Iterator[Any], drawn: "collections.deque[Any]") -> Iterator[Any]:
        while drawn:
            batch = drawn.popleft()
            drawn.extend(itertools.islice(indices, 1))
            if self.batch_sampler is None:
                yield self.collate_fn(self.dataset[batch])
            else:
                yield self.collate_fn([self.dataset[index] for index in batch])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["shuffle", "shuffle, samples", "of the user's", "with replacement"])
def test_the_oracle_draws_as_worker_processes_do(name: str, persistent: bool) -> None:
    more = {"num_workers": 2, "persistent_workers": persistent}
    expected = history(torch.utils.data.DataLoader, by_torch, True, draw, Numbers(), SAMPLERS[name], **more)
    assert history(LookingAhead, by_torch, True, draw, Numbers(), SAMPLERS[name], **more) == expected


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
@pytest.mark.parametrize("given", [True, False], ids=["generator", "manual_seed"])
@every_sampler
def test_three_passes_of_persistent_workers(arguments: Any, given: bool, between: Between) -> None:
    """The next pass begins early, and nobody can tell."""
    for way in (Way(1, by_for), Way(3, by_async_for)):
        more = {"num_workers": way.num_workers, "persistent_workers": True}
        expected = history(LookingAhead, by_torch, given, between, DATASETS["numbers"], arguments, **more)
        got = history(DataLoader, way.face, given, between, DATASETS["numbers"], arguments, **more)
        assert got == expected, way


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("given", [True, False], ids=["generator", "manual_seed"])
@pytest.mark.parametrize("name", ["shuffle", "batches", "of the user's", "subset"])
def test_passes_that_are_broken_off(name: str, given: bool, persistent: bool) -> None:
    def broken_off(loader: Any, num_batches: int) -> list[Any]:
        batches = iter(loader)
        return list(itertools.islice(batches, num_batches))

    def passes(loader: Any) -> list[Any]:
        return [batch for num_batches in (0, 3, 1, 9, 2, 9, 4, 5) for batch in broken_off(loader, num_batches)]

    for num_workers in (1, 2, 3):
        more = {"num_workers": num_workers, "persistent_workers": persistent}
        expected = history(LookingAhead, passes, given, draw, Numbers(), SAMPLERS[name], **more)
        assert history(DataLoader, passes, given, draw, Numbers(), SAMPLERS[name], **more) == expected, num_workers


def test_what_the_user_draws_within_a_pass_is_not_disturbed() -> None:
    def drawing(loader: Any) -> list[Any]:
        return [(batch, float(torch.rand(()))) for batch in loader]

    for arguments in (SAMPLERS["shuffle"], SAMPLERS["weighted"], SAMPLERS["with replacement"]):
        expected = history(torch.utils.data.DataLoader, drawing, False, draw, Numbers(), arguments)
        assert history(DataLoader, drawing, False, draw, Numbers(), arguments, num_workers=0) == expected
        for num_workers, persistent in itertools.product((1, 3), (False, True)):
            more = {"num_workers": num_workers, "persistent_workers": persistent}
            expected = history(LookingAhead, drawing, False, draw, Numbers(), arguments, **more)
            assert history(DataLoader, drawing, False, draw, Numbers(), arguments, **more) == expected, more


@pytest.mark.parametrize("persistent", [False, True])
def test_two_passes_at_once(persistent: bool) -> None:
    def pairs(loader: Any) -> list[Any]:
        return [pair for both in zip(loader, loader, strict=True) for pair in both]

    for name in ("none", "shuffle", "batches", "weighted"):
        for num_workers in (1, 3):
            more = {"num_workers": num_workers, "persistent_workers": persistent}
            expected = history(LookingAhead, pairs, True, draw, Numbers(), SAMPLERS[name], **more)
            assert history(DataLoader, pairs, True, draw, Numbers(), SAMPLERS[name], **more) == expected, more


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_without_order_the_same_batches_come(way: Way) -> None:
    generator = torch.Generator().manual_seed(3)
    loader: DataLoader[Any] = DataLoader(
        Numbers(), 2, shuffle=True, generator=generator, num_workers=way.num_workers, in_order=False
    )
    got = sorted(batch.tolist() for batch in way.face(loader))
    generator.manual_seed(3)
    expected = torch.utils.data.DataLoader(Numbers(), 2, shuffle=True, generator=generator)  # type: ignore[arg-type,var-annotated]
    assert got == sorted(batch.tolist() for batch in expected)
