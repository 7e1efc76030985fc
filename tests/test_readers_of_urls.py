"""What the readers of URLs are held to, whatever is behind: the contract, and what a server may say."""

import asyncio
import copy
import errno
import inspect
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import botocore.exceptions  # type: ignore[import-untyped]
import fsspec.asyn
import numpy as np
import obstore
import pytest
import requests
from obstore.store import HTTPStore, MemoryStore
from outcomes import EVERY_WAY, Load
from requests.structures import CaseInsensitiveDict
from scripts import Nursery
from serving import ObjectServer, serving
from stand_in import S3StandIn

from aioload import DataLoader, FileDataset, FsspecReader, ObjectStoreReader, SchemeReader, error_context
from aioload.errors import ArgumentError, MissingExtraError
from aioload.readers import is_async
from aioload.readers.policy import passes

KEYS: Any = {"access_key_id": "any", "secret_access_key": "any", "region": "us-east-1"}


class Shelf(NamedTuple):
    """A reader and where it reads: ``put`` makes an object and returns its URL."""

    reader: Any
    put: Callable[[str, bytes], str]
    folder: type[Exception]
    """What a folder, a prefix of others, is refused with."""


def blocking(reader: Any) -> SchemeReader:
    return SchemeReader(dict.fromkeys(("s3", "http", "memory", "file"), reader))


@pytest.fixture(scope="session", autouse=True)  # for all: one that a single test asks for seems to be left by it
def s3() -> Iterator[S3StandIn]:
    stand_in = S3StandIn()
    yield stand_in
    stand_in.close()


def blocking_objects(**arguments: Any) -> SchemeReader:
    return blocking(ObjectStoreReader(**arguments))


@pytest.fixture(scope="session", autouse=True)
def their_own_files() -> None:
    """Have obstore and fsspec open what they never close."""
    fsspec.asyn.get_loop()
    with serving() as server:
        server.objects["/a"] = b"a"
        HTTPStore(server.url, client_options={"allow_http": True}).get("a").bytes()


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with serving() as server:
        yield server


def in_files(folder: Path) -> Callable[[str, bytes], str]:
    def put(key: str, content: bytes) -> str:
        path = folder / key
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
        return f"file://{path}"

    return put


def in_memory() -> tuple[MemoryStore, Callable[[str, bytes], str]]:
    store = MemoryStore()

    def put(key: str, content: bytes) -> str:
        store.put(key, content)
        return f"memory://{key}"

    return store, put


def behind_http(server: ObjectServer) -> Callable[[str, bytes], str]:
    def put(key: str, content: bytes) -> str:
        server.objects[f"/{key}"] = content
        return f"{server.url}/{key}"

    return put


def in_fsspec(key: str, content: bytes) -> str:
    fsspec.filesystem("memory").pipe_file(f"/{key}", content)
    return f"memory://{key}"


SHELVES = ["file", "memory", "http", "s3", "fsspec file", "fsspec memory"]


