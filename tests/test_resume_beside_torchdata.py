"""Cut anywhere, a training goes on as with torchdata's StatefulDataLoader, and where that one errs, as if uncut."""

import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.utils.data
from resuming import OVER, again_is_no_surprise, numbers_in
from sampling import SIZE
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from aioload import DataLoader
from aioload.errors import StateError
from aioload.testing import GatedDataset

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it

Arguments: TypeAlias = dict[str, Any]
NUM_PASSES = 3


class Numbers:
    """Each sample is its index."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Any:
        return index


class Parts(IterableDataset[int]):
    """Keeps no state. Each worker yields a part."""

    def __iter__(self) -> Iterator[int]:
        number, num_workers = worker()
        return iter(range(number, SIZE, num_workers))


class Turning(Parts):
    """Keeps its place, and the number of passes. Each pass begins elsewhere."""

    def __init__(self) -> None:
        self.place, self.num_passes = 0, 0

    def __iter__(self) -> Iterator[int]:
        number, num_workers = worker()
        while self.place < SIZE:
            place, self.place = self.place, self.place + 1
            if place % num_workers == number:
                yield (place + self.num_passes) % SIZE
        self.place, self.num_passes = 0, self.num_passes + 1

    def state_dict(self) -> Arguments:
        return vars(self)  # alive

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Iterating(Parts):
    """Its iterators keep their place."""

    def __iter__(self) -> Iterator[int]:
        return Place(*worker())


class Place:
    def __init__(self, place: int, step: int) -> None:
        self.place, self.step = place, step

    def __iter__(self) -> "Place":
        return self

    def __next__(self) -> int:
        if self.place >= SIZE:
            raise StopIteration
        self.place += self.step
        return self.place - self.step

    def state_dict(self) -> Arguments:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


def worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def weighted(**arguments: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([0.5 + index for index in range(SIZE)], 9, **arguments)


def distributed(kind: Any) -> Any:
    return kind(range(SIZE), num_replicas=2, rank=1)


def everywhere(_: int, __: int) -> bool:
    return True


def in_the_first_pass(step: int, length: int) -> bool:
    """torchdata saves the generator of none but its own samplers, and a new process has it as it was at first."""
    return step < length


def within_passes(step: int, length: int) -> bool:
    """torchdata's distributed sampler is at its end, by its state, until the next pass has been asked for an index."""
    return step < length or step % length > 1


def before_a_worker_is_done(step: int, _: int) -> bool:
    """In torchdata's state, one that is done with its part has a dataset that is about to begin anew, and does."""
    return step < 4


def nowhere(_: int, __: int) -> bool:
    return False


class Case(NamedTuple):
    """Arguments of a loader, over ``Numbers`` if there is no dataset among them.

    ``is_right`` is given a step, and the number of steps of a pass: whether torchdata goes on from a cut before that
    step as if uncut.
    """

    make: Callable[[], Arguments]
    is_right: Callable[[int, int], bool] = everywhere
    has_our_order: bool = True


