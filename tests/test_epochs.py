"""Epochs: they count by themselves, ``set_epoch`` sets them, and whoever forgets it with torch's sampler is warned."""

import asyncio
import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.data
from sampling import Drawing, Items, passes, plain
from torch.utils.data import BatchSampler, DistributedSampler

from aioload import DataLoader, ShardedSampler, ShuffleSampler
from aioload.errors import ArgumentError

SIZE = 12


class Noting(torch.utils.data.Dataset[int]):
    """Each sample is the epoch that the dataset was told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return self.epoch


class NotingItems(Noting, torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return (self.epoch for _ in range(SIZE))


class OwnSampler(torch.utils.data.Sampler[int]):
    """Keeps an epoch, as torch's DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class OwnBatches(OwnSampler):
    def __iter__(self) -> Iterator[Any]:
        return iter([range(SIZE)])


def distributed(**arguments: Any) -> "DistributedSampler[Any]":
    return DistributedSampler(range(SIZE), num_replicas=2, rank=0, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [Noting, NotingItems])
def test_set_epoch_is_passed_on_to_the_dataset(kind: type[Noting], num_workers: int, persistent: bool) -> None:
    dataset = kind()
    with DataLoader(dataset, num_workers=num_workers, persistent_workers=persistent) as loader:
        for epoch in (0, 1, 7, 3):
            loader.set_epoch(epoch)
            assert {int(batch) for batch in loader} == {epoch}
        dataset.epoch = 9  # or whoever tells it
        assert {int(batch) for batch in loader} == {9}


def test_set_epoch_is_passed_on_to_every_copy() -> None:
    with DataLoader(NotingItems(), num_workers=2, iterable_workers=2, persistent_workers=True) as loader:
        for epoch in (1, 5):
            loader.set_epoch(epoch)
            assert [int(batch) for batch in loader] == [epoch] * 2 * SIZE


def test_set_epoch_is_passed_on_to_the_sampler() -> None:
    own, inner, batches, theirs = OwnSampler(), OwnSampler(), OwnBatches(), distributed()
    for arguments, sampler in (
        ({"sampler": own}, own),
        ({"batch_sampler": BatchSampler(inner, 3, drop_last=False)}, inner),
        ({"batch_sampler": batches}, batches),
        ({"sampler": theirs}, theirs),
    ):
        loader: DataLoader[Any] = DataLoader(Noting(), num_workers=0, **arguments)
        loader.set_epoch(4)
        assert sampler.epoch == 4


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_each_epoch_has_the_order_that_torchs_sampler_has_for_it(num_workers: int, persistent: bool) -> None:
    epochs, theirs = (0, 1, 5, 1, 1, 2), distributed()
    expected = []
    for epoch in epochs:
        theirs.set_epoch(epoch)
        expected.append(list(theirs))
    assert len({str(order) for order in expected}) == 4

    def set_on_loader(loader: Any, epoch: int) -> None:
        loader.set_epoch(epoch)

    def set_on_sampler(loader: Any, epoch: int) -> None:
        loader.sampler.set_epoch(epoch)

    for set_epoch in (set_on_loader, set_on_sampler):
        got = []
        with DataLoader(
            range(SIZE), 4, sampler=distributed(), num_workers=num_workers, persistent_workers=persistent
        ) as loader, warnings.catch_warnings():  # fmt: skip
            warnings.filterwarnings("ignore", "This pass has the same order", UserWarning)  # of 1 and 1
            for epoch in epochs:
                set_epoch(loader, epoch)
                got.append([number for batch in loader for number in batch.tolist()])
        assert got == expected


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, True])
def test_what_is_no_epoch_is_refused(epoch: Any) -> None:
    loader = DataLoader(Noting())
    with pytest.raises(ArgumentError, match="epoch must be a whole number of at least 0, got"):
        loader.set_epoch(epoch)


