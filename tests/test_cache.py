"""Caches by themselves: what both of them promise, and what the one on disk does for runs and processes."""

import copy
import errno
import multiprocessing
import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from aioload import DiskCache, MemoryCache
from aioload.cache import Cache, entry, key_of, memory
from aioload.cache.admission import Admission
from aioload.errors import ArgumentError, DatasetError

Make: TypeAlias = Callable[[int], Any]
"""Returns a cache with room for so many entries of up to 1,000 bytes."""


@pytest.fixture(params=["disk", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def make(num_entries: int) -> Any:
        if request.param == "disk":
            return DiskCache(tmp_path / "cache", num_entries * entry.size_on_disk(1000))
        return MemoryCache(num_entries * (1000 + memory.OVERHEAD_BYTES))

    return make


def contents(index: int) -> bytes:
    return random.Random(index).randbytes(1000)


def ask(cache: Any, index: int) -> bool:
    """Ask for a location as a loader does, and return whether it was there."""
    found = cache.get(f"/data/{index}")
    if found is None:
        cache.put(f"/data/{index}", contents(index))
        return False
    assert found == contents(index)
    return True


def hit_rate(cache: Any, indices: Any) -> float:
    hits = [ask(cache, index) for index in indices]
    return sum(hits) / len(hits)


def files_of(folder: Path) -> list[Path]:
    """Return the files of entries."""
    return sorted(path for path in (folder / "aioload-cache-1").glob("[0-9a-f]*/*") if len(path.parent.name) == 2)


def bytes_of(folder: Path) -> int:
    return sum(entry.blocks_of(path.stat().st_size) for path in files_of(folder))


# What both promise.


@pytest.mark.parametrize("size", [0, 1, 4096, 65519, 65520, 65521, 200_000, 3_000_000])
def test_what_was_put_there_is_found(make: Make, size: int) -> None:
    cache, data = make(4000), os.urandom(size)
    assert cache.get("/a") is None
    cache.put("/a", data)
    cache.put("/b", b"another")
    found = cache.get("/a")
    assert type(found) is bytes
    assert found == data
    assert cache.get("/c") is None
    assert isinstance(cache, Cache)


def test_what_is_there_stays(make: Make) -> None:
    cache = make(10)
    cache.put("/a", b"first")
    used = cache.used_bytes
    cache.put("/a", b"second")
    assert cache.get("/a") == b"first"
    assert cache.used_bytes == used


def test_it_takes_no_more_than_it_may(make: Make) -> None:
    cache = make(10)
    for index in range(30):
        ask(cache, index)
        assert cache.used_bytes <= cache.max_bytes
    assert sum(cache.get(f"/data/{index}") is not None for index in range(30)) == 10
    cache.put("/large", bytes(cache.max_bytes))  # with its overhead more than the whole cache
    assert cache.get("/large") is None
    assert sum(cache.get(f"/data/{index}") is not None for index in range(30)) == 10


@pytest.mark.parametrize("shuffled", [False, True])
def test_of_a_larger_set_each_pass_finds_what_fits(make: Make, shuffled: bool) -> None:
    cache, indices, generator = make(100), list(range(200)), random.Random(0)
    rates = []
    for _ in range(6):
        rates.append(hit_rate(cache, indices))
        if shuffled:
            generator.shuffle(indices)
    assert rates[0] == 0
    # On disk time counts, and a machine that stands still in the midst of a pass may cost some.
    assert rates[1:] == [0.5] * 5 if isinstance(cache, MemoryCache) else rates[1] >= 0.4
    assert max(rates) == 0.5


def test_what_nobody_asks_for_any_more_makes_room(make: Make) -> None:
    cache = make(100)
    for _ in range(3):
        hit_rate(cache, range(100))
    deadline = time.monotonic() + 60  # on disk, what may go depends on how long passes take
    while hit_rate(cache, range(1000, 1100)) < 0.9:
        assert time.monotonic() < deadline
    assert hit_rate(cache, range(100)) < 0.2
    assert cache.used_bytes <= cache.max_bytes


def test_clear(make: Make) -> None:
    cache = make(10)
    cache.clear()
    hit_rate(cache, range(10))
    cache.clear()
    assert cache.used_bytes == 0
    assert hit_rate(cache, range(10)) == 0
    assert hit_rate(cache, range(10)) == 1


def test_many_threads(make: Make) -> None:
    cache = make(60)

    def work(seed: int) -> int:
        generator = random.Random(seed)
        return sum(ask(cache, generator.randrange(120)) for _ in range(300))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    assert sum(cache.get(f"/data/{index}") is not None for index in range(120)) == 60
    assert cache.used_bytes == cache.max_bytes


def test_a_lock_that_another_thread_has_is_open_in_a_fork(make: Make) -> None:
    cache = make(10)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock, cache._admission._lock:
            held.set()
            go_on.wait(60)

    def use() -> None:
        os._exit(0 if hit_rate(cache, range(5)) == 0 and hit_rate(cache, range(5)) == 1 else 1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    process = multiprocessing.get_context("fork").Process(target=use)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        process.start()
    process.join(60)
    go_on.set()
    thread.join()
    assert process.exitcode == 0
    process.close()


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, None, True])
def test_a_size_that_is_none(tmp_path: Path, max_bytes: Any) -> None:
    for make in (MemoryCache, lambda size: DiskCache(tmp_path, size)):
        with pytest.raises(ArgumentError, match="max_bytes must be a whole number of at least 1, got"):
            make(max_bytes)


# Keys.


def test_one_path_is_one_key_however_it_is_written() -> None:
    assert key_of("/a/b") == key_of(b"/a/b") == key_of(Path("/a/b")) == "/a/b"
    assert key_of("s3://bucket/key") == "s3://bucket/key"
    assert key_of(3) == key_of(np.int64(3))
    assert len({key_of(key) for key in (3, "3", "/3", ("3", 3), (3, 3), ("3",), ("3,3",), ((3,), 3), ())}) == 9


def test_a_relative_path_belongs_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    cache = make(10)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert cache.get("a.jpg") is None
        cache.put("a.jpg", name.encode())
        assert cache.get(tmp_path / name / "a.jpg") == name.encode()
        assert cache.get(("a.jpg", 3)) is None
        cache.put(("a.jpg", 3), b"part of " + name.encode())
        assert cache.get((Path("a.jpg"), 3)) == b"part of " + name.encode()


@pytest.mark.parametrize("location", [object(), None, 1.5, ["/a"], {"path": "/a"}, ("/a", object())])
def test_what_is_no_key(make: Make, location: Any) -> None:
    cache = make(10)
    match = r"A cache needs locations that are the same in every run: .* got"
    with pytest.raises(DatasetError, match=match):
        cache.get(location)
    with pytest.raises(DatasetError, match=match):
        cache.put(location, b"")


def test_odd_strings_are_keys(make: Make) -> None:
    cache = make(10)
    for number, key in enumerate(("/\udcff", b"/\xfe", "/\ud800", "", "/ü\n", "/\0")):
        cache.put(key, b"%d" % number)
    for number, key in enumerate(("/\udcff", b"/\xfe", "/\ud800", "", "/ü\n", "/\0")):
        assert cache.get(key) == b"%d" % number


# What may go, decided by numbers alone.


def rounds(admission: Admission, keys: Any, now: float = 0) -> float:
    for key in keys:
        if not hash(key) & admission.mask:
            admission.note(key, now)
        now += 1
    return now


@pytest.mark.parametrize("num_keys", [20, 1000, 50_000])
def test_nothing_may_go_before_it_is_known_how_long_keys_take(num_keys: int) -> None:
    admission = Admission(0, 1.25)
    now = rounds(admission, range(num_keys))
    assert not admission.is_worth_a_look()
    assert not admission.may_go(-1e9, now)
    now = rounds(admission, range(num_keys), now)
    now = rounds(admission, range(num_keys), now)
    assert admission.is_worth_a_look()
    assert not admission.may_go(now - 2 * num_keys, now)  # as long as a key of a shuffled set may have to wait
    now = rounds(admission, range(num_keys), now)
    assert admission.may_go(0, now)


@pytest.mark.parametrize("seed", range(5))
def test_no_key_of_a_shuffled_set_may_go(seed: int) -> None:
    generator, admission = random.Random(seed), Admission(0, 1.25)
    keys, now, used = list(range(700)), 0.0, dict.fromkeys(range(700), 0.0)
    for _ in range(12):
        generator.shuffle(keys)
        for key in keys:
            assert not admission.may_go(used[key], now)
            now = rounds(admission, [key], now)
            used[key] = now


def test_a_few_hot_keys_do_not_make_the_others_go() -> None:
    """As those of a validation set that is passed over ten times while the others are once."""
    generator, admission = random.Random(0), Admission(0, 1.25)
    now, used = 0.0, dict.fromkeys(range(1000), 0.0)
    for _ in range(6):
        keys = list(range(1000))
        generator.shuffle(keys)
        for number, key in enumerate(keys):
            now = rounds(admission, [key], now)
            used[key] = now
            if number % 100 == 0:
                now = rounds(admission, range(-100, 0), now)
        assert not any(admission.may_go(each, now) for each in used.values())


def test_looks_in_vain_become_rare() -> None:
    admission = Admission(0, 1.25)
    rounds(admission, [*range(100)] * 4)

    def num_looks(*, found: bool) -> int:
        num_looks = 0
        for _ in range(1000):
            if admission.is_worth_a_look():
                num_looks += 1
                admission.looked(found=found)
        return num_looks

    assert num_looks(found=False) < 25
    assert num_looks(found=True) > 900


# On disk.


def test_another_object_finds_it(tmp_path: Path) -> None:
    hit_rate(DiskCache(tmp_path, 1 << 20), range(20))
    cache = DiskCache(tmp_path, 1 << 20)
    assert hit_rate(cache, range(20)) == 1
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert repr(other) == repr(cache) == f"DiskCache({str(tmp_path)!r}, max_bytes={1 << 20})"
        assert hit_rate(other, range(20)) == 1


def test_a_memory_cache_is_empty_when_it_comes_out_of_a_pickle() -> None:
    cache = MemoryCache(1 << 20)
    hit_rate(cache, range(20))
    other = pickle.loads(pickle.dumps(cache))
    assert (other.max_bytes, other.used_bytes) == (1 << 20, 0)
    assert hit_rate(other, range(20)) == 0


def test_namespaces_are_apart_and_share_the_space(tmp_path: Path) -> None:
    first, second = (DiskCache(tmp_path, 10 * 4096, namespace) for namespace in ("", "other"))
    first.put("/a", b"1")
    assert second.get("/a") is None
    second.put("/a", b"2")
    assert (first.get("/a"), second.get("/a")) == (b"1", b"2")
    assert first.used_bytes == second.used_bytes == 2 * 4096
    assert hit_rate(second, range(20)) == 0
    assert hit_rate(second, range(20)) == 8 / 20
    assert pickle.loads(pickle.dumps(second)).get("/a") == b"2"
    with pytest.raises(ArgumentError, match="namespace must be a string; got 3"):
        DiskCache(tmp_path, 1, 3)  # type: ignore[arg-type]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flip(position: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)

    return flip


@pytest.mark.parametrize("size", [1000, 100_000])
@pytest.mark.parametrize("damage", [truncate, empty, lengthen, *map(flip, (0, 4, 8, 16, 500, -1))])
def test_a_damaged_entry_is_not_found_and_makes_room(tmp_path: Path, damage: Callable[[Path], None], size: int) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put("/a", bytes(size))
    (path,) = files_of(tmp_path)
    damage(path)
    assert cache.get("/a") is None
    assert files_of(tmp_path) == []
    cache.put("/a", bytes(size))
    assert cache.get("/a") == bytes(size)


def test_what_a_killed_writer_left_is_cleaned_up(tmp_path: Path) -> None:
    hit_rate(DiskCache(tmp_path, 1 << 20), range(3))
    old, new = tmp_path / "aioload-cache-1" / "tmp" / "old", tmp_path / "aioload-cache-1" / "tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    hit_rate(DiskCache(tmp_path, 1 << 20), range(3, 6))
    assert not old.exists()
    assert new.exists()  # it may be being written


def test_what_was_counted_and_never_came_is_noticed_when_it_is_full(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10 * 4096)
    hit_rate(cache, range(3))
    with cache._usage.locked() as usage:  # as a process that is killed between counting and naming leaves it
        usage.used_bytes, usage.counted_at = 10 * 4096, 0.0
    other = DiskCache(tmp_path, 10 * 4096)
    hit_rate(other, range(10))
    assert hit_rate(other, range(10)) == 1
    assert other.used_bytes == bytes_of(tmp_path) == 10 * 4096


def test_a_lost_or_damaged_record_is_made_anew(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10 * 4096)
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"nonsense"), flip(5)):
        hit_rate(cache, range(5))
        spoil(tmp_path / "aioload-cache-1" / "usage")
        hit_rate(cache, range(6, 20))
        assert bytes_of(tmp_path) == cache.used_bytes == 10 * 4096
        cache.clear()