CASES: dict[str, Case] = {
    "list": Case(lambda: {"dataset": list(range(SIZE)), "batch_size": 5}),
    "drop_last": Case(lambda: {"batch_size": 5, "drop_last": True}),
    "tensors": Case(lambda: {"dataset": TensorDataset(torch.arange(SIZE)), "batch_size": 3}),
    "samples": Case(lambda: {"batch_size": None}),
    "indices": Case(lambda: {"batch_size": 2, "sampler": [3, 1, 4, 1, 5, 9]}),
    "batches": Case(lambda: {"batch_sampler": [[3, 1], [4], [1, 5, 9]]}),
    # Its sampler has a generator of its own, or draws the order before the base seed is drawn, not after that.
    "shuffle": Case(lambda: {"batch_size": 5, "shuffle": True}, has_our_order=False),
    "shuffle, samples": Case(
        lambda: {"batch_size": None, "shuffle": True, "generator": generator()},
        nowhere,  # it draws a base seed before it puts the generator back, and none after that
        has_our_order=False,
    ),
    "random": Case(
        lambda: {"batch_size": 5, "sampler": RandomSampler(range(SIZE), generator=generator())},
        in_the_first_pass,
    ),
    "random batches": Case(
        lambda: {
            "batch_sampler": BatchSampler(RandomSampler(range(SIZE), generator=generator()), 5, drop_last=True),
        },
        in_the_first_pass,
    ),
    "subset": Case(
        lambda: {"sampler": SubsetRandomSampler(range(2, 7), generator=generator())},
        in_the_first_pass,
    ),
    "weighted": Case(lambda: {"batch_size": 2, "sampler": weighted(generator=generator())}, in_the_first_pass),
    # It draws the indices again from the global generator, wherever that is by then.
    "weighted, global": Case(lambda: {"batch_size": 2, "sampler": weighted()}, nowhere),
    "distributed": Case(lambda: {"batch_size": 2, "sampler": distributed(DistributedSampler)}),
    # Samplers of torchdata's, whose iterators, or they themselves, have a state.
    "torchdata's random": Case(
        lambda: {"batch_size": 5, "sampler": torchdatas_random()},
    ),
    "torchdata's random, samples": Case(
        lambda: {"batch_size": None, "sampler": torchdatas_random()},
    ),
    "torchdata's with replacement": Case(
        lambda: {"batch_size": 9, "sampler": torchdatas_random(replacement=True, num_samples=40)},
    ),
    "torchdata's distributed": Case(
        lambda: {"batch_size": 2, "sampler": distributed(StatefulDistributedSampler)},
        within_passes,
    ),
    "items": Case(lambda: {"dataset": Parts(), "batch_size": 5}),
    "items, drop_last": Case(lambda: {"dataset": Parts(), "batch_size": 5, "drop_last": True}),
    "items, samples": Case(lambda: {"dataset": Parts(), "batch_size": None}),
    "state": Case(lambda: {"dataset": Turning(), "batch_size": 5}),
    "state, drop_last": Case(lambda: {"dataset": Turning(), "batch_size": 5, "drop_last": True}),
    "state, samples": Case(lambda: {"dataset": Turning(), "batch_size": None}),
    "state of iterators": Case(lambda: {"dataset": Iterating(), "batch_size": 5}),
}


def torchdatas_random(**arguments: Any) -> Any:
    return StatefulRandomSampler(range(SIZE), generator=generator(), **arguments)


def ours(arguments: Arguments, num_workers: int) -> Any:
    return DataLoader(**{"dataset": Numbers(), **arguments}, num_workers=num_workers)


def ours_in_turn(arguments: Arguments, num_workers: int) -> Any:
    """Return a loader that goes over an iterable dataset by as many iterators as torch has processes."""
    if isinstance(arguments.get("dataset"), IterableDataset):
        arguments = {**arguments, "iterable_workers": num_workers}
    return ours(arguments, num_workers)


def theirs(arguments: Arguments, num_workers: int) -> Any:
    context = "fork" if num_workers else None
    return StatefulDataLoader(
        **{"dataset": Numbers(), **arguments}, num_workers=num_workers, multiprocessing_context=context
    )


Kind: TypeAlias = Callable[[Arguments, int], Any]


def train(kind: Kind, name: str, num_workers: int, num_steps: int, cut: int | None = None) -> list[list[Any]]:
    """Return what the passes of a training give, which goes on in what could be a new process before step ``cut``.

    To begin a pass is a step, and so is to ask for a batch or for the end. A checkpoint is written to a file: the state
    of the loader, and of torch's global generator.
    """
    torch.manual_seed(1)
    loader, passing, passes = kind(CASES[name].make(), num_workers), None, list[list[Any]]()
    for step in range(num_steps):
        if step == cut:
            checkpoint = pickle.dumps((loader.state_dict(), torch.get_rng_state()))
            loader = kind(CASES[name].make(), num_workers)
            state, rng_state = pickle.loads(checkpoint)
            loader.load_state_dict(state)
            torch.set_rng_state(rng_state)
            passing = None if passing is None else begin(loader)
        if passing is None:
            passing = begin(loader)
            passes.append([])
            continue
        got = next(passing, OVER)
        passing = None if got is OVER else passing
        passes[-1].append(got if got is OVER else numbers_in(got))
    return passes


