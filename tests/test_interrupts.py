"""Interrupts: Ctrl-C reaches the consumer at once, and no batch is lost by it."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import join_all, loader_threads

from aioload import DataLoader, TensorDataset
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedItems


def interrupt_when(ready: Callable[[], None]) -> threading.Thread:
    """Send this process a SIGINT, as Ctrl-C does, when ``ready`` returns."""

    def send() -> None:
        ready()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset, GatedItems])
@pytest.mark.parametrize("persistent", [False, True], ids=["own threads", "persistent threads"])
def test_no_batch_is_lost_by_an_interrupt_while_waiting(kind: Any, persistent: bool) -> None:
    with (
        kind(8) as dataset,
        DataLoader(dataset, num_workers=2, persistent_workers=persistent) as loader,
    ):
        batches = iter(loader)
        for index in range(8):
            with pytest.raises(KeyboardInterrupt):
                wait_interrupted(batches, lambda: dataset.gates.wait_started(index))  # noqa: B023
            dataset.gates.open(index)
            assert int(next(batches)) == index
        assert list(batches) == []


def wait_interrupted(batches: Iterator[Any], ready: Callable[[], None]) -> None:
    thread = interrupt_when(ready)
    try:
        next(batches)
    finally:
        thread.join()


class Interrupted(GatedDataset):
    """Ctrl-C comes once while each of the samples is loaded."""

    def __getitem__(self, index: int) -> int:
        if index not in self.gates.started:
            self.gates.pass_through(index)
            signal.raise_signal(signal.SIGINT)
        return index


class AsyncInterrupted(Interrupted):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitem__(index)


class InterruptedItems(GatedItems):
    def __init__(self, size: int, *, opened: bool) -> None:
        super().__init__(size, opened=opened)
        self.position = -1
        self.interrupted = False

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        self.position += 1
        if self.position == self.size:
            raise StopIteration
        self.interrupted = False
        return self.position


@pytest.mark.parametrize(
    ("kind", "num_interrupts"),
    [(Interrupted, 6), (AsyncInterrupted, 6), (InterruptedItems, 7)],  # once more at the end of the items
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_no_batch_is_lost_by_an_interrupt_without_threads(kind: Any, num_interrupts: int, drop_last: bool) -> None:
    batches = iter(DataLoader(kind(6, opened=True), 2, num_workers=0, drop_last=drop_last))
    got, interrupts = [], 0
    while True:
        try:
            got.append(next(batches).tolist())
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert got == [[0, 1], [2, 3], [4, 5]]
    assert interrupts == num_interrupts


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupted_sampler_does_not_end_the_pass_in_silence(num_workers: int) -> None:
    def sampler() -> Iterator[int]:
        yield from range(5)
        signal.raise_signal(signal.SIGINT)  # kills this generator
        yield 5

    batches = iter(DataLoader(range(6), sampler=sampler(), num_workers=num_workers))
    got, interrupts = [], 0
    while True:
        try:
            got.append(int(next(batches)))
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert got == [0, 1, 2, 3, 4]
    assert interrupts == 2  # when it came, and in place of the end


def test_an_interrupted_loop_stops_loading_though_its_traceback_is_kept() -> None:
    dataset = GatedDataset(1000, opened=True)

    def consume() -> None:
        batches = iter(DataLoader(dataset, num_workers=2))  # stays in the traceback
        for batch in batches:
            if batch == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        consume()
    kept = [caught]
    del caught
    dataset.gates.wait_num_started(8)  # four consumed, four ahead
    kept.clear()
    gc.collect()
    assert join_all(loader_threads()) == set()
    assert len(dataset.gates.started) == 8


class InterruptingIndex:
    """An index that Ctrl-C comes to once, when a batch is gathered from tensors."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.interrupted = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        return np.array(self.index)

    def __int__(self) -> int:
        return self.index


def test_no_batch_is_lost_by_an_interrupt_while_it_is_gathered() -> None:
    sampler = [*range(5), InterruptingIndex(5), *range(6, 10)]
    batches = iter(DataLoader(TensorDataset(torch.arange(10)), sampler=sampler, num_workers=2))
    got, interrupts = [], 0
    while True:
        try:
            got.append(int(next(batches)[0]))
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert (got, interrupts) == (list(range(10)), 1)
