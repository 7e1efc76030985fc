"""``prefetch_bytes``: what is in flight stays within it and one sample, and nothing waits for ever because of it."""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import Nursery

from aioload import DataLoader, FileDataset, MemoryCache, ReadPolicy
from aioload.engine import budget, plan
from aioload.engine.budget import Budget, Claim
from aioload.errors import ArgumentError
from aioload.readers import read_file
from aioload.testing import Gates

KB = 1 << 10
BOUND = 2048 * KB


def sizes_mixed(number: int) -> list[int]:
    """Return sizes of 1 KB to 1 MB, of which every fifth is large."""
    return [1024 * KB - index if index % 5 == 2 else 1 * KB + 97 * KB * (index % 7) for index in range(number)]


class Files(FileDataset[Any]):
    """Files of given sizes, each of which holds its index throughout; it knows how much of them is decoded."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        self.sizes = sizes
        self.decodes = Gates(opened=True)
        self.num_decoded = 0
        self.most_raw = 0
        self.num_read: Any = lambda: 0
        self._lock = threading.Lock()
        paths = [folder / str(index) for index in range(len(sizes))]
        for index, path in enumerate(paths):
            path.write_bytes(bytes([index]) * sizes[index])
        super().__init__(paths, self._decode)

    def _decode(self, data: bytes, index: int) -> Any:
        with self._lock:
            self.most_raw = max(self.most_raw, self.num_read() - self.num_decoded)
        self.decodes.pass_through(index)
        sample = np.frombuffer(data, np.uint8).copy()
        assert len(sample) == self.sizes[index]
        assert (sample == index).all()
        with self._lock:
            self.num_decoded += len(data)
        return self.made(sample)

    def made(self, sample: Any) -> Any:
        """Return what is made of the content of a file."""
        return sample


class Rows(Files):
    """The same, decoded to samples of one shape."""

    def made(self, sample: Any) -> Any:
        return np.resize(sample, 1000)


class OwnReader:
    """A reader that says nothing of sizes; it can be held up, by the name of the file."""

    def __init__(self, *, opened: bool = True) -> None:
        self.gates = Gates(opened=opened)

    def read(self, location: Path, offset: int = 0, length: int | None = None) -> bytes:
        self.gates.pass_through(int(Path(location).name))
        return read_file(location)


class AsyncReader(OwnReader):
    """The same, awaited."""

    async def read(self, location: Path, offset: int = 0, length: int | None = None) -> bytes:  # type: ignore[override]
        await self.gates.pass_through_async(int(Path(location).name))
        return read_file(location)


READERS = [None, OwnReader, AsyncReader]


def indices(batches: Iterator[Any]) -> list[int]:
    """Return the indices of the samples of batches, of which the loader is told by the bytes in them."""
    return [int(sample[0]) for batch in batches for sample in batch]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("make_reader", READERS)
@pytest.mark.parametrize(
    ("make", "batch_size", "collate_fn"), [(Files, 1, None), (Files, 3, as_list), (Rows, 3, None), (Rows, 1, None)]
)
@pytest.mark.parametrize("in_order", [True, False])
def test_bytes_in_flight_are_bounded_whatever_the_sizes(
    in_order: bool, make: Any, batch_size: int, collate_fn: Any, make_reader: Any, tmp_path: Path
) -> None:
    dataset = make(tmp_path, sizes_mixed(60))
    largest = max(dataset.sizes)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size,
        num_workers=2,
        collate_fn=collate_fn,
        in_order=in_order,
        reader=make_reader and make_reader(),
        prefetch_bytes=BOUND,
    )
    dataset.num_read = lambda: loader.stats().bytes_read
    with loader:
        for _ in range(2):
            got = indices(iter(loader))
            assert (got if in_order else sorted(got)) == list(range(60))
            assert loader.stats().bytes_in_flight == 0
        assert dataset.most_raw <= BOUND + largest
        # One sample: raw, decoded, and in the batch. Where sizes are not known, the first reads turn out larger than
        # they were taken to be; without a bound it is 8 to 24 times the largest sample.
        num_on_top = 3 if make_reader is None else 5
        assert loader.stats().peak_bytes_in_flight <= BOUND + num_on_top * largest
        assert loader.stats().peak_bytes_in_flight >= largest


@pytest.mark.parametrize(
    "more",
    [
        {"num_concurrent_reads": "auto"},
        {"read": ReadPolicy(timeout_s=60, hedge=True)},
        {"cache": 1 << 30},
        {"cache": 1 << 30, "read": ReadPolicy(timeout_s=60)},
    ],
    ids=["auto", "watched", "cached", "cached and watched"],
)
@pytest.mark.parametrize("make", [Files, Rows])
def test_bytes_are_bounded_however_reads_are_done(make: Any, more: Any, tmp_path: Path) -> None:
    dataset = make(tmp_path, [300 * KB] * 40)
    arguments = more | ({"cache": MemoryCache(more["cache"])} if "cache" in more else {})
    with DataLoader(dataset, 1, num_workers=2, prefetch_bytes=BOUND, **arguments) as loader:
        for _ in range(2):
            assert indices(iter(loader)) == list(range(40))
            assert loader.stats().bytes_in_flight == 0
        assert loader.stats().peak_bytes_in_flight <= BOUND + 900 * KB


@pytest.mark.parametrize("collate_fn", [None, as_list])
@pytest.mark.parametrize("make_reader", READERS)
def test_samples_larger_than_the_bound_come_one_at_a_time(make_reader: Any, collate_fn: Any, tmp_path: Path) -> None:
    dataset = Files(tmp_path, [200 * KB] * 12)
    reader = make_reader and make_reader()
    with DataLoader(dataset, 4, num_workers=2, collate_fn=collate_fn, reader=reader, prefetch_bytes=100 * KB) as loader:
        dataset.num_read = lambda: loader.stats().bytes_read
        assert indices(iter(loader)) == list(range(12))
        assert dataset.most_raw == 200 * KB
        assert dataset.decodes.max_in_flight == 1
        assert reader is None or reader.gates.max_in_flight == 1


@pytest.mark.parametrize("make_reader", [OwnReader, AsyncReader])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_batch_that_is_wanted_goes_on_though_others_hold_all_there_is(
    in_order: bool, make_reader: Any, tmp_path: Path
) -> None:
    dataset = Rows(tmp_path, [300 * KB] * 20)
    reader = make_reader(opened=False)
    with DataLoader(
        dataset, 1, num_workers=1, num_concurrent_reads=16, reader=reader, in_order=in_order, prefetch_bytes=BOUND
    ) as loader:
        batches = iter(loader)
        for index in range(20):
            reader.gates.open(index)  # all behind it come to no end
            assert next(batches)[0, 0] == index
        assert next(batches, None) is None


class SlowDisk:
    """In place of ``os.pread``: takes a while, and counts the bytes that are being read."""

    def __init__(self) -> None:
        self.under_way = self.most_under_way = 0
        self._read, self._lock = os.pread, threading.Lock()

    def __call__(self, fd: int, size: int, offset: int) -> bytes:
        with self._lock:
            self.under_way += size
            self.most_under_way = max(self.most_under_way, self.under_way)
        time.sleep(0.003)
        data = self._read(fd, size, offset)
        with self._lock:
            self.under_way -= size
        return data


@pytest.mark.parametrize("batch_size", [1, 8])
def test_small_files_that_are_being_read_are_few_where_the_bound_is(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, disk = Rows(tmp_path, [20 * KB] * 200), SlowDisk()
    monkeypatch.setattr(os, "pread", disk)
    loader = DataLoader(dataset, batch_size, num_workers=2, num_concurrent_reads=32, prefetch_bytes=200 * KB)
    assert [row for batch in loader for row in batch[:, 0].tolist()] == list(range(200))
    bound = 200 * KB + 20 * KB * batch_size  # the batch that is waited for goes on in any case, all at once
    assert 40 * KB <= disk.most_under_way <= bound
    assert loader.stats().peak_bytes_in_flight <= bound + 4 * KB + 1000 * batch_size


def test_small_files_of_a_batch_that_is_waited_for_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, disk = Rows(tmp_path, [20 * KB] * 200), SlowDisk()
    monkeypatch.setattr(os, "pread", disk)
    loader = DataLoader(dataset, 50, num_workers=2, num_concurrent_reads=32, prefetch_bytes=20 * KB)
    assert [row for batch in loader for row in batch[:, 0].tolist()] == list(range(200))
    assert disk.most_under_way >= 80 * KB  # one at a time takes many times as long


@pytest.mark.parametrize("num_pages", [5, 20])
def test_batches_of_less_than_a_page_count_as_one(num_pages: int, tmp_path: Path) -> None:
    def decode(data: bytes, index: int) -> int:
        if index % 10 == 3:
            time.sleep(0.005)
        return index

    for index in range(300):
        (tmp_path / str(index)).write_bytes(bytes(100))
    dataset = FileDataset([tmp_path / str(index) for index in range(300)], decode)
    loader = DataLoader(dataset, num_workers=8, prefetch_factor=4, prefetch_bytes=num_pages * 4096)
    assert [batch.item() for batch in loader] == list(range(300))
    assert loader.stats().peak_bytes_in_flight <= num_pages * 4096


def test_a_batch_that_is_decoded_late_does_not_hold_up_those_before_it(tmp_path: Path) -> None:
    dataset = Files(tmp_path, [300 * KB] * 20)
    dataset.decodes = Gates()
    with DataLoader(dataset, 1, num_workers=4, prefetch_bytes=1000 * KB) as loader:
        batches = iter(loader)
        for index in range(20):
            dataset.decodes.open(index)
            assert next(batches)[0, 0] == index


def test_bytes_are_counted_from_the_read_to_the_hand_over(tmp_path: Path) -> None:
    dataset = Files(tmp_path, [100 * KB, 10 * KB, 200 * KB])
    dataset.decodes = Gates()
    with DataLoader(dataset, 1, num_workers=3, prefetch_bytes=10 << 20) as loader:
        batches = iter(loader)
        dataset.decodes.wait_started(0, 1, 2)
        assert loader.stats().bytes_in_flight == 310 * KB
        dataset.decodes.open_all()
        assert [len(batch[0]) for batch in batches] == [100 * KB, 10 * KB, 200 * KB]
        assert loader.stats().bytes_in_flight == 0
        assert loader.stats().peak_bytes_in_flight > 310 * KB  # the first row is there before its raw bytes are gone


class Fails(Rows):
    """Some cannot be read, and some not decoded."""

    def location(self, index: int) -> Any:
        return "/does/not/exist/3" if index % 7 == 3 else super().location(index)

    def made(self, sample: Any) -> Any:
        if sample[0] % 5 == 1:
            message = "no such sample"
            raise ValueError(message)
        return super().made(sample)


@pytest.mark.parametrize("make_reader", READERS)
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_is_counted_for_ever(persistent: bool, on_error: Any, make_reader: Any, tmp_path: Path) -> None:
    dataset = Fails(tmp_path, sizes_mixed(40))
    with DataLoader(
        dataset,
        3,
        num_workers=2,
        on_error=on_error,
        persistent_workers=persistent,
        reader=make_reader and make_reader(),
        prefetch_bytes=BOUND // 2,
    ) as loader:
        for stop in (2, 100, 0, 100):
            batches = iter(loader)
            for _ in range(stop):
                try:
                    if next(batches, None) is None:
                        break
                except (ValueError, FileNotFoundError):
                    pass
            batches.close()
            if not persistent:
                assert loader.stats().bytes_in_flight == 0
    assert loader.stats().bytes_in_flight == 0


class Slow(OwnReader):
    """The first read of some files is never answered, or not before the end."""

    def __init__(self, *slow: int) -> None:
        super().__init__(opened=False)
        self._slow = set(slow)

    def read(self, location: Path, offset: int = 0, length: int | None = None) -> bytes:
        if int(Path(location).name) in self._slow:
            self._slow.remove(int(Path(location).name))
            self.gates.pass_through(int(Path(location).name))
        return read_file(location)


@pytest.mark.parametrize("prefetch_bytes", [100 * KB, 2000 * KB])
def test_reads_that_are_given_up_hold_no_bytes(prefetch_bytes: int, tmp_path: Path) -> None:
    dataset = Rows(tmp_path, [200 * KB] * 12)
    reader, policy = Slow(0, 2, 3, 11), ReadPolicy(timeout_s=0.05, backoff_s=0.001)
    with DataLoader(
        dataset, 4, num_workers=2, reader=reader, read=policy, prefetch_bytes=prefetch_bytes, num_concurrent_reads=8
    ) as loader:
        # Those that are given up do not come back before all samples are there.
        assert [int(sample[0]) for batch in loader for sample in batch] == list(range(12))
        assert loader.stats().read_timeouts == 4
        assert loader.stats().bytes_in_flight == 0
        reader.gates.open_all()
    assert loader.stats().bytes_in_flight == 0


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_reads_that_time_out_for_good_hold_no_bytes(on_error: Any, tmp_path: Path) -> None:
    dataset = Rows(tmp_path, [200 * KB] * 12)
    reader, policy = Slow(1, 2, 9), ReadPolicy(timeout_s=0.05, retries=0)
    with DataLoader(
        dataset, 4, num_workers=2, reader=reader, read=policy, on_error=on_error, prefetch_bytes=100 * KB
    ) as loader:
        batches, got = iter(loader), []
        for _ in range(4):
            try:
                got += indices(itertools.islice(batches, 1))
            except TimeoutError:
                got.append(-1)
        left = [index for index in range(12) if index not in (1, 2, 9)]
        assert got == (left if on_error == "skip" else [-1, 4, 5, 6, 7, -1])
        assert loader.stats().bytes_in_flight == 0
        reader.gates.open_all()


class Texts:
    """Samples of a number and a text."""

    def __init__(self, text: Any) -> None:
        self.text, self.num_loaded = text, 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.num_loaded += 1
        return index, self.text + self.text[:1]  # a new one each time


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("text", ["x" * 100 * KB, b"x" * 100 * KB, "\u03c8" * 50 * KB], ids=["ascii", "bytes", "wide"])
def test_texts_are_counted(text: Any, collate_fn: Any, num_workers: int) -> None:
    dataset, most = Texts(text), 1024 * KB
    arguments: dict[str, Any] = {"num_workers": num_workers, "prefetch_factor": 10, "prefetch_bytes": most}
    with DataLoader(dataset, 4, collate_fn=collate_fn, **arguments) as loader:
        batches = iter(loader)
        next(batches)
        before = -1
        while before < dataset.num_loaded:
            before = dataset.num_loaded
            time.sleep(0.05)
        assert 4 < before <= 4 + 10 + num_workers
        assert 400 * KB <= loader.stats().peak_bytes_in_flight <= most + num_workers * 101 * KB
        assert sum(1 for _ in batches) == 24


def test_texts_are_counted_before_their_batch_is_made() -> None:
    gates = Gates()
    gates.open(*range(7))

    class Slow(Texts):
        def __getitem__(self, index: int) -> Any:
            time.sleep(1e-3)
            gates.pass_through(index)
            return super().__getitem__(index)

    with DataLoader(Slow("x" * 100 * KB), 8, num_workers=1) as loader:
        batches = iter(loader)
        gates.wait_started(7)
        assert loader.stats().peak_bytes_in_flight >= 700 * KB
        gates.open_all()
        assert next(batches)[0].tolist() == list(range(8))


def test_nothing_is_counted_where_nothing_is_loaded_ahead(tmp_path: Path) -> None:
    with DataLoader(Files(tmp_path, [100 * KB] * 3), num_workers=0, prefetch_bytes=1) as loader:
        assert indices(iter(loader)) == [0, 1, 2]
        assert loader.stats().peak_bytes_in_flight == 0


def test_the_next_pass_finds_room_only_beside_the_present_one(tmp_path: Path) -> None:
    dataset = Rows(tmp_path, [300 * KB] * 8)
    with DataLoader(dataset, 1, num_workers=2, persistent_workers=True, prefetch_bytes=1000 * KB) as loader:
        for _ in range(4):
            assert indices(iter(loader)) == list(range(8))
        assert loader.stats().peak_bytes_in_flight <= (1000 + 3 * 300) * KB


def test_passes_at_once_do_not_keep_each_other_from_going_on(tmp_path: Path) -> None:
    dataset = Files(tmp_path, [300 * KB] * 8)
    with DataLoader(dataset, 1, num_workers=2, prefetch_bytes=600 * KB) as loader:
        first, second = iter(loader), iter(loader)
        assert next(first)[0, 0] == 0
        assert indices(second) == list(range(8))  # while the first pass keeps all it may
        assert indices(first) == list(range(1, 8))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1GB", float("inf")])
def test_what_is_no_number_of_bytes_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"prefetch_bytes must be a whole number of at least 1, got "):
        DataLoader(range(3), prefetch_bytes=value)


def test_numbers_of_all_kinds_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given = DataLoader(range(3), prefetch_bytes=np.int64(5000))  # type: ignore[arg-type]
    assert given.prefetch_bytes == 5000
    assert type(given.prefetch_bytes) is int
    monkeypatch.setattr(plan, "available_bytes", lambda: 4000)
    loader: DataLoader[Any] = DataLoader(range(3), prefetch_bytes=None)
    assert plan.plan_of(loader, None).settings.max_bytes == 1000  # type: ignore[arg-type]
    assert plan.plan_of(given, None).settings.max_bytes == 5000  # type: ignore[arg-type]


RESIDENT = """
    import ctypes, random, tempfile, threading
    from pathlib import Path
    import numpy as np
    from aioload import DataLoader, FileDataset, MemoryCache, ReadPolicy

    MB = 1 << 20
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    peak = 0

    def decode(data, index):
        global peak
        sample = np.frombuffer(data, np.uint8).copy()
        peak = max(peak, resident())
        return sample

    def load(paths, **arguments):
        with DataLoader(FileDataset(paths, decode), 4, num_workers=2, collate_fn=list, **arguments) as loader:
            return sum(len(sample) for batch in loader for sample in batch)

    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(0)
        sizes = [int(1024 * 8192 ** draw.random()) for _ in range(50)] + [8 * MB] * 6
        draw.shuffle(sizes)
        paths = [Path(folder, str(number)) for number in range(len(sizes))]
        for path, size in zip(paths, sizes):
            path.write_bytes(bytes(size))
        load(paths[:1])
        before, peak = resident(), 0
        assert load(paths, prefetch_bytes=32 * MB) == sum(sizes)
    batch = 4 * 8 * MB  # what the consumer still has of the batch before
    print((peak - before) // MB, (32 * MB + 2 * 8 * MB + batch) // MB)
"""


def test_memory_of_the_process_stays_within_the_bound_and_a_sample(nursery: Nursery) -> None:
    peak, most = map(int, nursery.run_quietly(RESIDENT).split())
    assert peak <= most


# The accounting alone.

sizes = st.integers(0, 1 << 40)
fractions = st.floats(0, 1000)


@given(raw=sizes, placed=sizes, loose=sizes, whole=sizes, growth=fractions, num_copies=st.integers(1, 2))
def test_what_is_expected_is_no_less_than_what_there_is(
    raw: int, placed: int, loose: int, whole: int, growth: float, num_copies: int
) -> None:
    expected = budget.expected_bytes(raw, placed, loose, whole, growth=growth, num_copies=num_copies)
    assert expected >= raw + placed + loose + whole
    assert expected >= int(raw * growth) * num_copies + placed + whole


@settings(deadline=None)
@given(seen=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=100))
def test_a_read_is_assumed_as_large_as_the_largest_of_late(seen: list[int]) -> None:
    assumed: int | None = None
    for size in seen:
        assumed = budget.assumed_bytes(assumed, size)
    assert assumed is not None
    assert max(seen[-10:]) * 0.95 <= assumed <= max(seen)
    for _ in range(4000):
        assumed = budget.assumed_bytes(assumed, 1000)
    assert assumed < 1500 or max(seen) < 1000


@given(most=sizes, makers=st.integers(1, 100), largest=sizes, reads=st.integers(0, 1000))
def test_at_least_half_is_left_of_what_is_set_aside(most: int, makers: int, largest: int, reads: int) -> None:
    assert 0 <= budget.margin_bytes(most, makers, largest) <= most / 2
    assert most // 2 <= budget.batch_bytes_allowed(most, reads, largest) <= most


steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 1 << 20)), max_size=60)


@given(steps=steps)
def test_sums_are_those_of_the_batches_and_come_to_nothing(steps: list[tuple[int, int, int]]) -> None:
    whole = Budget(1 << 20)
    claims = [Claim(whole, number) for number in range(3)]
    raw: dict[int, list[int]] = {0: [], 1: [], 2: []}
    decoded, rows, closed = [0, 0, 0], [0, 0, 0], set()
    claim: Claim | None
    for which, step, size in steps:
        claim = claims[which]
        if step == 0:
            claim.take_raw(size)
            raw[which].append(size)
        elif step == 1 and raw[which]:
            claim.give_decoded(raw[which].pop())
        elif step == 2:
            claim.add_loose(size)
            decoded[which] += size
        elif step == 3:
            claim.set_whole(size, row_bytes=size % 3)
            rows[which] = size
        elif step == 4:
            claim.finish(size)
            decoded[which], rows[which] = 0, size
        elif step == 5:
            claim.close()
            closed.add(which)
        expected = sum(sum(raw[n]) + decoded[n] + rows[n] for n in range(3) if n not in closed)
        assert abs(whole.num_bytes - expected) <= 3 * 2 * budget.small_bytes(whole.max_bytes)
        assert whole.num_bytes <= whole.peak_bytes
    claim = None
    claims.clear()  # without being closed
    assert (whole.raw, whole.placed, whole.loose, whole.whole) == (0, 0, 0, 0)


def test_a_folder_in_place_of_a_file_has_no_bytes(tmp_path: Path) -> None:
    """Whatever the file system says that its size is."""
    (tmp_path / "file").write_bytes(bytes(100))
    paths = [str(tmp_path / "file")] * 50 + [str(tmp_path)] + [str(tmp_path / "file")] * 50
    dataset = FileDataset(paths, lambda data, _: len(data))
    with DataLoader(dataset, 10, num_workers=1, num_concurrent_reads=1, on_error="skip") as loader:
        assert sum(map(len, loader)) == 100
        assert [error.index for error in loader.errors()] == [50]
        assert loader.stats().peak_bytes_in_flight < 1 << 20