@pytest.fixture(params=[*SHELVES, "memory, blocking", "http, blocking", "s3, blocking"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    name, _, is_blocking = request.param.partition(", ")
    reader: Any = ObjectStoreReader()
    folder: type[Exception] = FileNotFoundError
    if name == "file":
        put, folder = in_files(tmp_path), IsADirectoryError
    elif name == "memory":
        store, put = in_memory()
        reader = ObjectStoreReader(stores={"memory://": store})
    elif name == "http":
        put = behind_http(request.getfixturevalue("server"))
    elif name == "s3":
        s3 = request.getfixturevalue("s3")
        prefix = f"{abs(hash(tmp_path))}"
        reader = ObjectStoreReader(endpoint=s3.endpoint, **KEYS)

        def put(key: str, content: bytes) -> str:
            url: str = s3.put(f"{prefix}/{key}", content)
            return url
    elif name == "fsspec file":
        put, folder, reader = in_files(tmp_path), IsADirectoryError, FsspecReader()
    else:
        put, reader = in_fsspec, FsspecReader()
    yield Shelf(blocking(reader) if is_blocking else reader, put, folder)
    fsspec.filesystem("memory").store.clear()


def read(reader: Any, url: str, *range_: Any) -> Any:
    """Return what a reader of either kind gives."""
    result: Any = reader.read(url, *range_)

    async def wait() -> None:
        nonlocal result
        result = await result

    if inspect.isawaitable(result):
        asyncio.run(wait())
    assert type(result) is bytes
    return result


def by_loader(load: Load) -> Callable[[Any, str], Any]:
    def fetch(reader: Any, url: str) -> Any:
        (batch,) = load(FileDataset([url], lambda data, _: bytes(data)), reader=reader, collate_fn=list)
        if isinstance(batch, BaseException):
            raise batch
        return batch[0]

    return fetch


every_fetch = pytest.mark.parametrize("fetch", [read, *map(by_loader, EVERY_WAY)])


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20])
def test_a_whole_object_and_parts_of_it(shelf: Shelf, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    url = shelf.put("folder/object", content)
    assert read(shelf.reader, url) == content
    for offset in {0, 1, size // 2, max(0, size - 1), size, size + 1, 1 << 62}:
        for length in (0, 1, 4096, size, 1 << 62, None):
            expected = content[offset:] if length is None else content[offset : offset + length]
            assert read(shelf.reader, url, offset, length) == expected, (offset, length)


@pytest.mark.parametrize("shelf", SHELVES, indirect=True)
def test_64_mb(shelf: Shelf) -> None:
    content = np.random.default_rng(1).bytes(1 << 20) * 64
    url = shelf.put("large", content)
    assert read(shelf.reader, url) == content
    assert read(shelf.reader, url, 63 << 20) == content[63 << 20 :]


@every_fetch
def test_names_are_taken_as_they_are(shelf: Shelf, fetch: Any) -> None:
    url = shelf.put("a b/ä+c=d&e,(f)", b"abc")
    assert fetch(shelf.reader, url) == b"abc"


@every_fetch
def test_what_is_missing_and_what_is_a_folder(shelf: Shelf, fetch: Any) -> None:
    url = shelf.put("folder/object", b"abc")
    missing, folder = f"{url}s", url.rpartition("/")[0]
    for location, kind in ((missing, FileNotFoundError), (folder, shelf.folder)):
        with pytest.raises(kind) as caught:
            fetch(shelf.reader, location)
        assert caught.value.errno in (errno.ENOENT, errno.EISDIR)  # type: ignore[attr-defined]
        assert caught.value.filename in (location, location.removeprefix("file://"))  # type: ignore[attr-defined]
        assert error_context(caught.value) == (None if fetch is read else (0, location, "read"))


@pytest.mark.parametrize("range_", [(3,), (0, 2), (0, 0)])
def test_a_part_of_what_is_missing(shelf: Shelf, range_: Any) -> None:
    url = shelf.put("object", b"abc")
    with pytest.raises(FileNotFoundError):
        read(shelf.reader, f"{url}s", *range_)


@pytest.mark.parametrize("range_", [(-1,), (0, -1), (0.5,), (0, "1")])
def test_a_range_that_is_none(shelf: Shelf, range_: Any) -> None:
    url = shelf.put("object", b"abc")
    with pytest.raises(ArgumentError, match=r"(offset|length) must be a whole number of at least 0"):
        read(shelf.reader, url, *range_)


def test_many_uses_at_once(shelf: Shelf) -> None:
    contents = [os.urandom(1000 + i) for i in range(8)]
    urls = [shelf.put(f"many/{i}", content) for i, content in enumerate(contents)]

    def read_one(i: int) -> Any:
        return shelf.reader.read(urls[i % 8], i, None if i % 2 else 100)

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*(read_one(i) for i in range(64))))

    if is_async(shelf.reader):
        data = asyncio.run(gather())
    else:
        with ThreadPoolExecutor(16) as pool:
            data = list(pool.map(read_one, range(64)))
    assert data == [contents[i % 8][i:][: None if i % 2 else 100] for i in range(64)]


