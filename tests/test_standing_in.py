"""Standing in for torch's loader with those who take a loader apart, make another of its parts, or set the pace."""

import collections
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.utils.data
from oracle import assert_same
from outcomes import EVERY_WAY, FACES, Load
from sharding import Sharded
from structures import MyDict, Pair
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler

from aioload import DataLoader, ShuffleSampler

TorchLoader = torch.utils.data.DataLoader
Arguments: TypeAlias = dict[str, Any]
SIZE = 11


def begin(_: int) -> None:
    pass


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


MADE_WITH: dict[str, Callable[[], Arguments]] = {
    "nothing": dict,
    "batches": lambda: {"batch_size": 4},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "samples": lambda: {"batch_size": None, "shuffle": True, "generator": generator()},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "sampler": lambda: {"batch_size": 4, "sampler": RandomSampler(range(SIZE), generator=generator())},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(range(SIZE), 3, drop_last=True)},
    "collate_fn": lambda: {"batch_size": 4, "collate_fn": sum},
    "threads": lambda: {"batch_size": 2, "num_workers": 2},
    "all about threads": lambda: {
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "timeout": 60,
        "worker_init_fn": begin,
        "multiprocessing_context": "fork",
    },
    "items": lambda: {"dataset": Sharded(), "batch_size": 4},
    "items, samples": lambda: {"dataset": Sharded(), "batch_size": None},
}
OURS: dict[str, Callable[[], Arguments]] = {
    "seed": lambda: {"batch_size": 4, "shuffle": True, "seed": 3},
    "seed, samples": lambda: {"batch_size": None, "shuffle": True, "seed": 3},
    "sampler of ours": lambda: {"sampler": ShuffleSampler(SIZE, 3)},
    "iterators": lambda: {"dataset": Sharded(), "iterable_workers": 2, "num_workers": 2},
    "errors": lambda: {"on_error": "skip", "max_errors": 5},
    "device and reads": lambda: {"device": "cpu", "num_concurrent_reads": 5},
}


