"""Closing: whoever waits is told, and nobody waits for what is stuck. Collecting garbage closes too, anywhere."""

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import join_all, loader_threads

from aioload import DataLoader
from aioload.errors import LoaderClosedError
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedItems, Gates

KINDS = [GatedDataset, AsyncGatedDataset, GatedItems]
both_lives = pytest.mark.parametrize("persistent", [False, True], ids=["own threads", "persistent threads"])


def drain(batches: Iterator[Any]) -> list[int]:
    return [int(batch) for batch in batches]


@pytest.mark.parametrize("what", ["iterator", "loader"])
@pytest.mark.parametrize("kind", KINDS)
@both_lives
def test_close_while_a_read_is_stuck_and_another_thread_waits(kind: Any, what: str, persistent: bool) -> None:
    with kind(4) as dataset, ThreadPoolExecutor(2) as pool:
        loader = DataLoader(dataset, num_workers=2, persistent_workers=persistent)
        batches = iter(loader)
        waiting = pool.submit(next, batches)
        dataset.gates.wait_started(0)
        closing = pool.submit((batches if what == "iterator" else loader).close)
        with pytest.raises(LoaderClosedError, match="closed"):
            waiting.result(60)
        dataset.gates.open_all()
        closing.result(60)
        with pytest.raises(LoaderClosedError, match="closed"):
            next(batches)
        batches.close()
        loader.close()
        assert drain(iter(loader)) == [0, 1, 2, 3]
        loader.close()


@both_lives
def test_close_does_not_wait_for_what_is_stuck(persistent: bool) -> None:
    with GatedDataset(4) as dataset:
        loader = DataLoader(dataset, num_workers=2, persistent_workers=persistent)
        batches = iter(loader)
        dataset.gates.wait_started(0, 1)
        loader.close()
        assert dataset.gates.in_flight == 2
        with pytest.raises(LoaderClosedError):
            next(batches)


@pytest.mark.parametrize("what", ["iterator", "loader"])
@pytest.mark.parametrize("kind", KINDS)
@both_lives
async def test_close_while_a_read_is_stuck_and_a_coroutine_waits(kind: Any, what: str, persistent: bool) -> None:
    with kind(4) as dataset:
        loader = DataLoader(dataset, num_workers=2, persistent_workers=persistent)
        batches = aiter(loader)
        waiting = asyncio.create_task(anext(batches))
        await asyncio.to_thread(dataset.gates.wait_started, 0)
        closing = asyncio.create_task(batches.aclose() if what == "iterator" else loader.__aexit__())
        with pytest.raises(LoaderClosedError, match="closed"):
            await waiting
        dataset.gates.open_all()
        await closing
        with pytest.raises(LoaderClosedError, match="closed"):
            await anext(batches)
        await batches.aclose()
        assert [int(batch) async for batch in loader] == [0, 1, 2, 3]
        loader.close()


@pytest.mark.parametrize("what", ["iterator", "loader"])
async def test_the_event_loop_goes_on_while_closing_waits_for_threads(what: str) -> None:
    with GatedDataset(4) as dataset:
        loader = DataLoader(dataset, num_workers=2)
        batches = aiter(loader)
        waiting = asyncio.create_task(anext(batches))
        await asyncio.to_thread(dataset.gates.wait_started, 0, 1)
        closing = asyncio.create_task(batches.aclose() if what == "iterator" else loader.__aexit__())
        with pytest.raises(LoaderClosedError):
            await waiting
        assert not closing.done()  # both threads are stuck
        dataset.gates.open_all()  # by the event loop that closing would hold up
        await closing
        assert dataset.gates.in_flight == 0
        assert not any("decode" in thread.name for thread in loader_threads())


def test_close_when_all_that_may_be_ahead_is() -> None:
    dataset = GatedDataset(40, opened=True)
    batches = iter(DataLoader(dataset, num_workers=2, prefetch_factor=3))
    dataset.gates.wait_num_started(6)
    batches.close()
    assert join_all(loader_threads()) == set()
    assert len(dataset.gates.started) == 6


@both_lives
def test_close_while_a_sampler_thinks(persistent: bool) -> None:
    sampler = GatedSampler(8)
    sampler.gates.open(*range(4))
    loader = DataLoader(range(8), sampler=sampler, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, batches)  # to take a batch is to draw the next indices
        sampler.gates.wait_started(4)
        loader.close()
        assert join_all(loader_threads()) == set()
        sampler.gates.open_all()
        assert waiting.exception(60) is None or isinstance(waiting.exception(), LoaderClosedError)
    with pytest.raises(LoaderClosedError):
        next(batches)


async def test_close_while_a_sampler_thinks_about_its_first_index() -> None:
    sampler = GatedSampler(8)
    loader = DataLoader(range(8), sampler=sampler, num_workers=2)
    batches = aiter(loader)
    waiting = asyncio.create_task(anext(batches))
    await asyncio.to_thread(sampler.gates.wait_started, 0)
    closing = asyncio.create_task(batches.aclose())
    with pytest.raises(LoaderClosedError):
        await waiting
    sampler.gates.open_all()
    await closing


class GatedSampler:
    """Draws 0, 1, ... as the test opens their gates."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gates = Gates()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for index in range(self.size):
            self.gates.pass_through(index)
            yield index


def test_many_threads_close_at_once() -> None:
    for _ in range(20):
        loader = DataLoader(range(100), num_workers=2, persistent_workers=True)
        batches = [iter(loader) for _ in range(3)]
        with ThreadPoolExecutor(8) as pool:
            everything: list[Any] = [loader, *batches, loader, *batches]
            closing = [pool.submit(each.close) for each in everything]
        assert [each.result() for each in closing] == [None] * 8
        for each in batches:
            with pytest.raises(LoaderClosedError):
                next(each)


def test_iterators_begun_while_another_thread_closes_the_loader() -> None:
    loader = DataLoader(range(10), num_workers=2, persistent_workers=True)

    def consume() -> None:
        for _ in range(50):
            with contextlib.suppress(LoaderClosedError):
                assert drain(iter(loader)) == list(range(10))

    with ThreadPoolExecutor(2) as pool:
        consumers = [pool.submit(consume) for _ in range(2)]
        while not all(consumer.done() for consumer in consumers):
            loader.close()
        for consumer in consumers:
            consumer.result()
    loader.close()


# Garbage collections come at any time, in any thread.


class Collecting(GatedDataset):
    """Collects garbage for each sample, on whatever thread loads it."""

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return super().__getitem__(index)


class AsyncCollecting(AsyncGatedDataset):
    async def __getitem__(self, index: int) -> int:
        gc.collect()
        return await super().__getitem__(index)


@pytest.mark.parametrize("kind", [Collecting, AsyncCollecting])
@both_lives
def test_iterators_collected_on_a_loading_thread(kind: Any, persistent: bool) -> None:
    def abandon(loader: DataLoader[Any]) -> None:
        batches: Any = iter(loader)
        next(batches)
        batches.loader = loader
        batches.itself = batches

    gc.disable()
    try:
        with DataLoader(kind(20, opened=True), num_workers=2, persistent_workers=persistent) as loader:
            for _ in range(5):
                abandon(DataLoader(range(10), num_workers=2, persistent_workers=persistent))
                abandon(DataLoader(AsyncGatedDataset(10, opened=True), persistent_workers=persistent, num_workers=1))
                abandon(loader)
            assert drain(iter(loader)) == list(range(20))
    finally:
        gc.enable()
    assert join_all(loader_threads()) == set()