def test_several_loaders_and_epochs_and_copies(shelf: Shelf) -> None:
    urls = [shelf.put(f"numbers/{i}", b"%d" % i) for i in range(10)]
    files = FileDataset(urls, lambda data, _: int(data))
    arguments: dict[str, Any] = {"num_workers": 1, "reader": shelf.reader}
    with DataLoader(files, **arguments) as one, DataLoader(files, persistent_workers=True, **arguments) as two:
        for _ in range(2):
            assert [(int(a), int(b)) for a, b in zip(one, two, strict=True)] == [(i, i) for i in range(10)]
        with copy.deepcopy(two) as three:
            assert [int(batch) for batch in three] == list(range(10))


@pytest.mark.parametrize("shelf", ["file", "http", "s3", "fsspec file", "s3, blocking"], indirect=True)
def test_pickled_readers(shelf: Shelf) -> None:
    url = shelf.put("object", b"abc")
    assert read(shelf.reader, url) == b"abc"
    assert read(pickle.loads(pickle.dumps(shelf.reader)), url) == b"abc"


def test_a_mixed_list(s3: S3StandIn, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDPOINT_URL", s3.endpoint), ("ALLOW_HTTP", "true"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    (tmp_path / "3").write_bytes(b"3")
    locations: list[Any] = [s3.put("0", b"0"), behind_http(server)("1", b"1"), in_fsspec("2", b"2"), tmp_path / "3"]
    locations += [f"file://{tmp_path}/3", str(tmp_path / "3"), os.fsencode(tmp_path / "3")]
    locations[1] = np.str_(locations[1])
    files = FileDataset(locations * 3, lambda data, _: int(data))
    expected = [0, 1, 2, 3, 3, 3, 3] * 3
    for num_workers in (0, 2):
        with DataLoader(files, 7, num_workers=num_workers) as loader:
            for _ in range(2):
                assert [int(number) for batch in loader for number in batch] == expected
        with DataLoader(files, 21, reader=SchemeReader(), num_workers=num_workers) as loader:
            assert next(iter(loader)).tolist() == expected
    fsspec.filesystem("memory").store.clear()


def test_connections_are_used_again_over_epochs_and_closed_with_the_loader(server: ObjectServer) -> None:
    urls = [behind_http(server)(str(i), b"%d" % i) for i in range(40)]
    loader: DataLoader[Any] = DataLoader(
        FileDataset(urls, lambda data, _: int(data)), num_workers=1, num_concurrent_reads=2
    )
    for _ in range(3):
        assert [int(batch) for batch in loader] == list(range(40))
    loader.close()
    assert server.num_connections < 10  # of 120 reads; a connection may come back just after the next read has begun


@pytest.mark.parametrize("kind", [ObjectStoreReader, SchemeReader])
@pytest.mark.parametrize("load", EVERY_WAY)
def test_a_server_in_trouble_is_asked_again(server: ObjectServer, load: Load, kind: Any) -> None:
    urls = [behind_http(server)(str(i), b"%d" % i) for i in range(4)]
    server.refusals["/0"] = [(503, {})]
    server.refusals["/1"] = [(429, {}), (500, {}), (502, {})]
    server.refusals["/2"] = [(503, {})] * 4
    server.refusals["/3"] = [(403, {}), (403, {})]
    files = FileDataset(urls, lambda data, _: int(data))
    quick = {"read": quick_policy()}
    got = load(files, reader=kind(), **quick)
    assert got[:2] == [[0], [1]]
    busy, refused = got[2:]
    assert isinstance(busy, OSError)
    assert (busy.errno, busy.strerror, busy.filename) == (
        errno.EREMOTEIO,
        "HTTP status 503 Service Unavailable",
        urls[2],
    )
    assert isinstance(refused, PermissionError)
    assert isinstance(refused.__cause__, obstore.exceptions.PermissionDeniedError)
    assert refused.filename == urls[3]
    assert [server.num_requests[f"/{i}"] for i in range(4)] == [2, 4, 4, 1]


def quick_policy(**arguments: Any) -> Any:
    from aioload import ReadPolicy

    return ReadPolicy(**{"backoff_s": 1e-4, "max_backoff_s": 1e-3, **arguments})


def test_retries_against_s3_and_missing_keys_that_are_skipped(s3: S3StandIn) -> None:
    urls = [s3.put(f"some/{i}", b"%d" % i) for i in range(6)]
    urls[4] += "-missing"
    reader = ObjectStoreReader(endpoint=s3.endpoint, **KEYS)
    files = FileDataset(urls, lambda data, _: int(data))
    with DataLoader(files, 3, num_workers=2, reader=reader, on_error="skip") as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 5]]
            record = loader.errors()[-1]
            assert (record.index, record.location, record.stage) == (4, urls[4], "read")
            assert isinstance(record.error, FileNotFoundError)
        assert loader.stats().retries == 0