def begin(loader: Any) -> Any:
    with again_is_no_surprise():
        return iter(loader)


def length_of(name: str, kind: Kind = ours, num_workers: int = 0) -> int:
    """Return the number of steps of a pass."""
    return 2 + sum(1 for _ in kind(CASES[name].make(), num_workers))


@pytest.mark.parametrize("name", CASES)
def test_cut_before_any_step(name: str) -> None:
    case, length = CASES[name], length_of(name)
    num_steps = 2 * length + 2  # into a third pass, whose order and place the second left behind
    expected = train(ours, name, 0, num_steps)
    uncut = train(theirs, name, 0, num_steps)
    assert (uncut == expected) is case.has_our_order
    for cut in range(num_steps):
        is_right = case.is_right(cut, length)
        if is_right:
            assert train(theirs, name, 0, num_steps, cut) == uncut, cut
        if is_right or case.is_right is not within_passes:  # we have nothing but the sampler's word for that either
            assert train(ours, name, cut % 3, num_steps, cut) == expected, cut


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "is_right", "has_our_order"),
    [
        ("list", everywhere, True),
        ("torchdata's random", everywhere, False),  # its iterator is made twice, and draws an order each time
        ("items", everywhere, True),
        ("state", before_a_worker_is_done, True),
        ("state of iterators", everywhere, True),
    ],
)
def test_cut_beside_two_processes(name: str, is_right: Callable[[int, int], bool], has_our_order: bool) -> None:
    length = length_of(name, ours_in_turn, 2)
    num_steps = length + 2
    expected = train(ours_in_turn, name, 2, num_steps)
    uncut = train(theirs, name, 2, num_steps)
    assert (uncut == expected) is has_our_order
    for cut in (2, 4, length - 1, length):
        if is_right(cut, length):
            assert train(theirs, name, 2, num_steps, cut) == uncut, cut
        assert train(ours_in_turn, name, 2, num_steps, cut) == expected, cut


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Turning, Iterating])
def test_a_state_that_is_kept_in_memory_while_the_loader_goes_on(dataset: Callable[[], Any], num_workers: int) -> None:
    """torchdata's, without workers, has the very dict that the dataset gave, and that may have changed since."""
    expected = numbers_in(list(DataLoader(dataset(), 2, num_workers=0)))
    with DataLoader(dataset(), 2, num_workers=num_workers) as loader:
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    for number, state in enumerate(states):
        with DataLoader(dataset(), 2, num_workers=num_workers) as loader:
            loader.load_state_dict(state)
            assert numbers_in(list(loader)) == expected[number:]


def test_what_came_early_and_what_is_late_come_once() -> None:
    """torchdata's state counts batches, and without order their number does not say which they were."""
    for num_batches in range(1, SIZE):
        with GatedDataset(SIZE) as dataset, DataLoader(dataset, num_workers=3, in_order=False) as loader:
            dataset.gates.open(*range(1, SIZE))
            got = [int(batch) for batch in itertools.islice(loader, num_batches)]
            state = loader.state_dict()
        assert 0 not in got
        with GatedDataset(SIZE, opened=True) as dataset, DataLoader(dataset, num_workers=3, in_order=False) as loader:
            loader.load_state_dict(state)
            assert sorted(got + [int(batch) for batch in loader]) == list(range(SIZE))


def test_its_state_is_refused_clearly() -> None:
    loader = StatefulDataLoader(range(SIZE), 2)
    next(iter(loader))
    with pytest.raises(StateError, match="load_state_dict needs what state_dict"):
        DataLoader(range(SIZE), 2).load_state_dict(loader.state_dict())
