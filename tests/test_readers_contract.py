"""What every reader is held to, asked directly and by a loader."""

import asyncio
import copy
import gc
import inspect
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from conftest import join_all, loader_threads
from outcomes import EVERY_WAY, Load, of_iterator
from scripts import Nursery

from aioload import (
    AiofilesReader,
    DataLoader,
    FileDataset,
    LocalReader,
    MmapReader,
    ObjectStoreReader,
    Reader,
    SchemeReader,
    error_context,
)
from aioload.errors import ArgumentError, LoaderClosedError
from aioload.readers import is_async
from aioload.testing import GatedFiles

READERS = [LocalReader, MmapReader, AiofilesReader, ObjectStoreReader, SchemeReader]
"""All that read paths; what they make of URLs is in test_readers_of_urls.py."""

SIZES = [0, 1, 4096, 1 << 20, 64 << 20]

Fetch: TypeAlias = Callable[[Any, Any], bytes]
"""Given a reader and a location, returns what is there."""


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    made: Reader = request.param()
    return made


@pytest.fixture(scope="session", params=SIZES)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """A file of each size, and its content."""
    size = request.param
    path = tmp_path_factory.mktemp("large") / "file"
    content = (np.random.default_rng(size).bytes(min(size, 1 << 20)) * max(1, size >> 20))[:size]
    path.write_bytes(content)
    yield path, content
    path.unlink()


def read(reader: Reader, location: Any, *range_: Any) -> bytes:
    """Return what a reader of either kind gives."""
    result: Any = reader.read(location, *range_)

    async def wait() -> None:  # asyncio.run() makes a repr of what a task returns, for 64 MB in seconds
        nonlocal result
        result = await result

    if inspect.isawaitable(result):
        asyncio.run(wait())
    return bytes(result)


def by_loader(load: Load) -> Fetch:
    def fetch(reader: Reader, location: Any) -> bytes:
        (batch,) = load(FileDataset([location], lambda data, _: bytes(data)), reader=reader, collate_fn=list)
        if isinstance(batch, BaseException):
            raise batch
        (content,) = batch
        assert isinstance(content, bytes)
        return content

    return fetch


every_fetch = pytest.mark.parametrize("fetch", [read, *map(by_loader, EVERY_WAY)])


@every_fetch
def test_a_whole_file(reader: Reader, large: tuple[Path, bytes], fetch: Fetch) -> None:
    path, content = large
    assert fetch(reader, path) == content


@pytest.mark.parametrize("convert", [str, os.fsencode, Path])
@every_fetch
def test_every_kind_of_path(reader: Reader, tmp_path: Path, fetch: Fetch, convert: Callable[[Path], Any]) -> None:
    path = tmp_path / "a näme"
    path.write_bytes(b"abc")
    assert fetch(reader, convert(path)) == b"abc"