async def test_an_async_for_over_s3(s3: S3StandIn) -> None:
    urls = [s3.put(f"async/{i}", b"%d" % i) for i in range(6)]
    reader = ObjectStoreReader(endpoint=s3.endpoint, **KEYS)
    async with DataLoader(FileDataset(urls, lambda data, _: int(data)), 2, num_workers=1, reader=reader) as loader:
        assert [batch.tolist() async for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_a_bucket_that_is_not_there(s3: S3StandIn) -> None:
    reader = ObjectStoreReader(endpoint=s3.endpoint, **KEYS)
    with pytest.raises(FileNotFoundError) as caught:
        read(reader, "s3://no-such-bucket/key")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("kind", [ObjectStoreReader, SchemeReader])
def test_a_loader_that_is_closed_while_a_server_stalls(server: ObjectServer, kind: Any) -> None:
    urls = [behind_http(server)(str(i), b"%d" % i) for i in range(4)]
    server.stalls.add("/2")
    loader: DataLoader[Any] = DataLoader(
        FileDataset(urls, lambda data, _: int(data)), num_workers=1, num_concurrent_reads=4, reader=kind()
    )
    batches = iter(loader)
    assert [int(next(batches)) for _ in range(2)] == [0, 1]
    assert server.stalled.wait(60)
    loader.close()  # does not wait for the server
    del batches
    server.go.set()


@pytest.mark.parametrize("kind", [ObjectStoreReader, SchemeReader])
def test_connections_that_are_lost(server: ObjectServer, kind: Any) -> None:
    url = behind_http(server)("half", b"0123456789" * 1000)
    server.cuts_off.add("/half")
    with pytest.raises(ConnectionError) as caught:
        read(kind(), url)
    assert passes(caught.value)
    assert isinstance(caught.value.__cause__, obstore.exceptions.BaseError)
    server.close()
    with pytest.raises(ConnectionError) as caught:
        read(kind(), url)
    assert caught.value.filename == url


@pytest.mark.parametrize("kind", [ObjectStoreReader, blocking_objects])
def test_requests_that_time_out(server: ObjectServer, kind: Any) -> None:
    server.stalls.add("/slow")
    with pytest.raises(TimeoutError) as caught:
        read(kind(client_options={"timeout": "20ms"}), f"{server.url}/slow")
    assert passes(caught.value)
    assert caught.value.filename == f"{server.url}/slow"


@pytest.mark.parametrize("kind", [ObjectStoreReader, SchemeReader])
def test_a_server_that_knows_no_ranges(server: ObjectServer, kind: Any) -> None:
    url = behind_http(server)("object", b"0123456789")
    server.knows_ranges = False
    assert read(kind(), url, 3) == b"3456789"
    assert read(kind(), url, 3, 2) == b"34"
    assert read(kind(), url, 20, 2) == b""


@pytest.mark.parametrize(
    "path",
    ["/a/b", "/a%20b", "/%C3%A4", "/a%2Fb", "/a%2bb", "/d/", "/a//b", "/a?x=1&y=%2F", "/%FF", "/~a*b(c)", "/", ""],
)
def test_urls_of_http_are_sent_as_they_are(server: ObjectServer, path: str) -> None:
    for reader in (ObjectStoreReader(), SchemeReader()):
        with pytest.raises(FileNotFoundError):
            read(reader, server.url + path + "#fragment")
    assert server.targets == [path or "/"] * 2


def test_redirections_are_followed(server: ObjectServer) -> None:
    url = behind_http(server)("there", b"abc")
    server.refusals["/here"] = [(302, {"Location": url})]
    assert read(ObjectStoreReader(), f"{server.url}/here") == b"abc"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "gs://bucket/folder/", "memory://"])
def test_urls_of_no_object(url: str) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        read(ObjectStoreReader(), url)
    assert caught.value.filename == url