def test_epochs_count_by_themselves_and_from_the_one_that_was_set() -> None:
    expected = passes(Drawing(), num_passes=6, num_workers=0)
    for num_workers, persistent in ((0, False), (2, False), (2, True)):
        with DataLoader(
            Drawing(), SIZE, seed=5, num_workers=num_workers, collate_fn=plain, persistent_workers=persistent
        ) as loader:
            got = [batch for _ in range(2) for batch in loader]
            loader.set_epoch(4)
            got += [batch for _ in range(2) for batch in loader]
            loader.set_epoch(1)
            got += list(loader)
        assert got == [expected[epoch] for epoch in (0, 1, 4, 5, 1)]


def test_the_epoch_that_a_sampler_was_set_to_counts() -> None:
    expected = [sorted(samples) for samples in passes(Drawing(), num_passes=6, num_workers=0)]
    makes: list[Callable[[], Any]] = [
        OwnSampler,
        lambda: DistributedSampler(range(SIZE), num_replicas=1, rank=0),  # type: ignore[arg-type]
        lambda: ShuffleSampler(SIZE),
        lambda: ShardedSampler(ShuffleSampler(SIZE), 0, 1),
    ]
    for make in makes:
        sampler = make()
        with DataLoader(Drawing(), SIZE, sampler=sampler, seed=5, num_workers=1, collate_fn=plain) as loader:
            for epoch in (0, 1, 5, 2):
                sampler.set_epoch(epoch)
                (batch,) = loader
                assert sorted(batch) == expected[epoch]


