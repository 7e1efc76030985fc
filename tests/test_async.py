"""The async face: any number of coroutines, loaders and event loops, and datasets that are awaited."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aioload import DataLoader, error_context
from aioload.errors import RunningLoopError
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedItems, Gates

every_way = pytest.mark.parametrize("num_workers", [0, 2])


async def drain(batches: AsyncIterator[Any]) -> list[int]:
    return [int(batch) async for batch in batches]


# Several of everything.


@every_way
@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset, GatedItems])
async def test_coroutines_that_share_an_iterator_get_each_batch_once(kind: Any, num_workers: int) -> None:
    batches = aiter(DataLoader(kind(50, opened=True), num_workers=num_workers))
    async with asyncio.TaskGroup() as group:
        consumers = [group.create_task(drain(batches)) for _ in range(5)]
    assert sorted(index for consumer in consumers for index in consumer.result()) == list(range(50))


@every_way
async def test_coroutines_with_iterators_of_their_own_get_all_batches(num_workers: int) -> None:
    loader = DataLoader(AsyncGatedDataset(20, opened=True), num_workers=num_workers)
    async with asyncio.TaskGroup() as group:
        consumers = [group.create_task(drain(aiter(loader))) for _ in range(5)]
    assert [consumer.result() for consumer in consumers] == [list(range(20))] * 5
    loader.close()


async def test_threads_and_coroutines_that_share_a_loader() -> None:
    def drain_here() -> list[int]:
        return [int(batch) for batch in loader]

    loader = DataLoader(range(50), num_workers=2, persistent_workers=True)
    async with asyncio.TaskGroup() as group:
        consumers = [group.create_task(drain(aiter(loader))) for _ in range(2)]
        consumers += [group.create_task(asyncio.to_thread(drain_here)) for _ in range(2)]
    assert [consumer.result() for consumer in consumers] == [list(range(50))] * 4
    loader.close()


@every_way
async def test_two_loaders_at_once(num_workers: int) -> None:
    one, other = (DataLoader(kind(10, opened=True), num_workers=num_workers) for kind in (GatedDataset, GatedItems))
    others = aiter(other)
    assert [(int(batch), int(await anext(others))) async for batch in one] == [(i, i) for i in range(10)]
    assert await drain(others) == []


@every_way
@pytest.mark.parametrize("kind", [GatedDataset, GatedItems])
async def test_a_plain_loop_in_a_coroutine(kind: Any, num_workers: int) -> None:
    assert [int(batch) for batch in DataLoader(kind(10, opened=True), num_workers=num_workers)] == list(range(10))


async def test_a_plain_loop_in_a_coroutine_over_an_async_dataset() -> None:
    loader = DataLoader(AsyncGatedDataset(10, opened=True), num_workers=1)
    assert [int(batch) for batch in loader] == list(range(10))
    loader.close()


async def test_a_plain_loop_in_a_coroutine_needs_a_thread_for_an_async_dataset() -> None:
    loader = DataLoader(AsyncGatedDataset(10, opened=True), num_workers=0)
    batches = iter(loader)
    with pytest.raises(RunningLoopError, match=r"num_workers=0 .* Use 'async for', or num_workers=1 or more") as caught:
        next(batches)
    assert error_context(caught.value) is None
    assert await asyncio.to_thread(lambda: [int(batch) for batch in batches]) == list(range(10))
    assert await drain(aiter(loader)) == list(range(10))
    loader.close()


@every_way
@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset, GatedItems])
def test_one_event_loop_after_the_other(kind: Any, num_workers: int) -> None:
    loader = DataLoader(kind(10, opened=True), num_workers=num_workers)
    for _ in range(2):
        assert asyncio.run(drain(aiter(loader))) == list(range(10))
        assert [int(batch) for batch in loader] == list(range(10))
    loader.close()


def test_a_pass_goes_on_in_another_event_loop() -> None:
    async def take(count: int) -> list[int]:
        return [int(await anext(batches)) for _ in range(count)]

    with GatedDataset(10) as dataset:
        batches = aiter(DataLoader(dataset, num_workers=2))
        with pytest.raises(TimeoutError):
            asyncio.run(give_up(batches))
        dataset.gates.open_all()
        assert asyncio.run(take(4)) == [0, 1, 2, 3]
        assert asyncio.run(take(4)) == [4, 5, 6, 7]
        assert asyncio.run(drain(batches)) == [8, 9]


async def give_up(batches: AsyncIterator[Any]) -> None:
    async with asyncio.timeout(0):
        await anext(batches)


def test_the_event_loop_of_a_waiting_consumer_is_closed() -> None:
    with GatedDataset(4) as dataset:
        batches = aiter(DataLoader(dataset, num_workers=2))
        loop = asyncio.new_event_loop()
        task = loop.create_task(anext(batches))
        dataset.gates.open(1)
        loop.run_until_complete(asyncio.to_thread(dataset.gates.wait_finished, 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        dataset.gates.open_all()
        assert asyncio.run(drain(batches)) == [0, 1, 2, 3]


# Cancellation.


@every_way
async def test_no_batch_is_lost_by_cancelling(num_workers: int) -> None:
    with AsyncGatedDataset(8) as dataset:
        batches = aiter(DataLoader(dataset, 2, num_workers=num_workers))
        for number in range(4):
            waiting = asyncio.create_task(anext(batches))
            dataset.gates.open(2 * number)
            await asyncio.to_thread(dataset.gates.wait_started, 2 * number + 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            dataset.gates.open(2 * number + 1)
            assert (await anext(batches)).tolist() == [2 * number, 2 * number + 1]
        assert await drain(batches) == []


@every_way
async def test_no_batch_is_lost_by_cancelling_one_of_two(num_workers: int) -> None:
    with AsyncGatedDataset(8) as dataset:
        batches = aiter(DataLoader(dataset, num_workers=num_workers))
        one = asyncio.create_task(anext(batches))
        other = asyncio.create_task(drain(batches))
        await asyncio.to_thread(dataset.gates.wait_started, 0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        dataset.gates.open_all()
        assert sorted(await other) == list(range(8))


async def test_giving_up_again_and_again_leaves_nothing_behind() -> None:
    with GatedDataset(2) as dataset:
        batches = aiter(DataLoader(dataset, num_workers=1))
        for _ in range(100):
            with pytest.raises(TimeoutError):
                await give_up(batches)
        assert len(batches._pass.run._handoff._waiters) == 0  # type: ignore[union-attr]
        dataset.gates.open_all()
        assert await drain(batches) == [0, 1]


async def test_cancelling_while_the_sampler_thinks_about_its_first_index() -> None:
    gates = Gates()

    def sampler() -> Iterator[int]:
        gates.pass_through("first")
        yield from range(4)

    batches = aiter(DataLoader(range(4), sampler=sampler(), num_workers=1))
    consumers = [asyncio.create_task(anext(batches)) for _ in range(2)]
    await asyncio.to_thread(gates.wait_started, "first")
    consumers[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumers[0]
    gates.open_all()
    assert int(await consumers[1]) == 0
    assert await drain(batches) == [1, 2, 3]


# The sampler runs on the loop's thread before the first batch.


def raising(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
async def test_an_error_of_the_sampler_before_the_first_index(error: BaseException) -> None:
    sampler = map(raising, [error])
    batches = aiter(DataLoader(range(4), sampler=sampler, num_workers=1))
    with pytest.raises(type(error)) as caught:
        await anext(batches)
    assert caught.value is error
    assert await drain(batches) == []
