"""The loader's ``cache``: a later epoch, run or process reads nothing again, and nobody can tell by the batches."""

import copy
import itertools
import multiprocessing
import os
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.utils.data
from outcomes import EVERY_WAY, Load
from scripts import Nursery
from waiting import READERS, MakeReader, Numbers, Storage

from aioload import DataLoader, DiskCache, FileDataset, LocalReader, MemoryCache, MmapReader, ReadPolicy
from aioload.cache import Cache
from aioload.errors import ArgumentError, DatasetError
from aioload.readers import read_file

SIZE = 24

MakeCache: TypeAlias = Callable[[], Any]


class Counting:
    """Reads files, and counts how often it has read each."""

    def __init__(self, convert: Callable[[bytes], Any] = bytes) -> None:
        self.num_reads: Counter[str] = Counter()
        self.convert = convert
        self.failing: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, location: Any, offset: int = 0, length: int | None = None) -> Any:
        name = Path(location).name
        with self._lock:
            self.num_reads[name] += 1
            fails = self.num_reads[name] <= self.failing.get(name, 0)
        if fails:
            raise OSError(5, os.strerror(5), location)
        return self.convert(read_file(location))


class Awaited(Counting):
    async def read(self, location: Any, offset: int = 0, length: int | None = None) -> Any:
        return super().read(location)


both_kinds = pytest.mark.parametrize("kind", [Counting, Awaited])
every_way = pytest.mark.parametrize("load", EVERY_WAY)
ONCE = Counter({str(index): 1 for index in range(SIZE)})


def folder_of(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue("tmp_path") / "cache"
    return folder


@pytest.fixture(params=["disk", "memory", "own"])
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    if request.param == "disk":
        return lambda: DiskCache(folder_of(request), 1 << 20)
    return (lambda: MemoryCache(1 << 20)) if request.param == "memory" else Own


class Own:
    """A cache of the user's."""

    def __init__(self) -> None:
        self.content: dict[Any, bytes] = {}

    def get(self, location: Any) -> bytes | None:
        return self.content.get(location)

    def put(self, location: Any, data: bytes) -> None:
        self.content[location] = data


@pytest.fixture
def files(tmp_path: Path) -> FileDataset[int]:
    (tmp_path / "data").mkdir()
    for index in range(SIZE):
        (tmp_path / "data" / str(index)).write_text(str(index))
    return FileDataset([tmp_path / "data" / str(index) for index in range(SIZE)], lambda data, _: int(bytes(data)))


EXPECTED = np.arange(SIZE).reshape(-1, 4).tolist()


@both_kinds
@every_way
def test_a_later_loader_reads_nothing_again(files: Any, make_cache: MakeCache, load: Load, kind: Any) -> None:
    cache, reader = make_cache(), kind()
    for _ in range(3):
        assert load(files, batch_size=4, reader=reader, cache=cache) == EXPECTED
        assert reader.num_reads == ONCE


@both_kinds
@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("policy", [{"timeout_s": 60}, {"hedge": True}, {"retries": 0}], ids=str)
def test_a_second_epoch_reads_nothing_whatever_is_done_about_slow_reads(
    files: Any, make_cache: MakeCache, kind: Any, num_workers: int, policy: Any
) -> None:
    reader = kind(bytearray)  # what decode is given is bytes all the same
    arguments: dict[str, Any] = {"num_workers": num_workers, "read": ReadPolicy(**policy), "cache": make_cache()}
    with DataLoader(FileDataset(files.paths, decode_bytes), 4, reader=reader, **arguments) as loader:
        for epoch in range(2):
            assert [batch.tolist() for batch in loader] == EXPECTED
            stats = loader.stats()
            assert (stats.cache_hits, stats.cache_misses) == (epoch * SIZE, SIZE)
    assert reader.num_reads.total() == SIZE + stats.hedges


def decode_bytes(data: Any, _: int) -> int:
    assert type(data) is bytes
    return int(data)


@both_kinds
@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_second_epoch_reads_nothing(
    tmp_path: Path, make_cache: MakeCache, kind: Any, num_workers: int, persistent: bool
) -> None:
    paths = [tmp_path / str(index) for index in range(SIZE)]
    for index, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(index).bytes(64))
    dataset: Any = FileDataset(paths, lambda data, _: np.frombuffer(data, np.uint8).copy())
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": num_workers}
    reader, num_reads = kind(), SIZE
    arguments["persistent_workers"] = persistent and num_workers > 0
    with (
        DataLoader(dataset, reader=reader, cache=make_cache(), **arguments) as loader,
        DataLoader(dataset, **arguments) as plain,
    ):
        for epoch in range(3):
            assert all(torch.equal(mine, other) for mine, other in zip(loader, plain, strict=True))
            if arguments["persistent_workers"]:  # the second begins, and may read, while the first one's reads end
                num_reads = reader.num_reads.total() if epoch == 1 else num_reads
                continue
            assert reader.num_reads == ONCE
            assert loader.stats().cache_hits == epoch * SIZE
        assert reader.num_reads.total() == num_reads
        assert (plain.stats().cache_hits, plain.stats().cache_misses) == (0, 0)
    stats = loader.stats()  # closed: before, the next epoch's reads may be half counted
    assert SIZE <= stats.cache_misses <= num_reads
    assert stats.cache_hits >= 3 * SIZE - num_reads
    assert stats.bytes_read == 64 * (stats.cache_hits + stats.cache_misses)