def test_ranges(reader: Reader, large: tuple[Path, bytes]) -> None:
    path, content = large
    size = len(content)
    most = 1 << 20  # bytes of a range: those of a large file that have more are all alike, and take long
    assert read(reader, path, 1) == content[1:]
    for offset in {0, 1, 3, 4095, 4096, 5000, size // 2, max(0, size - 1), size, size + 1, 1 << 62}:
        for length in (0, 1, 10, 4096, 10_000, size, 1 << 62, None):
            if min(size - offset, size if length is None else length) > most:
                continue
            expected = content[offset:] if length is None else content[offset : offset + length]
            assert read(reader, path, offset, length) == expected, (offset, length)


def test_ranges_of_what_reports_no_size(reader: Reader) -> None:
    status = read(reader, "/proc/self/status")
    assert status.startswith(b"Name:\t")
    assert read(reader, "/proc/self/status", 1, 4) == b"ame:"
    assert read(reader, "/dev/null", 3, 4) == b""


@pytest.mark.parametrize("range_", [(-1,), (0, -1), (0.5,), (0, 1.5), (True,), (0, "1")])
def test_a_range_that_is_none(reader: Reader, tmp_path: Path, range_: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with pytest.raises(ArgumentError, match=r"(offset|length) must be a whole number of at least 0"):
        read(reader, path, *range_)


@pytest.mark.parametrize("range_", [(), (1, 1), (0, 0)])
def test_a_missing_file_and_a_folder(reader: Reader, tmp_path: Path, range_: Any) -> None:
    for path, kind in ((tmp_path / "missing", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            read(reader, path, *range_)
        assert caught.value.filename == str(path)
        with pytest.raises(kind) as caught:
            read(reader, os.fsencode(path), *range_)
        assert caught.value.filename == os.fsencode(path)


@every_fetch
def test_errors_are_those_of_the_system(reader: Reader, tmp_path: Path, fetch: Fetch) -> None:
    for path, kind in ((tmp_path / "missing", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            fetch(reader, path)
        assert caught.value.filename == str(path)
        context = error_context(caught.value)
        assert context == (None if fetch is read else (0, path, "read"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@every_fetch
def test_a_file_without_permission(reader: Reader, tmp_path: Path, fetch: Fetch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"secret")
    path.chmod(0)
    with pytest.raises(PermissionError) as caught:
        fetch(reader, path)
    assert caught.value.filename == str(path)


@every_fetch
def test_what_is_no_path(reader: Reader, fetch: Fetch) -> None:
    with pytest.raises(TypeError, match="path"):
        fetch(reader, 0)  # a number is not taken for a descriptor


def test_many_uses_at_once(reader: Reader, tmp_path: Path) -> None:
    contents = [os.urandom(1000 + i) for i in range(8)]
    for i, content in enumerate(contents):
        (tmp_path / str(i)).write_bytes(content)

    def read_one(i: int) -> Any:
        return reader.read(tmp_path / str(i % 8), i, None if i % 2 else 100)

    async def gather() -> list[Any]:
        return [await each for each in [asyncio.ensure_future(read_one(i)) for i in range(320)]]

    if is_async(reader):
        data = asyncio.run(gather())
    else:
        with ThreadPoolExecutor(32) as pool:
            data = list(pool.map(read_one, range(320)))
    assert [bytes(each) for each in data] == [contents[i % 8][i:][: None if i % 2 else 100] for i in range(320)]


def test_as_many_reads_are_in_flight_as_asked_for(reader: Reader, tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 100) as dataset:
        with DataLoader(dataset, batch_size=4, num_workers=1, num_concurrent_reads=32, reader=reader) as loader:
            batches = iter(loader)
            dataset.gates.wait_num_started(32)
            assert dataset.gates.in_flight == 32
            assert loader.stats().reads_in_flight == 32
            dataset.gates.open_all()
            assert [number for batch in of_iterator(batches) for number in batch] == list(range(100))
            assert dataset.gates.max_in_flight == 32
        assert loader.stats().reads_in_flight == 0
        assert loader.stats().bytes_read == sum(len(str(number)) for number in range(100))
        assert loader.stats().read_s > 0


def test_it_may_be_used_by_several_loops_and_loaders_at_once(reader: Reader, tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(40)]
    for i, path in enumerate(paths):
        path.write_text(str(i))
    files = FileDataset(paths, lambda data, _: int(data))
    with (
        DataLoader(files, num_workers=1, reader=reader) as one,
        DataLoader(files, num_workers=0, reader=reader) as two,
    ):
        assert [(int(a), int(b)) for a, b in zip(one, two, strict=True)] == [(i, i) for i in range(40)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_has_changed_is_read_anew(reader: Reader, tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    files = FileDataset([path], lambda data, _: bytes(data))
    with DataLoader(files, collate_fn=list, num_workers=num_workers, reader=reader) as loader:
        assert list(loader) == [[b"before"]]
        path.write_bytes(b"after, and longer")
        assert list(loader) == [[b"after, and longer"]]
        (tmp_path / "other").write_bytes(b"replaced")
        (tmp_path / "other").replace(path)
        assert list(loader) == [[b"replaced"]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_is_closed_while_a_file_is_opened(reader: Reader, tmp_path: Path, persistent: bool) -> None:
    with GatedFiles(tmp_path, 4) as dataset:
        loader = DataLoader(dataset, num_workers=1, persistent_workers=persistent, reader=reader)
        batches = iter(loader)
        dataset.gates.wait_started(0)
        loader.close()
        with pytest.raises(LoaderClosedError):
            next(batches)
    assert not join_all(loader_threads())
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    loader.close()


def test_a_loader_that_is_closed_while_a_file_is_read(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    loader = DataLoader(FileDataset([path], lambda data, _: int(data)), num_workers=1, reader=reader)
    batches = iter(loader)
    fd = os.open(path, os.O_WRONLY)  # when it has been opened by the reader, who waits for something to read
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(batches)
    os.close(fd)


def test_an_iterator_that_is_dropped_while_a_file_is_read(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    batches = iter(DataLoader(FileDataset([path], lambda data, _: int(data)), num_workers=1, reader=reader))
    fd = os.open(path, os.O_WRONLY)
    del batches, reader
    gc.collect()
    os.close(fd)


async def test_a_read_that_is_cancelled_while_the_file_is_opened(tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 1) as dataset:
        reading = asyncio.create_task(AiofilesReader().read(dataset.location(0)))
        await asyncio.to_thread(dataset.gates.wait_started, 0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_read_that_is_cancelled_while_the_file_is_read(tmp_path: Path) -> None:
    reader, pipes, reads, fds = AiofilesReader(), [tmp_path / "a", tmp_path / "b"], [], []
    for pipe in pipes:
        os.mkfifo(pipe)
        reads.append(asyncio.create_task(reader.read(pipe)))
        fds.append(await asyncio.to_thread(os.open, pipe, os.O_WRONLY))
    reads[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await reads[0]
    (tmp_path / "file").write_bytes(b"abc")
    async with asyncio.timeout(60):
        assert await reader.read(tmp_path / "file") == b"abc"  # not by the thread that is in its read still
    os.close(fds[0])
    os.write(fds[1], b"def")
    os.close(fds[1])
    assert await reads[1] == b"def"


async def test_threads_end_with_the_last_read_and_none_is_of_the_default_executor(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    names: set[str] = set()

    class Watching(os.PathLike[str]):
        def __fspath__(self) -> str:
            names.add(threading.current_thread().name)
            return str(tmp_path / "file")

    reader = AiofilesReader()
    before = set(threading.enumerate())
    assert await asyncio.gather(*(reader.read(Watching()) for _ in range(8))) == [b"abc"] * 8
    assert names == {"aioload-aiofiles"}
    assert not join_all(loader_threads())
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("kind", READERS)
def test_the_interpreter_ends_while_a_file_is_read(nursery: Nursery, kind: type[Reader]) -> None:
    arguments = f"num_workers=1, reader=aioload.{kind.__name__}()"
    nursery.run_quietly(f"""
import os, tempfile, aioload
path = tempfile.mkdtemp() + "/pipe"
os.mkfifo(path)
batches = iter(aioload.DataLoader(aioload.FileDataset([path], lambda data, index: index), {arguments}))
os.open(path, os.O_WRONLY)
""")


def test_copies(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read(reader, path) == b"abc"
    for other in (copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))):
        assert type(other) is type(reader)
        assert read(other, path) == b"abc"


def count_maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_map_lives_as_long_as_any_view_and_holds_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(10_000)
    path.write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    view = MmapReader().read(path)
    assert isinstance(view, memoryview)
    assert (view.format, view.ndim, view.readonly) == ("B", 1, True)
    assert len(os.listdir("/proc/self/fd")) == before
    array = np.frombuffer(view, np.uint8)[5000:]
    path.unlink()
    del view
    assert count_maps(path) == 1
    assert array.tobytes() == content[5000:]
    del array
    assert count_maps(path) == 0
    assert MmapReader().read("/dev/null") == b""


def test_what_has_no_maps_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")

    def refuse(code: int) -> Callable[..., memoryview]:
        def map_(*_: object) -> memoryview:
            raise OSError(code, os.strerror(code))

        return map_

    monkeypatch.setattr("aioload.readers.mapped._map", refuse(19))  # ENODEV
    assert MmapReader().read(path, 1) == b"bc"
    monkeypatch.setattr("aioload.readers.mapped._map", refuse(12))  # ENOMEM
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        MmapReader().read(path)
    assert caught.value.filename == str(path)