def made_with(arguments: Arguments) -> Any:
    """Return a loader of ours, with no threads unless they are asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "multiprocessing_context has no effect", UserWarning)
        return DataLoader(**{"dataset": list(range(SIZE)), "num_workers": 0, **arguments})


def parts_of(loader: Any, kind: Any) -> Arguments:
    """Return arguments for a loader of another kind, as found in the attributes of this one.

    As Lightning does, and accelerate, which know neither how a loader was made nor its class.
    """
    found = {name: getattr(loader, name) for name in inspect.signature(kind).parameters if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        implied = {"sampler", "batch_sampler"}
    else:
        implied = {"batch_sampler"} if loader.batch_sampler is None else {"batch_size", "sampler", "drop_last"}
    return {name: value for name, value in found.items() if name not in implied}


def of_a_new_process(batches: Any) -> list[Any]:
    torch.manual_seed(1)
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def test_it_is_a_loader_of_torch() -> None:
    loader: DataLoader[Any] = DataLoader(range(SIZE))
    assert isinstance(loader, TorchLoader)
    assert not [name for name in dir(TorchLoader(range(SIZE))) if not hasattr(loader, name)]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", [*MADE_WITH, *OURS])
def test_a_loader_of_torch_can_be_made_of_its_parts(name: str) -> None:
    arguments = (MADE_WITH | OURS)[name]
    with made_with(arguments()) as loader:
        expected = of_a_new_process(loader)
    again = TorchLoader(**parts_of(made_with(arguments()), TorchLoader))
    assert of_a_new_process(again) == expected
    if name in MADE_WITH:
        plain = TorchLoader(**{"dataset": list(range(SIZE)), **arguments()})
        assert of_a_new_process(plain) == expected


@pytest.mark.parametrize("name", [*MADE_WITH, *OURS])
def test_a_loader_of_ours_can_be_made_of_its_parts(name: str) -> None:
    arguments = (MADE_WITH | OURS)[name]
    with made_with(arguments()) as loader:
        expected = of_a_new_process(loader)
    parts = parts_of(made_with(arguments()), DataLoader)
    with made_with(parts) as again:
        assert of_a_new_process(again) == expected
    given = arguments()
    assert given.keys() <= parts.keys() | {"shuffle", "batch_size", "sampler", "drop_last"}
    assert {
        name: value for name, value in given.items() if isinstance(value, int) and name in parts
    }.items() <= parts.items()


@pytest.mark.parametrize("name", [name for name in MADE_WITH if "threads" not in name])
def test_a_loader_of_ours_can_be_made_of_the_parts_of_torchs(name: str) -> None:
    def theirs() -> Any:
        return TorchLoader(**{"dataset": list(range(SIZE)), **MADE_WITH[name]()})

    expected = of_a_new_process(theirs())
    for num_workers in (0, 2):
        with made_with({**parts_of(theirs(), DataLoader), "num_workers": num_workers}) as loader:
            assert of_a_new_process(loader) == expected


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"shuffle": True, "seed": 3}, {"drop_last": True}], ids=str)
def test_a_sampler_can_be_put_in_that_is_told_its_epochs_directly(arguments: Arguments) -> None:
    def part(kind: Any, loader: Any, rank: int) -> list[Any]:
        sampler: Any = DistributedSampler(loader.dataset, 2, rank, seed=4, drop_last=loader.drop_last)
        parts = parts_of(loader, kind) | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        again = kind(**{**parts, "batch_sampler": None, "sampler": sampler})
        seen = []
        for epoch in (0, 1, 4, 1):
            again.batch_sampler.sampler.set_epoch(epoch)
            seen.append(of_a_new_process(again))
        return seen

    for num_workers in (0, 2):
        with made_with({"batch_size": 2, "num_workers": num_workers, **arguments}) as loader:
            ranks = [part(DataLoader, loader, rank) for rank in (0, 1)]
        without = made_with({"batch_size": 2, **arguments})
        assert ranks == [part(TorchLoader, without, rank) for rank in (0, 1)]
        assert ranks[0][1] == ranks[0][3] != ranks[0][0]


# Other paces.


def in_step(loaders: list[Any]) -> Iterator[Any]:
    return zip(*loaders, strict=False)


def until_the_longest_ends(loaders: list[Any]) -> Iterator[list[Any]]:
    """Begin shorter ones again until each has been passed over once."""
    passing, ended = [iter(loader) for loader in loaders], set[int]()
    while True:
        got = []
        for number, loader in enumerate(loaders):
            try:
                got.append(next(passing[number]))
            except StopIteration:
                ended.add(number)
                if len(ended) == len(loaders):
                    return
                passing[number] = iter(loader)
                got.append(next(passing[number]))
        yield got


def one_after_the_other(loaders: list[Any]) -> Iterator[Any]:
    return itertools.chain(*loaders)


@pytest.mark.parametrize("pace", [in_step, until_the_longest_ends, one_after_the_other])
def test_several_loaders_are_passed_over_as_trainers_do(pace: Callable[[list[Any]], Iterator[Any]]) -> None:
    def run(kind: Any, *, shuffle: bool, **more: Any) -> list[Any]:
        first = kind(list(range(SIZE)), 2, shuffle=shuffle, generator=generator(), **more)
        second = kind(list(range(100, 103)), shuffle=shuffle, generator=generator(), **more)
        together = [[first, second], [second, first], [first, first], [second, first, second]]
        return [[numbers_in(batches) for batches in pace(loaders)] for loaders in together]

    expected = run(TorchLoader, shuffle=True)
    assert run(DataLoader, shuffle=True, num_workers=0) == expected
    expected = run(TorchLoader, shuffle=False)
    for more in ({"num_workers": 0}, {"num_workers": 1}, {"num_workers": 3, "persistent_workers": True}):
        assert run(DataLoader, shuffle=False, **more) == expected


def numbers_in(batches: Any) -> Any:
    return batches.tolist() if isinstance(batches, torch.Tensor) else [batch.tolist() for batch in batches]


class Repeating:
    """Yields what a batch sampler yields, over and over."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batch_sampler


