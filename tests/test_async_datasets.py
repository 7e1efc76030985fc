"""Datasets that are awaited: on one event loop, so many at once, and whatever their coroutines do to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from conftest import join_all, loader_threads

from aioload import DataLoader
from aioload.errors import EngineError
from aioload.testing import AsyncGatedDataset


async def drain(batches: AsyncIterator[Any]) -> list[int]:
    return [int(batch) async for batch in batches]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
async def test_as_many_samples_are_awaited_at_once_as_asked_for(batch_size: int) -> None:
    with AsyncGatedDataset(100) as dataset:
        batches = aiter(DataLoader(dataset, batch_size, num_workers=1, num_concurrent_reads=10))
        waiting = asyncio.create_task(anext(batches))
        await asyncio.to_thread(dataset.gates.wait_num_started, 10)
        assert sorted(dataset.gates.started) == list(range(10))
        assert dataset.gates.finished == []
        dataset.gates.open_all()
        await waiting
        assert [int(value) async for batch in batches for value in batch] == list(range(batch_size, 100))
        assert dataset.gates.max_in_flight == 10
        assert set(dataset.gates.threads.values()) == {"aioload-loop"}


class Session:
    """Works on the event loop that it was made on, and nowhere else; it has a task of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self.task = self.loop.create_task(self.serve())

    async def serve(self) -> None:
        while True:
            index, answer = await self.requests.get()
            answer.set_result(index)

    async def get(self, index: int) -> int:
        assert asyncio.get_running_loop() is self.loop
        answer: asyncio.Future[int] = self.loop.create_future()
        await self.requests.put((index, answer))
        return await answer


class Remote:
    """Asks a session, which it makes when it is first asked itself."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def __len__(self) -> int:
        return 20

    async def __getitem__(self, index: int) -> int:
        if not self.sessions:
            self.sessions.append(Session())
        return await self.sessions[0].get(index)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("face", ["for", "async for"])
def test_a_session_lives_as_long_as_the_loader(face: str, persistent: bool) -> None:
    dataset = Remote()
    with DataLoader(dataset, 3, num_workers=2, persistent_workers=persistent) as loader:
        for _ in range(3):
            for _ in loader:
                break
            got = list(loader) if face == "for" else asyncio.run(collect(loader))
            assert [int(value) for batch in got for value in batch] == list(range(20))
    (session,) = dataset.sessions
    assert session.task.cancelled()
    assert session.loop.is_closed()


async def collect(loader: DataLoader[Any]) -> list[Any]:
    return [batch async for batch in loader]


def test_a_session_without_threads() -> None:
    dataset = Remote()
    with DataLoader(dataset, num_workers=0) as loader:
        for _ in range(3):
            assert [int(batch) for batch in loader] == list(range(20))
    (session,) = dataset.sessions
    assert session.task.cancelled()
    assert session.loop.is_closed()


async def test_a_session_is_closed_with_a_loader_that_was_dropped_in_a_coroutine() -> None:
    dataset = Remote()
    async for _ in DataLoader(dataset, num_workers=1):
        break
    assert join_all(loader_threads()) == set()
    (session,) = dataset.sessions
    assert session.task.cancelled()
    assert session.loop.is_closed()


class Doing(AsyncGatedDataset):
    """Does something for sample 2."""

    def __init__(self, do: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(5, opened=True)
        self.do = do

    async def __getitem__(self, index: int) -> int:
        if index == 2:
            await self.do()
        return await super().__getitem__(index)


async def outcome(batches: AsyncIterator[Any]) -> list[Any]:
    got: list[Any] = []
    while True:
        try:
            got.append(int(await anext(batches)))
        except StopAsyncIteration:
            return got
        except BaseException as exc:
            got.append(type(exc))


async def raise_cancelled() -> None:
    raise asyncio.CancelledError


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancel_itself_later() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("num_concurrent_reads", [1, 5])
@pytest.mark.parametrize("do", [raise_cancelled, cancel_itself])
async def test_a_dataset_that_cancels_itself(do: Callable[[], Awaitable[Any]], num_concurrent_reads: int) -> None:
    loader = DataLoader(Doing(do), num_workers=1, num_concurrent_reads=num_concurrent_reads)
    assert await outcome(aiter(loader)) == [0, 1, asyncio.CancelledError, 3, 4]
    loader.close()


async def test_a_dataset_that_has_its_task_cancelled_at_the_next_await() -> None:
    loader = DataLoader(Doing(cancel_itself_later), num_workers=1, num_concurrent_reads=1)
    assert await outcome(aiter(loader)) == [0, 1, 2, 3, 4]
    loader.close()


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def exit_in_a_task_of_its_own() -> None:
    async def leave() -> None:
        raise SystemExit

    await asyncio.create_task(leave())


@pytest.mark.parametrize("do", [stop_the_loop, exit_in_a_task_of_its_own])
@pytest.mark.parametrize("persistent", [False, True])
async def test_a_dataset_that_breaks_the_loop(do: Callable[[], Awaitable[Any]], persistent: bool) -> None:
    dataset = Doing(do)
    loader = DataLoader(dataset, num_workers=1, num_concurrent_reads=1, persistent_workers=persistent)
    batches = aiter(loader)
    with pytest.raises(EngineError, match="The loop's thread failed"):
        await drain(batches)
    with pytest.raises(EngineError, match="The loop's thread failed"):
        await drain(batches)
    dataset.do = lambda: asyncio.sleep(0)
    assert await drain(aiter(loader)) == [0, 1, 2, 3, 4]
    loader.close()