@pytest.mark.parametrize("kind", [Counting, Awaited])
@pytest.mark.parametrize(
    "convert", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data + data, np.uint8).reshape(2, -1)[:1]]
)
def test_decode_gets_bytes_the_first_time_too(
    files: Any, make_cache: MakeCache, kind: Any, convert: Callable[[bytes], Any]
) -> None:
    kinds = []

    def decode(data: Any, _: int) -> int:
        kinds.append(type(data))
        return int(data)

    cache, reader = make_cache(), kind(convert)
    for _ in range(2):
        with DataLoader(FileDataset(files.paths, decode), 4, num_workers=2, reader=reader, cache=cache) as loader:
            assert [batch.tolist() for batch in loader] == EXPECTED
    assert kinds == [bytes] * 2 * SIZE


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_was_being_read_when_the_cache_was_cleared_is_not_kept(
    kind: MakeReader, on_disk: bool, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path, 1 << 20) if on_disk else MemoryCache(1 << 20)
    numbers: Any = Numbers(4)
    with Storage(lambda location, number: location == 2 and number == 0) as storage:
        arguments: Any = {"num_workers": 2, "reader": kind(storage), "cache": cache}
        with DataLoader(numbers, 4, **arguments) as loader:
            batches = iter(loader)
            storage.gates.wait_started((2, 0))
            cache.clear()  # of files that are about to change, say
            storage.gates.open_all()
            assert next(batches).tolist() == [0, 1, 2, 3]
        with DataLoader(numbers, 4, **arguments) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
            assert loader.stats().cache_hits == 0


def test_several_loaders_share_a_cache(files: Any, make_cache: MakeCache) -> None:
    cache, reader = make_cache(), Counting()
    arguments: dict[str, Any] = {"num_workers": 2, "reader": reader, "cache": cache}
    subset = torch.utils.data.Subset(files, range(8))
    with DataLoader(subset, 4, **arguments) as first, DataLoader(files, 4, **arguments) as second:
        assert [batch.tolist() for batch in first] == EXPECTED[:2]
        assert [batch.tolist() for batch in second] == EXPECTED
        assert second.stats().cache_hits == 8
        assert first.stats().cache_hits == 0
    assert reader.num_reads == ONCE


@pytest.mark.parametrize("reader", [None, LocalReader(), MmapReader()])
def test_what_is_found_is_what_was_read(files: Any, make_cache: MakeCache, reader: Any) -> None:
    cache = make_cache()
    for change in (False, True):
        for path in files.paths if change else ():
            path.write_text("99")  # nobody looks: the cache is for files that do not change
        with DataLoader(files, 4, num_workers=2, reader=reader, cache=cache) as loader:
            assert [batch.tolist() for batch in loader] == EXPECTED


@both_kinds
@every_way
def test_errors_are_as_without_it_and_are_not_kept(files: Any, make_cache: MakeCache, load: Load, kind: Any) -> None:
    cache, reader = make_cache(), kind()
    reader.failing = {"2": 1}
    first, *rest = load(files, batch_size=4, reader=reader, cache=cache, read=ReadPolicy(retries=0))
    assert isinstance(first, OSError)
    assert rest == EXPECTED[1:]
    assert load(files, batch_size=4, reader=reader, cache=cache) == EXPECTED
    assert reader.num_reads == ONCE + Counter({"2": 1})


