"""Arguments, attributes and errors of the loader itself are those of torch's DataLoader."""

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from oracle import NUM_WORKERS, outcomes
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, default_collate

from aioload import DataLoader, LocalReader
from aioload.errors import ArgumentError
from aioload.testing import SimulatedDevice

TorchLoader = torch.utils.data.DataLoader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


def sum_of(samples: list[int]) -> int:
    return sum(samples)


def start(number: int) -> None:
    pass


def test_every_argument_of_torch_is_there_by_the_same_name_in_the_same_place() -> None:
    ours, theirs = (list(inspect.signature(kind.__init__).parameters.values()) for kind in (DataLoader, TorchLoader))
    by_name = {parameter.name: parameter for parameter in ours}
    for position, parameter in enumerate(theirs):
        assert by_name[parameter.name].kind is parameter.kind
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert ours[position].name == parameter.name
    same = {"batch_size", "shuffle", "drop_last", "timeout", "persistent_workers", "in_order", "generator"}
    assert all(by_name[parameter.name].default == parameter.default for parameter in theirs if parameter.name in same)


GENERATOR = torch.Generator()
SAMPLER = RandomSampler(range(5))
BATCHES = BatchSampler(SAMPLER, 2, drop_last=True)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "batch_size": {"batch_size": 3},
    "no batch_size": {"batch_size": None},
    "shuffle": {"shuffle": True},
    "no shuffle": {"shuffle": False},
    "sampler": {"sampler": SAMPLER},
    "batch_sampler": {"batch_sampler": BATCHES},
    "collate_fn": {"collate_fn": sum_of},
    "drop_last": {"batch_size": 2, "drop_last": True},
    "generator": {"generator": GENERATOR, "shuffle": True},
    "timeout": {"num_workers": 2, "timeout": 3.5},
    "workers": {"num_workers": 2},
    "all of the workers": {
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "worker_init_fn": start,
        "in_order": False,
    },
}
ATTRIBUTES = [
    "batch_sampler",
    "batch_size",
    "collate_fn",
    "dataset",
    "drop_last",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "sampler",
    "timeout",
    "worker_init_fn",
]


@pytest.mark.parametrize("dataset", [range(5), Stream()], ids=["map", "iterable"])
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_attributes_are_those_of_torch(arguments: dict[str, Any], dataset: Any) -> None:
    arguments = {"num_workers": 0, **arguments}
    try:
        theirs = TorchLoader(dataset, **arguments)
    except ValueError:
        assert refusal(DataLoader, dataset, arguments) is not None
        return
    ours = DataLoader(dataset, **arguments)
    for name in ATTRIBUTES:
        assert plain(getattr(ours, name)) == plain(getattr(theirs, name)), name
    assert {name for name in vars(theirs) if not name.startswith("_")} <= vars(ours).keys()


def plain(value: Any) -> Any:
    """Return something that can be compared."""
    if isinstance(value, BatchSampler):
        return type(value), plain(value.sampler), value.batch_size, value.drop_last
    if isinstance(value, RandomSampler | SequentialSampler):
        return type(value), value.data_source, getattr(value, "generator", None)
    return type(value) if type(value).__name__ == "_InfiniteConstantSampler" else value


