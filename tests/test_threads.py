"""Threads: as many as were asked for, what each may prepare, and what happens when there are none to be had."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from conftest import join_all, loader_threads

from aioload import DataLoader, FileDataset
from aioload.engine import threads
from aioload.testing import AsyncGatedDataset, GatedDataset


def test_no_more_threads_than_asked_for_and_torch_keeps_its_own() -> None:
    def num_native() -> int:
        return len(os.listdir("/proc/self/task"))

    before, num_torch = num_native(), torch.get_num_threads()
    for number, _ in enumerate(DataLoader(np.zeros((20, 1000)), 2, num_workers=4)):
        assert num_native() <= before + 4 + 2, number
        assert torch.get_num_threads() == num_torch


def test_one_worker_loads_one_sample_at_a_time() -> None:
    dataset = GatedDataset(20, opened=True)
    with DataLoader(dataset, 4, num_workers=1) as loader:
        for _ in range(2):
            assert len(list(loader)) == 5
    assert dataset.gates.max_in_flight == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_each_thread_may_open_a_handle_of_its_own(persistent: bool, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(range(100)))
    local = threading.local()
    numbers: list[int] = []
    files: list[BinaryIO] = []

    def open_handle(number: int) -> None:
        numbers.append(number)
        local.file = (tmp_path / "numbers").open("rb")
        files.append(local.file)

    class Seeking:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            local.file.seek(index)
            return int(local.file.read(1)[0])

    loader = DataLoader(Seeking(), 5, num_workers=3, worker_init_fn=open_handle, persistent_workers=persistent)
    for _ in range(2):
        assert [int(value) for batch in loader for value in batch] == list(range(100))
    assert sorted(numbers) == sorted([0, 1, 2] * (1 if persistent else 2))
    loader.close()
    for file in files:
        file.close()


def test_a_worker_init_fn_that_fails_ends_the_threads() -> None:
    class BrokenError(Exception):
        pass

    def fail(number: int) -> None:
        if number == 1:
            raise BrokenError

    for persistent in (False, True):
        loader = DataLoader(range(100), num_workers=3, worker_init_fn=fail, persistent_workers=persistent)
        with pytest.raises(BrokenError):
            list(loader)
        assert join_all(loader_threads()) == set()
        with pytest.raises(BrokenError):
            list(loader)


def test_a_worker_init_fn_that_raises_stop_iteration_does_not_end_the_loop() -> None:
    def fail(_: int) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(range(100), num_workers=3, worker_init_fn=fail))


def test_reading_and_decoding_a_file_takes_one_job_each(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(200)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 4096)
    decoding: dict[int, str] = {}

    def decode(data: bytes, index: int) -> int:
        decoding[index] = threading.current_thread().name
        assert data == bytes([index]) * 4096
        return index

    loader = DataLoader(FileDataset(paths, decode), 16, num_workers=2)
    assert [int(value) for batch in loader for value in batch] == list(range(200))
    assert all(name.startswith(("aioload-decode-", "aioload-read-")) for name in decoding.values())
    assert loader.stats().bytes_read == 200 * 4096


# The system has no thread to give.


@contextmanager
def no_threads() -> Iterator[None]:
    """Ask for a stack that no address space holds."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}, {"worker_init_fn": print}], ids=str)
@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset])
def test_not_one_thread_can_be_started(kind: Any, arguments: dict[str, Any]) -> None:
    loader = DataLoader(kind(8, opened=True), num_workers=2, **arguments)
    with no_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader)
    assert join_all(loader_threads()) == set()
    loader = DataLoader(kind(8, opened=True), num_workers=2)
    assert [int(batch) for batch in loader] == list(range(8))
    loader.close()


def test_not_all_threads_can_be_started() -> None:
    def sampler(stack: Callable[[int], int]) -> Iterator[int]:
        before = threading.stack_size()
        yield 0
        stack(1 << 47)  # one thread has been started
        yield from range(1, 100)
        stack(before)

    loader = DataLoader(GatedDataset(100, opened=True), sampler=sampler(threading.stack_size), num_workers=8)
    assert [int(batch) for batch in loader] == list(range(100))


class Falling(threading.Thread):
    """Falls, when it is started, over a lock of its own, as one does when an interrupt comes then."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def start(self) -> None:
        try:
            raise self.error
        finally:
            threading.Lock().release()


@pytest.mark.parametrize(("error", "comes"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(), RuntimeError)])
def test_an_interrupt_of_a_start_is_told_as_one(error: BaseException, comes: type[BaseException]) -> None:
    with pytest.raises(comes):
        threads.start(Falling(error))