@pytest.mark.parametrize("key", ["/a", "a//b", "../a", "a/./b", "a/.."])
def test_keys_that_obstore_would_change(key: str) -> None:
    with pytest.raises(ValueError, match="parts with single slashes between"):
        read(ObjectStoreReader(**KEYS), f"s3://bucket/{key}")


def test_file_urls(tmp_path: Path) -> None:
    path = tmp_path / "a b%ä"
    path.write_bytes(b"abc")
    for reader in (ObjectStoreReader(), SchemeReader()):
        assert read(reader, path.as_uri()) == b"abc"
        assert read(reader, path.as_uri().replace("file://", "FILE://localhost")) == b"abc"
        with pytest.raises(ValueError, match="must be of this machine"):
            read(reader, "file://elsewhere/a")


def test_stores_and_options_that_are_given(server: ObjectServer) -> None:
    server.objects |= {"/bucket/a/b": b"of s3", "/c": b"of http"}
    mine = HTTPStore(f"{server.url}/bucket", client_options={"allow_http": True})
    reader = ObjectStoreReader(stores={"gs://mine": mine})
    assert read(reader, "gs://mine/a/b") == b"of s3"
    s3 = ObjectStoreReader(endpoint=server.url, skip_signature=True, region="any")
    assert read(s3, "s3://bucket/a/b") == b"of s3"
    assert read(s3, f"{server.url}/c") == b"of http"  # options of buckets are not for it
    server.refusals["/c"] = [(503, {}), (503, {})]
    assert read(ObjectStoreReader(retry_config={"max_retries": 2}), f"{server.url}/c") == b"of http"
    with pytest.raises(ArgumentError, match=r"stores=\{'memory://': MemoryStore\(\)\}"):
        read(reader, "memory://a")
    with pytest.raises(ArgumentError, match="stores must be given by URLs"):
        ObjectStoreReader(stores={"bucket": mine})


def test_readers_by_scheme(tmp_path: Path) -> None:
    class Upper:
        def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return f"{location}{offset}{length}".upper().encode()

    class Awaited:
        async def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return b""

    (tmp_path / "a").write_bytes(b"abc")
    reader = SchemeReader({"mine": Upper()})
    assert reader.read("mine://x", 1, 2) == b"MINE://X12"
    assert reader.read("MINE://x") == b"MINE://X0NONE"
    assert reader.read(tmp_path / "a", 1) == b"bc"
    assert SchemeReader({"": Upper()}).read("x") == b"X0NONE"
    with pytest.raises(ArgumentError, match="can only be awaited"):
        SchemeReader({"s3": Awaited()})
    with pytest.raises(ArgumentError, match="must be an object with a method read"):
        SchemeReader({"s3": Upper})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="readers must be a mapping from schemes to readers"):
        SchemeReader([Upper()])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="by schemes such as 's3'"):
        SchemeReader({"s3://": Upper()})


@pytest.mark.parametrize(
    ("package", "url"), [("obstore", "s3://bucket/a"), ("obstore", "https://host/a"), ("fsspec", "hf://a/b")]
)
@pytest.mark.parametrize("load", EVERY_WAY)
def test_an_extra_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load, package: str, url: str
) -> None:
    for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a").write_bytes(b"1")
    there, missing, last = load(FileDataset([tmp_path / "a", url, tmp_path / "a"], lambda data, _: int(data)))
    assert there == last == [1]
    assert isinstance(missing, MissingExtraError)
    assert isinstance(missing, ImportError)
    assert str(missing) == (
        f"{url!r} is read by the package {package}, which is not installed: pip install 'aioload[{package}]'"
    )
    assert error_context(missing) == (1, url, "read")


def test_importing_needs_neither_package(nursery: Nursery) -> None:
    nursery.run_quietly("""
import sys, aioload
aioload.SchemeReader(), aioload.ObjectStoreReader(), aioload.FsspecReader()
assert not {"obstore", "fsspec", "aiohttp"} & set(sys.modules)
""")