@both_kinds
@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_and_repeated_reads(files: Any, make_cache: MakeCache, kind: Any, num_workers: int) -> None:
    cache, reader = make_cache(), kind()
    reader.failing = {"2": 99, "5": 1}
    policy = ReadPolicy(retries=1, backoff_s=1e-4)
    with DataLoader(
        files, 4, num_workers=num_workers, reader=reader, cache=cache, on_error="skip", read=policy
    ) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1, 3], *EXPECTED[1:]]
        assert (loader.stats().errors, loader.stats().cache_misses) == (2, SIZE - 1)
        assert loader.stats().cache_hits == SIZE - 1
    assert reader.num_reads == ONCE + Counter({"2": 3, "5": 1})


@both_kinds
def test_what_a_reader_should_not_return_is_refused(files: Any, make_cache: MakeCache, kind: Any) -> None:
    for _ in range(2):
        with (
            DataLoader(files, num_workers=1, reader=kind(lambda _: 7), cache=make_cache()) as loader,
            pytest.raises(DatasetError, match=f"{kind.__name__}.read must return bytes or what has the buffer"),
        ):
            next(iter(loader))


@both_kinds
@pytest.mark.parametrize("make", [lambda path: DiskCache(path, 1 << 20), lambda _: MemoryCache(1 << 20)])
def test_a_location_that_is_no_key(tmp_path: Path, kind: Any, make: Callable[[Path], Any]) -> None:
    dataset: Any = FileDataset([object()], lambda *_: 0)  # type: ignore[list-item]
    with (
        DataLoader(dataset, num_workers=1, reader=kind(), cache=make(tmp_path)) as loader,
        pytest.raises(DatasetError, match="A cache needs locations that are the same in every run"),
    ):
        next(iter(loader))


# On disk.


def spoil(folder: Path) -> int:
    """Damage every second entry, in different ways, and return how many."""
    paths = sorted(path for path in folder.glob("aioload-cache-1/??/*"))[::2]
    for path, way in zip(paths, itertools.cycle(range(3)), strict=False):
        content = path.read_bytes()
        path.write_bytes((content[:-1], content[:-1] + b"\xff", b"")[way])
    return len(paths)


@both_kinds
def test_damaged_entries_are_read_again_and_replaced(tmp_path: Path, files: Any, kind: Any) -> None:
    cache, reader = DiskCache(tmp_path / "cache", 1 << 20), kind()
    with DataLoader(files, 4, num_workers=2, reader=reader, cache=cache) as loader:
        list(loader)
        num_damaged = spoil(tmp_path / "cache")
        assert num_damaged == SIZE // 2
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == EXPECTED
            assert reader.num_reads.total() == SIZE + num_damaged
        assert loader.stats().cache_hits == 2 * SIZE - num_damaged


@both_kinds
def test_of_a_larger_set_what_fits_is_found(tmp_path: Path, files: Any, kind: Any) -> None:
    for cache in (DiskCache(tmp_path / "cache", 12 * 4096), MemoryCache(12 * 330)):
        reader = kind()
        with DataLoader(files, 4, shuffle=True, num_workers=2, reader=reader, cache=cache) as loader:
            for _ in range(2):
                assert sorted(number for batch in loader for number in batch.tolist()) == list(range(SIZE))
            # On disk time counts, and a machine that stands still in the midst of a pass may cost some.
            assert (12 if isinstance(cache, MemoryCache) else 8) <= loader.stats().cache_hits <= 12


@both_kinds
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_folder_that_cannot_be_used_costs_a_warning(tmp_path: Path, files: Any, kind: Any, num_workers: int) -> None:
    (tmp_path / "cache").write_text("a file")
    reader = kind()
    loader = DataLoader(files, 4, num_workers=num_workers, reader=reader, cache=DiskCache(tmp_path / "cache", 1 << 20))
    with loader, pytest.warns(UserWarning, match="keeps nothing more: .*Not a directory") as caught:
        assert [[batch.tolist() for batch in loader] for _ in range(2)] == [EXPECTED] * 2
    assert len(caught) == 1
    assert reader.num_reads == ONCE + ONCE