EXCLUSIVE: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampler and shuffle": (range(5), {"sampler": SAMPLER, "shuffle": True}),
    "batch_sampler and batch_size": (range(5), {"batch_sampler": BATCHES, "batch_size": 2}),
    "batch_sampler and no batch_size": (range(5), {"batch_sampler": BATCHES, "batch_size": None}),
    "batch_sampler and shuffle": (range(5), {"batch_sampler": BATCHES, "shuffle": True}),
    "batch_sampler and sampler": (range(5), {"batch_sampler": BATCHES, "sampler": SAMPLER}),
    "batch_sampler and drop_last": (range(5), {"batch_sampler": BATCHES, "drop_last": True}),
    "no batch_size and drop_last": (range(5), {"batch_size": None, "drop_last": True}),
    "iterable and shuffle": (Stream(), {"shuffle": True}),
    "iterable and sampler": (Stream(), {"sampler": SAMPLER}),
    "iterable and batch_sampler": (Stream(), {"batch_sampler": BATCHES}),
    "negative num_workers": (range(5), {"num_workers": -1}),
    "negative timeout": (range(5), {"timeout": -1}),
    "persistent without workers": (range(5), {"num_workers": 0, "persistent_workers": True}),
    "prefetch without workers": (range(5), {"num_workers": 0, "prefetch_factor": 3}),
    "negative prefetch_factor": (range(5), {"num_workers": 1, "prefetch_factor": -1}),
    "batch_size 0": (range(5), {"batch_size": 0}),
    "negative batch_size": (range(5), {"batch_size": -1}),
    "broken batch_size": (range(5), {"batch_size": 2.5}),
    "batch_size True": (range(5), {"batch_size": True}),
    "drop_last of 1": (range(5), {"batch_size": 2, "drop_last": 1}),
    "shuffle of nothing": ([], {"shuffle": True}),
    "shuffle without length": (NoLength(), {"shuffle": True}),
    "generator of another kind": (range(5), {"shuffle": True, "generator": 3}),
}


@pytest.mark.parametrize(("dataset", "arguments"), EXCLUSIVE.values(), ids=EXCLUSIVE.keys())
def test_what_torch_refuses_is_refused_in_the_same_way(dataset: Any, arguments: dict[str, Any]) -> None:
    assert refusal(DataLoader, dataset, arguments) == refusal(TorchLoader, dataset, arguments)


def refusal(kind: Any, dataset: Any, arguments: dict[str, Any]) -> Any:
    """Return the error of making a loader, or else of its first batch."""
    try:
        next(iter(kind(dataset, **{"num_workers": 0, **arguments})))
    except Exception as exc:
        return type(exc), str(exc)
    return None


@pytest.mark.parametrize(
    "name",
    [
        *("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"),
        *("device", "device_transform", "seed", "iterable_workers", "reader"),
    ],
)
def test_what_cannot_be_set_afterwards(name: str) -> None:
    loader: DataLoader[Any] = DataLoader(range(5), num_workers=0)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
        setattr(loader, name, None)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"seed": -1}, ArgumentError),
        ({"seed": 1 << 64}, ArgumentError),
        ({"seed": 1.0}, ArgumentError),
        ({"seed": 1, "generator": torch.Generator()}, ArgumentError),
        ({"iterable_workers": 0}, ArgumentError),
        ({"iterable_workers": 2}, ArgumentError),
        ({"reader": LocalReader()}, ArgumentError),
        ({"reader": object()}, ArgumentError),
        ({"device": "meta"}, ArgumentError),
        ({"device": "no such device"}, ArgumentError),
        ({"device": 3.5}, ArgumentError),
        ({"num_workers": 0, "timeout": 1}, ArgumentError),
        ({"num_concurrent_reads": 0}, ArgumentError),
        ({"num_concurrent_reads": 2.5}, ArgumentError),
        ({"num_device_batches": 0}, ArgumentError),
        ({"device_transform": len}, ArgumentError),
        ({"device": SimulatedDevice(), "device_transform": 1}, ArgumentError),
        ({"num_device_batches": 1.5}, ArgumentError),
        ({"num_workers": 2, "prefetch_factor": 0}, ArgumentError),
        ({"prefetch_factor": 0}, ArgumentError),
        ({"no_such_argument": 1}, TypeError),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_arguments_that_are_not_torchs(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        DataLoader(range(5), **arguments)
    assert next(reversed(arguments)) in str(caught.value)


def test_nothing_ahead_is_refused_also_when_a_pass_begins() -> None:
    """torch refuses it then and not before."""
    loader = DataLoader(range(5), num_workers=2)
    loader.prefetch_factor = 0
    for begin in (iter, aiter):
        with pytest.raises(ArgumentError, match="prefetch_factor must be at least 1 where num_workers is 2, got 0"):
            begin(loader)
    loader.num_workers, loader.prefetch_factor = 0, None
    assert [int(batch) for batch in loader] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_at_once() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(ValueError, match=r"needs a device that is there, but torch .* sees none beside"):
            DataLoader(range(5), device=device)


def test_defaults_that_are_ours() -> None:
    loader: DataLoader[Any] = DataLoader(range(5))
    assert loader.device == torch.device("cpu")
    assert loader.num_workers >= 1
    assert loader.prefetch_factor == 2
    assert isinstance(loader, TorchLoader)
    assert loader.collate_fn is default_collate


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_a_loader_can_be_made_again_from_its_attributes(arguments: dict[str, Any]) -> None:
    """As Lightning and others do, to put in a sampler of their own."""
    loader = DataLoader(range(5), **{"num_workers": 0, **arguments})
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if hasattr(loader, name)]
    found = {name: getattr(loader, name) for name in names if name != "batch_sampler"}
    if loader.batch_sampler is not None:
        own = {"batch_size", "shuffle", "sampler", "drop_last"}
        found = {name: value for name, value in found.items() if name not in own}
        found["batch_sampler"] = loader.batch_sampler
    again = type(loader)(**found)
    assert found.keys() >= {"dataset", "num_workers", "collate_fn", "device", "num_concurrent_reads", "in_order"} | {
        "num_device_batches"
    }
    torch.manual_seed(1), GENERATOR.manual_seed(1)
    expected = sorted(str(batch) for batch in loader)
    torch.manual_seed(1), GENERATOR.manual_seed(1)
    assert sorted(str(batch) for batch in again) == expected
    loader.close()
    again.close()


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))]