def test_what_is_not_ours_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    mine = [tmp_path / "usage", tmp_path / "tmp" / "mine", *(tmp_path / f"{n:02x}" / f"{n:030x}" for n in range(256))]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    cache = DiskCache(tmp_path, 20 * 4096)
    for epoch in range(6):  # each looks for what may go
        hit_rate(cache, range(20 * epoch, 20 * epoch + 20))
    cache.clear()
    assert [path.read_bytes() for path in mine] == [b"mine"] * len(mine)


def test_what_was_read_before_it_was_cleared_does_not_come_in(make: Make) -> None:
    cache = make(10)
    before = cache.generation
    cache.put("/a", b"a", generation=before)
    cache.clear()
    assert cache.generation != before
    cache.put("/a", b"old", generation=before)
    assert cache.get("/a") is None
    cache.put("/a", b"new", generation=cache.generation)
    assert cache.get("/a") == b"new"


def test_other_processes_learn_that_it_was_cleared(tmp_path: Path) -> None:
    cache, other = DiskCache(tmp_path, 1 << 20), DiskCache(tmp_path, 1 << 20)
    before = cache.generation
    other.clear()  # before anything was there
    cache.put("/a", b"old", generation=before)
    assert other.get("/a") is None


@pytest.mark.parametrize("make_entry", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_what_is_no_file_is_no_entry(make_entry: Callable[[Path], None], tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put("/a", b"a")
    (path,) = files_of(tmp_path)
    path.unlink()
    make_entry(path)
    assert cache.get("/a") is None


def test_an_entry_in_the_place_of_another_is_not_found(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put("/a", b"of a")
    (path,) = files_of(tmp_path)
    other = path.read_bytes()
    cache.clear()
    cache.put("/b", b"of b")
    (path,) = files_of(tmp_path)
    path.write_bytes(other)
    assert cache.get("/b") is None


@pytest.mark.parametrize("path", ["", b"cache", None, 3])
def test_what_is_no_folder_is_an_error(path: Any) -> None:
    with pytest.raises(ArgumentError, match=f"needs the path of a folder, as a string or a Path; got {path!r}"):
        DiskCache(path, 1 << 20)


def test_hits_are_written_down_when_it_is_nearly_full(tmp_path: Path) -> None:
    for num_entries, is_written in ((4, False), (9, True)):
        cache = DiskCache(tmp_path, 10 * 4096)
        hit_rate(cache, range(num_entries))
        for path in files_of(tmp_path):
            os.utime(path, (1, 1))
        assert hit_rate(DiskCache(tmp_path, 10 * 4096), range(num_entries)) == 1
        assert {path.stat().st_mtime > 1 for path in files_of(tmp_path)} == {is_written}
        cache.clear()


def test_what_another_process_asks_for_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 40 * 4096)
    hit_rate(cache, range(20))
    for path in files_of(tmp_path):
        os.utime(path, (2**40, 2**40))  # as if another process was using it at any time
    hit_rate(cache, range(1000, 1020))
    assert cache.used_bytes == cache.max_bytes
    deadline = time.monotonic() + 60
    while hit_rate(cache, range(2000, 2020)) < 1:  # then they have the place of those that nobody asks for
        assert time.monotonic() < deadline
    assert all(cache.get(f"/data/{index}") is not None for index in range(20))
    assert not any(cache.get(f"/data/{index}") for index in range(1000, 1020))


def fill(path: Path, seed: int) -> None:
    cache, generator = DiskCache(path, 60 * 4096), random.Random(seed)
    for _ in range(400):
        ask(cache, generator.randrange(100))
    os._exit(0 if cache.used_bytes == 60 * 4096 else 1)


def test_several_processes_at_once(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=fill, args=(tmp_path, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    assert bytes_of(tmp_path) == 60 * 4096  # none was counted twice, and none forgotten
    assert list((tmp_path / "aioload-cache-1" / "tmp").iterdir()) == []


@pytest.mark.parametrize("where", ["file", "below a file", "name too long"])
def test_a_folder_that_cannot_be_used_is_told_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    path = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "x"}.get(where, tmp_path / ("x" * 300))
    cache = DiskCache(path, 1 << 20)
    with pytest.warns(UserWarning, match="keeps nothing more: ") as caught:
        assert hit_rate(cache, [*range(20), *range(20)]) == 0
    assert len(caught) == 1
    assert cache.used_bytes == 0
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_lack_of_descriptors_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    cache = DiskCache(tmp_path, 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(entry, "write", fail)
        cache.put("/a", b"1")
    cache.put("/a", b"1")
    assert cache.get("/a") == b"1"


def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache._look_at = time.time() + 1e6
    assert hit_rate(cache, range(9)) == 0
    assert hit_rate(cache, range(9)) == 1
    assert cache._look_at < time.time() + 10