def test_a_forked_child_is_told(nursery: Nursery) -> None:
    """Where obstore has been used, it would wait for ever for threads that are not in the child."""
    nursery.run_quietly("""
import os, aioload
from serving import serving
from aioload.errors import ForkedReaderError
with serving() as server:
    server.objects["/1"] = b"1"
    files = aioload.FileDataset([f"{server.url}/1"], lambda data, index: int(data))
    loader = aioload.DataLoader(files, num_workers=1)
    pid = os.fork()
    if pid == 0:  # not used so far
        assert [int(batch) for batch in loader] == [1]
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [int(batch) for batch in loader] == [1]
    pid = os.fork()
    if pid == 0:
        try:
            list(loader)
        except ForkedReaderError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert [int(batch) for batch in loader] == [1]
    loader.close()
    del loader
""")


@pytest.mark.parametrize("kind", ["ObjectStoreReader", "SchemeReader"])
def test_the_interpreter_ends_while_an_object_is_read(nursery: Nursery, kind: str) -> None:
    nursery.run_quietly(f"""
import socket, aioload
server = socket.create_server(("127.0.0.1", 0))
url = "http://127.0.0.1:%d/a" % server.getsockname()[1]
files = aioload.FileDataset([url], lambda data, index: index)
batches = iter(aioload.DataLoader(files, num_workers=1, reader=aioload.{kind}()))
connection, _ = server.accept()
""")


def test_fsspec_translates_what_http_answers(server: ObjectServer) -> None:
    pytest.importorskip("aiohttp")
    url = behind_http(server)("object", b"0123456789")
    reader = FsspecReader()
    assert read(reader, url) == b"0123456789"
    assert read(reader, url, 3, 4) == b"3456"
    server.refusals["/object"] = [(503, {"Retry-After": "7"}), (403, {})]
    with pytest.raises(OSError, match="HTTP status 503") as caught:
        read(reader, url)
    assert caught.value.retry_after_s == 7  # type: ignore[attr-defined]
    with pytest.raises(PermissionError):
        read(reader, url)
    with pytest.raises(FileNotFoundError) as missing:
        read(reader, f"{url}s")
    assert missing.value.filename == f"{url}s"
    started = time.monotonic()
    server.refusals["/object"] = [(503, {"Retry-After": "0.2"})]
    with DataLoader(FileDataset([url], lambda data, _: len(data)), reader=reader, read=quick_policy()) as loader:
        assert [int(batch) for batch in loader] == [10]
    assert time.monotonic() - started >= 0.2


class Troubled(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that raises what it is told."""

    protocol = "troubled"
    trouble: Exception

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        raise self.trouble


def answered(kind: type[Any], status: int, headers: dict[str, str]) -> Exception:
    """Return an error as packages make them that keep the server's answer in it."""
    response = requests.Response()
    response.status_code, response.headers = status, CaseInsensitiveDict(headers)
    error: Exception = kind("refused", response=response)
    return error


TROUBLES: dict[str, tuple[Exception, type[OSError], float | None]] = {
    "lost, by s3fs": (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), ConnectionError, None),
    "broken off, by s3fs": (botocore.exceptions.ConnectionClosedError(endpoint_url="http://x"), ConnectionError, None),
    "late, by s3fs": (botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"), ConnectionError, None),
    "lost, by requests": (requests.ConnectionError("refused"), ConnectionError, None),
    "broken off, by requests": (requests.exceptions.ChunkedEncodingError("short"), ConnectionError, None),
    "busy, by requests": (answered(requests.HTTPError, 429, {"retry-after": "3"}), OSError, 3),
    "gone, by requests": (answered(requests.HTTPError, 404, {}), FileNotFoundError, None),
    "not permitted, by requests": (answered(requests.HTTPError, 403, {}), PermissionError, None),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_fsspec_translates_what_packages_raise(name: str) -> None:
    trouble, kind, retry_after_s = TROUBLES[name]
    fsspec.register_implementation("troubled", Troubled, clobber=True)
    Troubled.trouble = trouble
    with pytest.raises(kind) as caught:
        read(FsspecReader(), "troubled://a/b")
    assert caught.value.filename == "troubled://a/b"
    assert caught.value.__cause__ is trouble
    assert getattr(caught.value, "retry_after_s", None) == retry_after_s
    assert passes(caught.value) == (kind is ConnectionError or retry_after_s is not None)
    del Troubled.trouble
    trouble.with_traceback(None)
