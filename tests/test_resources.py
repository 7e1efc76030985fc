"""Resources: what loading takes of the process, its threads, descriptors and memory, and gives back."""

import gc
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import join_all, loader_threads, slots_in_use

from aioload import DataLoader
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems

WAYS: dict[str, dict[str, Any]] = {
    "own threads": {"num_workers": 2},
    "persistent threads": {"num_workers": 2, "persistent_workers": True},
    "no threads": {"num_workers": 0},
}
every_way = pytest.mark.parametrize("arguments", WAYS.values(), ids=list(WAYS))
MB = 1 << 20


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Arrays:
    """Samples of 1 MB."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.full(MB, index, np.uint8)


# Loaders come and go.


@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset, GatedItems, GatedFiles])
@every_way
def test_loaders_that_are_dropped_take_threads_and_files_along(
    kind: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    dataset = kind(tmp_path, 20, opened=True) if kind is GatedFiles else kind(20, opened=True)
    files = num_files()
    most_threads = most_files = 0
    for _ in range(100):
        next(iter(DataLoader(dataset, **arguments)))
        most_threads, most_files = max(most_threads, threading.active_count()), max(most_files, num_files())
    # One set of threads may be about to end when the next one starts.
    assert most_threads <= 1 + 2 * (32 + 2 + 1)
    assert most_files <= files + 2 * 3 + len(dataset)
    assert join_all(loader_threads()) == set()
    assert num_files() == files


@every_way
def test_loaders_that_are_dropped_take_their_memory_along(arguments: dict[str, Any]) -> None:
    def use(times: int) -> int:
        for _ in range(times):
            next(iter(DataLoader(Arrays(), 2, **arguments)))
        gc.collect()
        join_all(loader_threads())
        return resident_bytes()

    before = use(50)
    # The allocator keeps what it likes for a while; what leaks is there after every round, 200 MB more each time.
    assert any(use(100) - before < 100 * MB for _ in range(3))


@every_way
def test_epochs_do_not_add_up(arguments: dict[str, Any]) -> None:
    with DataLoader(Arrays(), 2, **arguments) as loader:

        def use(times: int) -> int:
            for _ in range(times):
                assert sum(int(batch[0, 0]) for batch in loader) == sum(range(0, 20, 2))
            return resident_bytes()

        before = use(5)
        assert any(use(10) - before < 100 * MB for _ in range(3))
    assert slots_in_use() == []


def test_no_descriptor_is_needed_for_a_batch() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files() + 10, hard))
    try:
        batches = list(DataLoader(Small(), num_workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(batch) for batch in batches] == list(range(1000))


class Small(Arrays):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.array(index)


# Memory.


def test_no_more_is_ahead_than_was_asked_for() -> None:
    asked = 0
    ahead: list[int] = []

    class Watched(Arrays):
        def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
            ahead.append(index // 2 - asked)
            return super().__getitem__(index)

    for _ in DataLoader(Watched(), 2, num_workers=2, prefetch_factor=2):
        asked += 1
    assert max(ahead) <= 4


def test_the_dataset_is_not_copied() -> None:
    names = [f"{number:099}" for number in range(300_000)]  # 45 MB
    before = resident_bytes()
    for _ in DataLoader(names, 1000, num_workers=8, collate_fn=len):
        pass
    assert resident_bytes() - before < 20 * MB


# Errors at random.


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset])
@every_way
def test_each_sample_comes_or_its_error(kind: Any, arguments: dict[str, Any], batch_size: int | None) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        dataset = kind(30, opened=True)
        bad = {index for index in range(30) if dice.random() < 0.3}
        for index in bad:
            dataset.gates.fail(index, LookupError(index))
        with DataLoader(dataset, batch_size, **arguments) as loader:
            delivered, raised = outcomes(iter(loader))
        size = batch_size or 1
        batches = [range(30)[start : start + size] for start in range(0, 30, size)]
        assert delivered == [index for batch in batches if not bad & {*batch} for index in batch]
        assert raised == [min(bad & {*batch}) for batch in batches if bad & {*batch}]


def outcomes(batches: Iterator[Any]) -> tuple[list[int], list[int]]:
    delivered: list[int] = []
    raised: list[int] = []
    while True:
        try:
            delivered += np.atleast_1d(next(batches)).tolist()
        except StopIteration:
            return delivered, raised
        except LookupError as exc:
            raised.append(exc.args[0])


def test_nothing_needs_to_be_pickled(tmp_path: Path) -> None:
    class Local:
        def __init__(self) -> None:
            self.lock, self.file = threading.Lock(), (tmp_path / "bytes").open("rb")
            self.transform: Callable[[int], int] = lambda value: value + 1

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            with self.lock:
                self.file.seek(index)
                return self.transform(self.file.read(1)[0])

    def sum_up(samples: list[int]) -> int:
        return sum(samples)

    (tmp_path / "bytes").write_bytes(bytes(range(10)))
    dataset = Local()
    loader = DataLoader(dataset, 5, num_workers=2, collate_fn=sum_up)
    assert list(loader) == [15, 40]
    dataset.file.close()