def never_ending(kind: Any) -> Any:
    """Return a kind of loader that has one pass for all epochs, as object detectors have it."""

    class NeverEnding(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            self.num_batches = len(self.batch_sampler)
            object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
            self.passing = super().__iter__()

        def __len__(self) -> int:
            return self.num_batches

        def __iter__(self) -> Iterator[Any]:
            return itertools.islice(self.passing, self.num_batches)

    return NeverEnding


def test_a_subclass_may_repeat_its_sampler_for_ever() -> None:
    def epochs(kind: Any, **more: Any) -> list[Any]:
        sampler = RandomSampler(range(SIZE), generator=generator())
        loader = never_ending(kind)(list(range(SIZE)), 4, sampler=sampler, **more)
        return [[batch.tolist() for batch in loader] for _ in range(3)]

    expected = epochs(TorchLoader)
    assert expected[0] != expected[1]
    for more in ({"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        assert epochs(DataLoader, **more) == expected


class Endless(IterableDataset[int]):
    def __init__(self) -> None:
        self.num_drawn = 0

    def __iter__(self) -> Iterator[int]:
        for self.num_drawn in itertools.count(1):
            yield self.num_drawn - 1


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_endless_data_is_drawn_as_far_as_it_is_asked_for(batch_size: int | None) -> None:
    size = batch_size or 1
    for num_workers in (0, 2):
        for dataset, sampler in ((Endless(), None), (Squares(), Endless())):
            source: Any = sampler or dataset
            loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=num_workers)
            for _ in range(2):
                got = [
                    int(number)
                    for batch in itertools.islice(loader, 10)
                    for number in torch.as_tensor(batch).reshape(-1)
                ]
                assert got == [number if sampler is None else number**2 for number in range(10 * size)]
                assert source.num_drawn <= (10 + 2 * num_workers) * size
            loader.close()


class Squares:
    def __getitem__(self, index: int) -> int:
        return index**2


# What a dataset is told, and what becomes of its samples.


class InShards(IterableDataset[int]):
    """Complains, as stores of shards do, of workers for whom there is none."""

    num_shards = 3

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        number, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if num_workers > self.num_shards:
            warnings.warn(f"Too many workers: {num_workers} for {self.num_shards} shards.", UserWarning, stacklevel=2)
        for shard in range(number, self.num_shards, num_workers):
            yield from range(10 * shard, 10 * shard + 4)


@pytest.mark.parametrize("load", EVERY_WAY)
def test_no_worker_is_without_a_shard(load: Load) -> None:
    expected = [[number] for shard in range(3) for number in range(10 * shard, 10 * shard + 4)]
    for num_workers in (1, 4, 8):
        more = {"num_workers": num_workers} if load in FACES else {}
        assert load(InShards(), **more) == expected
        assert sorted(load(InShards(), iterable_workers=3, **more)) == expected
    with pytest.warns(UserWarning, match="Too many workers: 4 for 3 shards"):
        assert sorted(load(InShards(), iterable_workers=4)) == expected


class Own:
    """Pins itself, and needs no device for that."""

    def __init__(self, numbers: Any, *, is_pinned: bool = False) -> None:
        self.numbers, self.is_pinned = numbers, is_pinned

    def pin_memory(self) -> "Own":
        return Own(self.numbers, is_pinned=True)


KINDS: dict[str, Callable[[int], Any]] = {
    "dict": lambda i: {"x": i},
    "dict subclass": lambda i: MyDict({"x": i}, origin="here"),
    "OrderedDict": lambda i: collections.OrderedDict(b=i, a=i),
    "named tuple": lambda i: Pair(i, "s"),
    "tensor": lambda i: torch.ones(2) * i,
    "list": lambda i: [i, {"x": torch.ones(2)}],
}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinning_is_nothing_where_there_is_nothing_to_pin_for(num_workers: int) -> None:
    pinning = partial(DataLoader, num_workers=num_workers, pin_memory=True)
    for make in KINDS.values():
        samples = [make(i) for i in range(4)]
        for batch_size in (None, 2):
            expected = list(TorchLoader(samples, batch_size))  # type: ignore[arg-type]
            assert_same(list(pinning(samples, batch_size)), expected)
    (batch,) = pinning(range(4), 4, collate_fn=Own)
    assert (batch.numbers, batch.is_pinned) == ([0, 1, 2, 3], False)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_pinned_stays_what_it_is(num_workers: int) -> None:
    pinning = partial(DataLoader, num_workers=num_workers, pin_memory=True)
    for make in KINDS.values():
        samples = [make(i) for i in range(4)]
        for batch_size in (None, 2):
            expected = list(TorchLoader(samples, batch_size, pin_memory=True))  # type: ignore[arg-type]
            assert_same(list(pinning(samples, batch_size)), expected)


def test_mps_pins_nothing_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is said to be there; nothing is asked of it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    makers: list[Any] = [partial(DataLoader, num_workers=1), TorchLoader]
    for make in makers:
        loader = make(range(2), pin_memory=True)
        with pytest.warns(
            UserWarning, match="'pin_memory' argument is set as true but not supported on MPS now, device"
        ):
            assert len(list(loader)) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_what_pins_itself_is_asked_to_where_it_is(
    batch_size: int | None, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is said to be there; nothing is asked of it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))

    def collate(samples: Any) -> Any:
        return MyDict({"own": Own(samples), "pairs": [Pair(Own(samples), "s")]}, origin="here")

    loader = DataLoader([1, 2, 3, 4], batch_size, collate_fn=collate, num_workers=num_workers, pin_memory=True)
    for batch, numbers in zip(loader, [1, 2, 3, 4] if batch_size is None else [[1, 2], [3, 4]], strict=True):
        assert (type(batch), batch.origin) == (MyDict, "here")
        ((pair, name),) = batch["pairs"]
        assert isinstance(batch["pairs"][0], Pair)
        for each in (batch["own"], pair):
            assert (each.numbers, each.is_pinned) == (numbers, True)
        assert name == "s"
