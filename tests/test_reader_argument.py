"""The loader's ``reader``: what it may be, where it and what follows it run, and what becomes of its errors."""

import asyncio
import copy
import functools
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from outcomes import EVERY_WAY, Load, of_iterator

from aioload import AiofilesReader, DataLoader, Dataset, FileDataset, LocalReader, Reader, error_context
from aioload.engine import plan
from aioload.errors import ArgumentError, DatasetError, EngineError, LoaderTimeoutError, RunningLoopError
from aioload.testing import Gates
from aioload.workers import get_worker_info

SIZE = 20


class Numbers(Dataset[int]):
    """Its locations are numbers, and its samples the numbers that a reader made bytes of them."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index

    def location(self, index: int) -> Any:
        return index

    def decode(self, data: Any, _: int) -> int:
        self.threads.add(threading.current_thread().name)
        return int(bytes(data))


class Blocking:
    """Makes the bytes of a number."""

    def __init__(self, *, opened: bool = True, convert: Callable[[bytes], Any] = bytes) -> None:
        self.gates, self.convert = Gates(opened=opened), convert
        self.num_closed = 0

    def read(self, location: int, offset: int = 0, length: int | None = None) -> Any:
        self.gates.pass_through(location)
        return self.convert(b"%d" % location)

    def close(self) -> None:
        self.num_closed += 1


class Awaiting(Blocking):
    loop: asyncio.AbstractEventLoop

    async def read(self, location: int, offset: int = 0, length: int | None = None) -> Any:
        self.loop = asyncio.get_running_loop()
        await self.gates.pass_through_async(location)
        return self.convert(b"%d" % location)

    async def close(self) -> None:  # type: ignore[override]
        self.num_closed += 1


KINDS = [Blocking, Awaiting]
both_kinds = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize("load", EVERY_WAY)


@both_kinds
@every_way
@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, functools.partial(np.frombuffer, dtype=np.uint8)])
def test_decode_gets_what_the_reader_returned(load: Load, kind: Any, convert: Callable[[bytes], Any]) -> None:
    kinds = set()

    class Looking(Numbers):
        def decode(self, data: Any, index: int) -> int:
            kinds.add(type(data))
            return super().decode(data, index)

    assert load(Looking(), batch_size=5, reader=kind(convert=convert)) == np.arange(SIZE).reshape(-1, 5).tolist()
    assert kinds == {type(convert(b"1"))}


@both_kinds
@pytest.mark.parametrize("indices", [range(3, 20), [4, 1]])
def test_a_subset(kind: Any, indices: Any) -> None:
    subset = torch.utils.data.Subset(torch.utils.data.Subset(Numbers(), range(SIZE)), indices)
    with DataLoader(subset, num_workers=2, reader=kind()) as loader:
        assert [int(batch) for batch in loader] == list(indices)


def test_bytes_are_counted_and_not_items() -> None:
    reader = Blocking(convert=lambda data: np.full(3, int(data), np.int64))

    def decode(data: Any, _: int) -> int:
        return int(data[2])

    dataset = FileDataset(range(SIZE), decode)  # type: ignore[arg-type]
    for num_workers in (0, 1):
        with DataLoader(dataset, num_workers=num_workers, reader=reader) as loader:
            assert [int(batch) for batch in loader] == list(range(SIZE))
            assert loader.stats().bytes_read == 24 * SIZE


@both_kinds
@pytest.mark.parametrize("batch_size", [1, 8])
def test_decoding_runs_on_the_decode_threads_alone(kind: Any, batch_size: int) -> None:
    dataset, reader, where = Numbers(), kind(), set()

    def collate(samples: list[int]) -> list[int]:
        where.add(threading.current_thread().name)
        return samples

    with DataLoader(dataset, batch_size, num_workers=2, collate_fn=collate, reader=reader) as loader:
        assert [number for batch in loader for number in batch] == list(range(SIZE))
    if kind is Awaiting:
        assert set(reader.gates.threads.values()) == {"aioload-loop"}
        assert dataset.threads | where <= {"aioload-decode-0", "aioload-decode-1"}
    else:
        assert all(name.startswith("aioload-read-") for name in reader.gates.threads.values())
        assert "aioload-loop" not in dataset.threads | where


@both_kinds
@pytest.mark.parametrize("batch_size", [1, 64])
def test_as_many_reads_are_under_way_as_asked_for(kind: Any, batch_size: int) -> None:
    reader = kind(opened=False)
    with DataLoader(Numbers(), batch_size, num_workers=1, num_concurrent_reads=9, reader=reader) as loader:
        batches = iter(loader)
        reader.gates.wait_num_started(9)
        assert reader.gates.in_flight == loader.stats().reads_in_flight == 9
        reader.gates.open_all()
        assert [number for batch in of_iterator(batches) for number in batch] == list(range(SIZE))
        assert reader.gates.max_in_flight == 9
        stats = loader.stats()
    assert (stats.reads_in_flight, stats.bytes_read) == (0, 30)
    assert stats.read_s > 0


def test_reads_beyond_the_window_wait_when_batches_turn_out_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda: 4 * 1000)  # room for one batch ahead
    reader, begun = Awaiting(opened=False), {}

    class Large(Numbers):
        def decode(self, data: Any, index: int) -> Any:
            # When the loop has done what it had to do, the task that has read this has begun with the next, or not.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), reader.loop).result()
            begun[index] = max(reader.gates.started)
            return np.full(1000, super().decode(data, index), np.uint8)

    with DataLoader(Large(), num_workers=1, prefetch_factor=4, num_concurrent_reads=1, reader=reader) as loader:
        batches = iter(loader)
        reader.gates.open(0)
        assert next(batches)[0].tolist() == [0] * 1000
        reader.gates.open_all()
        assert of_iterator(batches) == [[[index] * 1000] for index in range(1, SIZE)]
    assert begun == {0: 1, **{index: index for index in range(1, SIZE)}}


@both_kinds
@every_way
def test_an_error_arrives_as_it_was(load: Load, kind: Any) -> None:
    reader, error = kind(), OSError(13, "Permission denied", "somewhere")
    reader.gates.fail(2, error)
    outcome = load(Numbers(), batch_size=2, reader=reader)
    assert outcome[1] is error
    assert error_context(error) == (2, 2, "read")
    assert error.__notes__ == ["aioload: failed at stage 'read', index 2, location '2'"]
    assert [each for each in outcome if each is not error] == [[i, i + 1] for i in range(0, SIZE, 2) if i != 2]


@both_kinds
@every_way
def test_errors_may_be_skipped(load: Load, kind: Any) -> None:
    reader = kind()
    reader.gates.fail(2, OSError(5, "Input/output error"))
    reader.gates.fail(3, OSError(5, "Input/output error"))
    assert load(Numbers(), batch_size=2, on_error="skip", reader=reader) == [
        [i, i + 1] for i in range(0, SIZE, 2) if i != 2
    ]


@both_kinds
def test_what_stands_in_for_a_sample_is_not_made_on_the_loop(kind: Any) -> None:
    reader, threads = kind(), set()
    reader.gates.fail(2, OSError(5, "Input/output error"))

    def stand_in(_: Exception) -> int:
        threads.add(threading.current_thread().name)
        return -1

    with DataLoader(Numbers(), 4, num_workers=1, on_error=stand_in, reader=reader) as loader:
        assert next(iter(loader)).tolist() == [0, 1, -1, 3]
    assert threads
    assert "aioload-loop" not in threads


@both_kinds
@every_way
def test_an_error_in_decoding_is_one(load: Load, kind: Any) -> None:
    zero, error, *_ = load(Numbers(), reader=kind(convert=lambda data: data if data != b"1" else b"one"))
    assert (zero, type(error)) == ([0], ValueError)
    assert error_context(error) == (1, 1, "decode")


@both_kinds
@every_way
@pytest.mark.parametrize("wrong", [None, "text", 7, [b"1"]])
def test_what_is_no_bytes_is_refused(load: Load, kind: Any, wrong: Any) -> None:
    first, *_ = load(Numbers(), reader=kind(convert=lambda _: wrong))
    assert isinstance(first, DatasetError)
    assert isinstance(first, TypeError)
    assert str(first) == f"{kind.__name__}.read must return bytes or what has the buffer protocol, got {wrong!r}."
    assert error_context(first) == (0, 0, "read")


@every_way
def test_a_coroutine_that_nobody_would_await_is_refused(load: Load) -> None:
    class Hiding:
        def __init__(self) -> None:
            self.inner = Awaiting()

        def read(self, location: Any, offset: int = 0, length: int | None = None) -> Any:
            return self.inner.read(location)

    first, *_ = load(Numbers(), reader=Hiding())
    assert isinstance(first, DatasetError)
    assert "Hiding.read must return bytes" in str(first)
    assert "Declare it 'async def'" in str(first)


class Items(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class AsyncNumbers(Numbers):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (range(5), "got range, which lacks one of them"),
        (Items(), "got Items, which is iterated over"),
        (AsyncNumbers(), "got AsyncNumbers, whose __getitem__ is async and reads by itself"),
        (torch.utils.data.ConcatDataset([Numbers()]), "got ConcatDataset, which lacks one of them"),
        (torch.utils.data.Subset(AsyncNumbers(), [1]), "got Subset, whose __getitem__ is async"),
        (object(), "got object, which lacks one of them"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dataset_that_needs_no_reader(dataset: Any, what: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"is for a dataset with location\(index\) and decode\(data, index\)"
    ) as caught:
        DataLoader(dataset, reader=LocalReader())
    assert what in str(caught.value)


@pytest.mark.parametrize("wrong", [object(), LocalReader, "file", len])
def test_what_is_no_reader(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="reader must be an object with a method read"):
        DataLoader(Numbers(), reader=wrong)


def test_what_is_a_reader_by_its_protocol() -> None:
    for reader in (LocalReader(), AiofilesReader(), Blocking(), Awaiting()):
        assert isinstance(reader, Reader)
    assert not isinstance(Numbers(), Reader)


@both_kinds
def test_a_loader_keeps_its_reader_and_so_do_its_copies(kind: Any) -> None:
    reader = kind()
    loader = DataLoader(Numbers(), reader=reader)
    assert loader.reader is reader
    assert DataLoader(Numbers()).reader is None
    assert copy.copy(loader).reader is reader
    files = DataLoader(FileDataset(["a"], int), reader=AiofilesReader())
    for other in (copy.deepcopy(files), pickle.loads(pickle.dumps(files))):
        assert type(other.reader) is AiofilesReader


@both_kinds
@pytest.mark.parametrize("persistent", [False, True])
def test_the_loader_does_not_close_what_it_did_not_make(kind: Any, persistent: bool) -> None:
    reader = kind()
    with DataLoader(Numbers(), num_workers=1, persistent_workers=persistent, reader=reader) as loader:
        list(loader)
    del loader
    assert reader.num_closed == 0
    with DataLoader(Numbers(), num_workers=1, reader=reader) as loader:
        assert [int(batch) for batch in loader] == list(range(SIZE))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_async_reader_stays_on_one_loop_over_epochs(persistent: bool) -> None:
    loops = []

    class Bound(Awaiting):
        async def read(self, location: int, offset: int = 0, length: int | None = None) -> Any:
            if asyncio.get_running_loop() not in loops:
                loops.append(asyncio.get_running_loop())
            return await super().read(location)

    with DataLoader(Numbers(), num_workers=1, persistent_workers=persistent, reader=Bound()) as loader:
        for _ in range(3):
            assert [int(batch) for batch in loader] == list(range(SIZE))
        (loop,) = loops
        assert not loop.is_closed()
    assert loop.is_closed()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_task_of_the_reader_holds_is_closed_on_the_loop_with_the_loader(num_workers: int) -> None:
    class Holding(Awaiting):
        holder: Any = None

        async def hold(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                await self.close()

        async def read(self, location: int, offset: int = 0, length: int | None = None) -> Any:
            if self.holder is None:
                self.holder = asyncio.create_task(self.hold())
            return await super().read(location)

    reader = Holding()
    with DataLoader(Numbers(), num_workers=num_workers, reader=reader) as loader:
        for _ in range(2):
            assert [int(batch) for batch in loader] == list(range(SIZE))
        assert reader.num_closed == 0
    assert reader.num_closed == 1


def test_a_timeout_names_what_is_not_read_yet() -> None:
    reader = Awaiting(opened=False)
    with DataLoader(Numbers(), 2, num_workers=1, timeout=0.01, reader=reader) as loader:
        batches = iter(loader)
        with pytest.raises(LoaderTimeoutError, match="index 0"):
            next(batches)
        reader.gates.open_all()
        loader.close()


@both_kinds
@pytest.mark.parametrize("num_workers", [1, 3])
def test_worker_numbers_are_those_of_the_workers(kind: Any, num_workers: int) -> None:
    found: set[tuple[int, int]] = set()

    def note() -> None:
        info = get_worker_info()
        assert info is not None
        found.add((info.id, info.num_workers))

    class Noting(Numbers):
        def location(self, index: int) -> Any:
            note()
            return index

        def decode(self, data: Any, index: int) -> int:
            note()
            return super().decode(data, index)

    with DataLoader(Noting(), num_workers=num_workers, reader=kind()) as loader:
        list(loader)
    assert {num for _, num in found} == {num_workers}
    assert {worker for worker, _ in found} <= set(range(num_workers))


class Plain:
    """It holds nothing that changes by being used."""

    def __init__(self) -> None:
        self.shift = 0

    def read(self, location: int, offset: int = 0, length: int | None = None) -> bytes:
        COUNTS.pass_through(len(COUNTS.started))
        return b"%d" % (location + self.shift)


class AsyncPlain(Plain):
    async def read(self, location: int, offset: int = 0, length: int | None = None) -> bytes:  # type: ignore[override]
        return super().read(location)


COUNTS = Gates(opened=True)


@pytest.mark.parametrize("kind", [Plain, AsyncPlain])
def test_the_next_pass_begins_early_unless_the_reader_has_changed(kind: type[Plain]) -> None:
    COUNTS.started.clear()
    COUNTS.finished.clear()
    reader: Any = kind()
    dataset = FileDataset(range(SIZE), lambda data, _: int(data))  # type: ignore[arg-type]
    with DataLoader(
        dataset, 2, num_workers=2, num_concurrent_reads=2, persistent_workers=True, reader=reader
    ) as loader:
        expected = [[i, i + 1] for i in range(0, SIZE, 2)]
        for number in range(1, 4):
            assert [batch.tolist() for batch in loader] == expected
            COUNTS.wait_num_started(number * SIZE + 8)
            assert len(COUNTS.started) == number * SIZE + 8  # none was read twice
        reader.shift = 100
        assert [batch.tolist() for batch in loader] == [[a + 100, b + 100] for a, b in expected]


async def test_without_threads_a_running_loop_is_in_the_way_of_an_async_reader() -> None:
    loader = DataLoader(Numbers(), num_workers=0, reader=Awaiting())
    with pytest.raises(RunningLoopError, match="an async dataset or reader"):
        next(iter(loader))
    assert [int(batch) async for batch in loader] == list(range(SIZE))


class Doing(Awaiting):
    """Does something for location 2."""

    def __init__(self, do: Callable[[], Any]) -> None:
        super().__init__()
        self.do = do

    async def read(self, location: int, offset: int = 0, length: int | None = None) -> Any:
        if location == 2:
            await self.do()
        return await super().read(location)


async def raise_cancelled() -> None:
    raise asyncio.CancelledError


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("num_concurrent_reads", [1, 5])
@pytest.mark.parametrize("do", [raise_cancelled, cancel_itself])
def test_a_reader_that_cancels_itself(do: Callable[[], Any], num_concurrent_reads: int) -> None:
    with DataLoader(Numbers(), num_workers=1, num_concurrent_reads=num_concurrent_reads, reader=Doing(do)) as loader:
        outcome = of_iterator(iter(loader))
    assert outcome[:2] == [[0], [1]]
    assert isinstance(outcome[2], asyncio.CancelledError)
    assert outcome[3:] == [[i] for i in range(3, SIZE)]


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def exit_in_a_task_of_its_own() -> None:
    async def leave() -> None:
        raise SystemExit

    await asyncio.create_task(leave())


async def drain(batches: AsyncIterator[Any]) -> list[int]:
    return [int(batch) async for batch in batches]


@pytest.mark.parametrize("do", [stop_the_loop, exit_in_a_task_of_its_own])
@pytest.mark.parametrize("persistent", [False, True])
async def test_a_reader_that_breaks_the_loop(do: Callable[[], Any], persistent: bool) -> None:
    reader = Doing(do)
    loader = DataLoader(Numbers(), num_workers=1, num_concurrent_reads=1, persistent_workers=persistent, reader=reader)
    batches = aiter(loader)
    for _ in range(2):
        with pytest.raises(EngineError, match="The loop's thread failed"):
            await drain(batches)
    reader.do = lambda: asyncio.sleep(0)
    assert await drain(aiter(loader)) == list(range(SIZE))
    loader.close()


def test_a_loader_that_is_closed_while_a_read_is_awaited() -> None:
    cancelled = threading.Event()

    class Waiting(Awaiting):
        async def read(self, location: int, offset: int = 0, length: int | None = None) -> Any:
            try:
                return await super().read(location)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    reader = Waiting(opened=False)
    with DataLoader(Numbers(), num_workers=1, reader=reader) as loader:
        iter_ = iter(loader)
        reader.gates.wait_started(0)
        loader.close()
        assert cancelled.wait(60)
        assert loader.stats().reads_in_flight == 0
        reader.gates.open_all()
        assert [int(batch) for batch in loader] == list(range(SIZE))
        del iter_


@both_kinds
def test_an_empty_batch_and_resuming(kind: Any, tmp_path: Path) -> None:
    loader = DataLoader(Numbers(), batch_sampler=[[0, 1], [], [2]], num_workers=1, reader=kind())
    first, error, last = of_iterator(iter(loader))
    assert (first, last) == ([0, 1], [2])
    assert isinstance(error, Exception)
    loader.close()
    loader = DataLoader(Numbers(), 2, num_workers=1, reader=kind())
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    state = loader.state_dict()
    loader.close()
    with DataLoader(Numbers(), 2, num_workers=2, reader=kind()) as other:
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == [[i, i + 1] for i in range(2, SIZE, 2)]