def test_a_full_disk_costs_a_warning_and_what_is_there_is_found(nursery: Nursery) -> None:
    out = nursery.run_quietly("""
import os, resource, tempfile, warnings
from pathlib import Path
from aioload import DataLoader, DiskCache, FileDataset

folder = Path(tempfile.mkdtemp())
for index in range(20):
    (folder / str(index)).write_bytes(bytes([index]) * (100 if index < 10 else 5000))
# Nothing can be written beyond so many bytes of a file, as if there was no space for it.
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
dataset = FileDataset([folder / str(index) for index in range(20)], lambda data, _: data[0])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache = DiskCache(folder / "c", 1 << 20)
    with DataLoader(dataset, 4, num_workers=1, num_concurrent_reads=1, cache=cache) as loader:
        for _ in range(2):
            assert [int(number) for batch in loader for number in batch] == list(range(20))
    message = str(caught[0].message)
    left = list((folder / "c" / "aioload-cache-1" / "tmp").iterdir())
    print(len(caught), loader.stats().cache_hits, left, "too large" in message)
""")
    assert out == "1 10 [] True\n"


def load_in_a_process(files: Any, cache: Any) -> None:
    reader = Counting()
    with DataLoader(files, 4, num_workers=2, reader=reader, cache=cache) as loader:
        for _ in range(2):
            if [batch.tolist() for batch in loader] != EXPECTED:
                os._exit(2)
    os._exit(0 if reader.num_reads.total() <= SIZE else 3)


def test_several_processes_fill_one_folder_at_once(tmp_path: Path, files: Any) -> None:
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=load_in_a_process, args=(files, cache)) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    assert cache.used_bytes == SIZE * 4096
    reader = Counting()
    with DataLoader(files, 4, num_workers=2, reader=reader, cache=cache) as loader:  # and this one reads nothing
        assert [batch.tolist() for batch in loader] == EXPECTED
    assert reader.num_reads.total() == 0


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_a_fork_in_the_midst_of_a_pass(nursery: Nursery, how: str) -> None:
    nursery.run_quietly(f"""
import os, tempfile, warnings
from pathlib import Path
from aioload import DataLoader, DiskCache, MemoryCache
from aioload.testing import GatedFiles

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
folder = Path(tempfile.mkdtemp())
files = GatedFiles(folder, 20, opened=True)
cache = MemoryCache(1 << 20) if {how!r} == "memory" else DiskCache(folder / "cache", 1 << 20)
loader = DataLoader(files, num_workers=2, cache=cache)
batches = iter(loader)
head = next(batches)
pid = os.fork()
if pid == 0:
    for _ in range(2):
        assert [int(batch) for batch in loader] == list(range(20))
    assert loader.stats().cache_hits >= 20
    loader.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert [int(batch) for batch in (head, *batches)] == list(range(20))
assert [int(batch) for batch in loader] == list(range(20))
loader.close()
""")


# As an argument.


def test_a_loader_keeps_its_cache_and_so_do_its_copies(tmp_path: Path) -> None:
    dataset = FileDataset(["/a"], int)
    cache = DiskCache(tmp_path, 1 << 20)
    loader = DataLoader(dataset, cache=cache)
    assert loader.cache is cache
    assert DataLoader(dataset).cache is None
    assert copy.copy(loader).cache is cache
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert repr(other.cache) == repr(cache)
    for own in (Own(), cache, MemoryCache(1)):
        assert isinstance(own, Cache)
    with pytest.raises(ValueError, match="cache attribute should not be set after DataLoader is initialized"):
        loader.cache = None


class Items(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(("dataset", "what"), [(range(5), "lacks one of them"), (Items(), "is iterated over")])
def test_a_dataset_that_is_not_read_for(dataset: Any, what: str) -> None:
    with pytest.raises(ArgumentError, match=rf"cache=MemoryCache\(max_bytes=1\) is for a dataset with .*{what}"):
        DataLoader(dataset, cache=MemoryCache(1))


@pytest.mark.parametrize("wrong", [object(), MemoryCache, "folder", 3, {1: 2}])
def test_what_is_no_cache(files: Any, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="cache must be a DiskCache, a MemoryCache or an object with the methods"):
        DataLoader(files, cache=wrong)