REMAKE: list[Callable[[Any], Any]] = [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


@pytest.mark.parametrize("remake", REMAKE, ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_next_epoch(remake: Callable[[Any], Any]) -> None:
    expected = passes(Drawing(), num_passes=3, shuffle=True, num_workers=0)
    with DataLoader(Drawing(), SIZE, shuffle=True, seed=5, num_workers=1, collate_fn=plain) as loader:
        assert list(loader) == expected[:1]
        with remake(loader) as other:
            assert [*other, *other] == expected[1:]
        assert [*loader, *loader] == expected[1:]


@pytest.mark.parametrize("kind", [Drawing, Items])
def test_every_iter_is_a_fresh_epoch(kind: Any) -> None:
    got = passes(kind(), num_passes=4, num_workers=2)
    assert [[index for index, *_ in samples] for samples in got] == [list(range(SIZE))] * 4
    assert len({str(samples) for samples in got}) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_passes_that_several_threads_begin_at_once_are_epochs_of_their_own(num_workers: int) -> None:
    expected = passes(Drawing(), num_passes=8, shuffle=True, num_workers=0)
    with DataLoader(Drawing(), SIZE, shuffle=True, seed=5, num_workers=num_workers, collate_fn=plain) as loader:
        got: list[Any] = []
        threads = [threading.Thread(target=lambda: got.extend(loader)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(got) == sorted(expected)


# Warnings.


def warned(load: Callable[[], object]) -> list[Any]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load()
    assert all(each.filename == __file__ and each.category is UserWarning for each in seen)
    return [str(each.message) for each in seen]


async def drain(loader: Any) -> None:
    async for _ in loader:
        pass


def by_loop(loader: Any) -> None:
    for _ in loader:
        pass


FACES: list[Callable[[Any], None]] = [by_loop, lambda loader: asyncio.run(drain(loader))]


@pytest.mark.parametrize("face", FACES, ids=["for", "async for"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_distributed_sampler_that_stays_at_its_epoch_is_warned_of_once(
    num_workers: int, face: Callable[[Any], None]
) -> None:
    with DataLoader(range(SIZE), sampler=distributed(), num_workers=num_workers) as loader:
        assert warned(lambda: face(loader)) == []
        (message,) = warned(lambda: face(loader))
        assert "still at epoch 0. Call loader.set_epoch(epoch) before each pass" in message
        assert warned(lambda: face(loader)) == []
    batches = BatchSampler(distributed(), 2, drop_last=False)
    with DataLoader(range(SIZE), batch_sampler=batches, num_workers=num_workers) as loader:
        assert [len(warned(lambda: face(loader))) for _ in range(4)] == [0, 1, 0, 0]


def test_no_warning_where_the_epoch_is_set_or_does_not_matter() -> None:
    def set_on_loader(loader: Any, epoch: int) -> None:
        loader.set_epoch(epoch)

    def set_on_sampler(loader: Any, epoch: int) -> None:
        loader.sampler.set_epoch(epoch)

    def set_the_same(loader: Any, _: int) -> None:  # on purpose
        loader.set_epoch(3)

    for set_epoch in (set_on_loader, set_on_sampler, set_the_same):
        with DataLoader(range(SIZE), sampler=distributed(), num_workers=1) as loader:
            for epoch in range(4):
                set_epoch(loader, epoch)
                assert warned(lambda: by_loop(loader)) == []
    for sampler in (distributed(shuffle=False), ShardedSampler(ShuffleSampler(SIZE), 0, 2), None):
        with DataLoader(range(SIZE), sampler=sampler, num_workers=1) as loader:
            for _ in range(3):
                assert warned(lambda: by_loop(loader)) == []


class Declaring(torch.utils.data.IterableDataset[int]):
    def __init__(self, declared: int, size: int = SIZE) -> None:
        self.declared, self.size = declared, size

    def __len__(self) -> int:
        return self.declared

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


@pytest.mark.parametrize("face", FACES, ids=["for", "async for"])
@pytest.mark.parametrize(("num_workers", "num_lanes"), [(0, 1), (2, 1), (2, 2), (0, 2)])
def test_more_items_than_declared_are_warned_of_once_a_pass(
    num_workers: int, num_lanes: int, face: Callable[[Any], None]
) -> None:
    size = SIZE * num_lanes
    with DataLoader(Declaring(size - 5), 2, num_workers=num_workers, iterable_workers=num_lanes) as loader:
        assert warned(lambda: face(loader)) == []  # nobody has asked for a length
        assert len(loader) == (size - 5 + 1) // 2
        for _ in range(2):
            (message,) = warned(lambda: face(loader))
            assert f"its length is {size - 5}, when len(loader) asked it, and {size - 4} items have come" in message
    for declared in (size, size + 3):
        with DataLoader(Declaring(declared), 2, num_workers=num_workers, iterable_workers=num_lanes) as loader:
            assert len(loader) == (declared + 1) // 2
            assert warned(lambda: face(loader)) == []


def test_multiprocessing_context_is_accepted_with_one_warning() -> None:
    from aioload.arguments import say_once_that_there_are_no_processes

    say_once_that_there_are_no_processes.cache_clear()
    loaders: list[DataLoader[Any]] = []

    def make() -> None:
        loaders.append(DataLoader(range(4), num_workers=1, multiprocessing_context="spawn"))

    (message,) = warned(make)
    assert "multiprocessing_context has no effect" in message
    assert warned(make) == []
    assert [int(batch) for batch in loaders[0]] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="multiprocessing_context"):
        DataLoader(range(4), num_workers=1, multiprocessing_context="no such way")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("pin_memory_device", ["", "cuda"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_pinning_warns_as_torch_does_and_once(pin_memory: bool, pin_memory_device: str, num_workers: int) -> None:
    arguments: Any = {"pin_memory": pin_memory, "pin_memory_device": pin_memory_device}
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        list(torch.utils.data.DataLoader(range(4), **arguments))  # type: ignore[arg-type]
    messages = [str(each.message) for each in theirs]
    for begin in (iter, aiter):
        loader: Any = DataLoader(range(4), num_workers=num_workers, **arguments)
        assert loader.pin_memory_device == pin_memory_device
        assert warned(partial(begin, loader)) == messages
        assert warned(partial(list, loader)) == []
    assert len(messages) == pin_memory * (bool(pin_memory_device) + (not torch.cuda.is_available()))