@pytest.mark.parametrize("remake", COPIES, ids=["deepcopy", "copy", "pickle"])
@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_a_loader_can_be_copied_at_any_time_and_an_iterator_never(remake: Any, num_workers: int) -> None:
    generator = torch.Generator().manual_seed(2)
    loader: DataLoader[Any] = DataLoader(
        range(6), 2, shuffle=True, generator=generator, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    copies = [remake(loader)]
    batches = iter(loader)
    next(batches)
    copies.append(remake(loader))
    for iterator in (batches, aiter(loader)):
        for fails in [*COPIES, pickle.dumps]:
            with pytest.raises(TypeError, match="cannot be pickled or copied; pickle the DataLoader instead"):
                fails(iterator)
    assert len(list(batches)) == 2
    copies.append(remake(loader))
    for each in copies:
        assert type(each) is DataLoader
        assert plain(each.num_workers) == num_workers
        assert sorted(number for batch in each for number in batch.tolist()) == list(range(6))
        each.close()
    loader.close()
    first = remake(DataLoader(range(6), 2, num_workers=num_workers, device="cpu"))
    assert [batch.tolist() for batch in first] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_len_is_the_number_of_batches(num_workers: int) -> None:
    for size, batch_size, drop_last in itertools.product((0, 1, 5, 6), (None, 1, 2, 3, 9), (False, True)):
        if batch_size is None and drop_last:
            continue
        for sampler in (None, [0] * size, RandomSampler(range(size), num_samples=size + 1) if size else None):
            loader: DataLoader[Any] = DataLoader(
                range(size), batch_size, sampler=sampler, drop_last=drop_last, num_workers=num_workers
            )
            with loader:
                batches = iter(loader)
                assert len(loader) == len(batches) == len(outcomes(batches))


def test_len_where_there_is_none() -> None:
    for dataset, arguments in ((Stream(), {}), (range(3), {"sampler": iter([1])}), (NoLength(), {})):
        loader: DataLoader[Any] = DataLoader(dataset, **arguments)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            len(loader)
