"""Small files, and samples that take no time, are loaded several at a time; nothing of that shows in what comes out."""

import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same
from outcomes import of_iterator

from aioload import DataLoader, FileDataset, error_context, sample_rng
from aioload.engine.staged import samples_per_job

NUM_FILES = 480  # many batches: only after the first ones is it known that decoding takes no time


def begin(number: int) -> None:
    """Do nothing, but where samples are decoded, which has to be on threads for that alone."""


wherever_decoded = pytest.mark.parametrize("worker_init_fn", [None, begin])


class SmallFiles:
    """Samples of small files, of which some cannot be found, read or decoded, or do not fit the others."""

    def __init__(self, folder: Path, seed: int, num_odd: int) -> None:
        numbers = random.Random(seed)
        self.missing, self.lost, self.broken = (set(numbers.sample(range(NUM_FILES), num_odd)) for _ in range(3))
        self.folder = folder
        for number in range(NUM_FILES):
            if number not in self.missing:
                (folder / str(number)).write_bytes(np.full(40, number, np.int32).tobytes())

    def __len__(self) -> int:
        return NUM_FILES

    def location(self, index: int) -> str:
        if index in self.lost:
            raise LookupError(index)
        return str(self.folder / str(index))

    def decode(self, data: bytes, index: int) -> Any:
        if index in self.broken:
            raise ValueError(index)
        numbers = np.frombuffer(data, np.int32).copy()
        return {"numbers": numbers, "index": index, "drawn": float(sample_rng().random()), "name": f"{numbers[0]}"}

    def __getitem__(self, index: int) -> Any:
        return self.decode(Path(self.location(index)).read_bytes(), index)

    @property
    def bad(self) -> set[int]:
        return self.missing | self.lost | self.broken


class Samples:
    """The same as a dataset of which only the samples can be asked for; or the numbers of each, which take long."""

    def __init__(self, files: SmallFiles, *, are_light: bool = False) -> None:
        self.files, self.are_light = files, are_light

    def __len__(self) -> int:
        return NUM_FILES

    def __getitem__(self, index: int) -> Any:
        if not self.are_light:
            return self.files[index]
        ends_s = time.thread_time() + 3e-4
        while time.thread_time() < ends_s:
            pass
        sample = self.files[index]
        return {"index": sample["index"], "drawn": sample["drawn"]}


def told(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes, each error as its class, index and stage."""
    return [
        (type(each), error_context(each)[0], error_context(each)[2]) if isinstance(each, BaseException) else each  # type: ignore[index]
        for each in outcomes
    ]


def stage_of(dataset: SmallFiles, index: int) -> tuple[type[Exception], int, str]:
    if index in dataset.lost:
        return LookupError, index, "read"
    return (FileNotFoundError, index, "read") if index in dataset.missing else (ValueError, index, "decode")


@pytest.mark.parametrize(
    ("decode_cost_s", "num_samples"), [(0.0, 64), (17.5e-6, 64), (35e-6, 32), (70e-6, 16), (1.0, 1)]
)
def test_one_thread_is_given_as_many_as_it_decodes_within_a_millisecond(decode_cost_s: float, num_samples: int) -> None:
    assert samples_per_job(decode_cost_s) == num_samples


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("batch_size", [24, 80])
@pytest.mark.parametrize(("seed", "num_odd"), [(0, 0), (1, 4), (2, 40)])
@wherever_decoded
def test_each_batch_is_made_or_fails_as_without_threads(
    worker_init_fn: Any, seed: int, num_odd: int, batch_size: int, num_workers: int, tmp_path: Path
) -> None:
    dataset = SmallFiles(tmp_path, seed, num_odd)
    arguments: dict[str, Any] = {"batch_size": batch_size, "seed": 5}
    expected = told(of_iterator(iter(DataLoader(dataset, num_workers=0, **arguments))))
    loader: DataLoader[Any] = DataLoader(
        dataset,
        num_workers=num_workers,
        num_concurrent_reads=num_workers,
        worker_init_fn=worker_init_fn,
        **arguments,
    )
    for _ in range(2):
        loader.set_epoch(0)
        got = told(of_iterator(iter(loader)))
        for start, batch in zip(range(0, NUM_FILES, batch_size), got, strict=True):
            bad = sorted(dataset.bad & set(range(start, start + batch_size)))
            assert not bad or batch == stage_of(dataset, bad[0])
        assert_same([each for each in got if type(each) is dict], [each for each in expected if type(each) is dict])


@pytest.mark.parametrize("num_odd", [4, 40])
@wherever_decoded
def test_those_that_fail_are_left_out(worker_init_fn: Any, num_odd: int, tmp_path: Path) -> None:
    dataset = SmallFiles(tmp_path, 3, num_odd)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        24,
        num_workers=1,
        num_concurrent_reads=1,
        on_error="skip",
        max_errors=None,
        worker_init_fn=worker_init_fn,
    )
    indices = [index for batch in loader for index in batch["index"].tolist()]
    assert indices == [index for index in range(NUM_FILES) if index not in dataset.bad]
    assert sorted(told_error[1] for told_error in told([each.error for each in loader.errors()])) == sorted(dataset.bad)


@wherever_decoded
def test_samples_of_another_form_are_collated_as_by_torch(worker_init_fn: Any, tmp_path: Path) -> None:
    for number in range(NUM_FILES):
        (tmp_path / str(number)).write_bytes(bytes([number % 5 == 4]))

    def decode(data: bytes, index: int) -> Any:
        return float(index) if data[0] else index

    dataset = FileDataset([str(tmp_path / str(number)) for number in range(NUM_FILES)], decode)
    loader = DataLoader(dataset, 20, num_workers=1, num_concurrent_reads=1, worker_init_fn=worker_init_fn)
    assert_same(list(loader), list(DataLoader(dataset, 20, num_workers=0)))


@pytest.mark.usefixtures("forks_are_served")
@pytest.mark.parametrize(("num_workers", "processes"), [(1, 0), (3, 0), (1, 1)])
@pytest.mark.parametrize("num_odd", [4, 40])
@pytest.mark.parametrize("are_light", [False, True])
def test_batches_of_a_map_style_dataset_are_made_or_fail_as_without_threads(
    are_light: bool, num_odd: int, num_workers: int, processes: int, tmp_path: Path
) -> None:
    files = SmallFiles(tmp_path, 7, num_odd)
    dataset = Samples(files, are_light=are_light)
    arguments: dict[str, Any] = {"batch_size": 24, "seed": 5}
    expected = told(of_iterator(iter(DataLoader(dataset, num_workers=0, **arguments))))
    arguments |= {"num_workers": num_workers, "processes": processes}
    with DataLoader(dataset, **arguments) as loader:
        assert_same(told(of_iterator(iter(loader))), expected)
    with DataLoader(dataset, on_error="skip", max_errors=None, **arguments) as loader:
        indices = [index for batch in loader for index in batch["index"].tolist()]
        assert indices == [index for index in range(NUM_FILES) if index not in files.bad]
        assert sorted(error_context(each.error)[0] for each in loader.errors()) == sorted(files.bad)  # type: ignore[index]


class Pairs:
    """Samples that take no time, up to a number from which on each waits until another one is being loaded as well."""

    def __init__(self, num_quick: int) -> None:
        self.num_quick, self.barrier = num_quick, threading.Barrier(2)

    def __len__(self) -> int:
        return NUM_FILES

    def __getitem__(self, index: int) -> int:
        if index >= self.num_quick:
            self.barrier.wait()
        return index


@pytest.mark.parametrize("batch_size", [1, 24, 480])
def test_samples_that_come_to_wait_for_each_other_are_loaded_singly(batch_size: int) -> None:
    dataset = Pairs(NUM_FILES - 100)
    for _ in range(2):
        batches = list(DataLoader(dataset, batch_size, num_workers=2))
        assert torch.cat(batches).tolist() == list(range(NUM_FILES))


class Counting:
    """Reads, and counts what has been read and not been decoded, where the first of each 24 takes time to decode."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.num_wanted = NUM_FILES  # those of batches that are waited for; there may be more of them
        self.raw: set[int] = set()
        self.most_ahead = 0

    def read(self, location: str, offset: int = 0, length: int | None = None) -> bytes:
        self.raw.add(int(Path(location).name))
        self.most_ahead = max(self.most_ahead, sum(index >= self.num_wanted for index in self.raw.copy()))
        return Path(location).read_bytes()

    def decode(self, data: bytes, index: int) -> int:
        if index % 24 == 0:
            time.sleep(self.pause_s)
        self.raw.discard(index)
        return len(data)


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@wherever_decoded
def test_few_are_read_ahead_where_bytes_are_scarce(worker_init_fn: Any, pause_s: float, tmp_path: Path) -> None:
    for number in range(NUM_FILES):
        (tmp_path / str(number)).write_bytes(bytes(4000))
    counting = Counting(pause_s)
    dataset = FileDataset([str(tmp_path / str(number)) for number in range(NUM_FILES)], counting.decode)
    arguments: dict[str, Any] = {"num_workers": 1, "num_concurrent_reads": 1, "reader": counting}
    batches = iter(DataLoader(dataset, 24, prefetch_bytes=20_000, worker_init_fn=worker_init_fn, **arguments))
    for counting.num_wanted in range(2 * 24, NUM_FILES + 2 * 24, 24):  # as one is taken, the next one is waited for
        assert next(batches).tolist() == [4000] * 24
        time.sleep(2.5 * pause_s)
    assert counting.most_ahead <= 20_000 / 4000


class Buffer(bytearray):
    """Memory that a weak reference can be made to."""


class Alternating:
    """Samples that take a while: of one batch numbers, of the next one parts of large buffers, and so on."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.num_alive, self.most = batch_size, 0, 0

    def __len__(self) -> int:
        return 6 * self.batch_size

    def __getitem__(self, index: int) -> Any:
        time.sleep(1e-3)
        if index // self.batch_size % 2 == 0:
            return index
        buffer = Buffer(1 << 20)
        weakref.finalize(buffer, self._note_gone)
        self.num_alive += 1
        self.most = max(self.most, self.num_alive)
        return np.frombuffer(buffer, np.uint8)[:4]

    def _note_gone(self) -> None:
        self.num_alive -= 1


def test_what_holds_memory_is_let_go_of_soon_whatever_the_batch_before_was_like() -> None:
    dataset = Alternating(16)
    batches = list(DataLoader(dataset, 16, num_workers=1))
    assert [batch.shape for batch in batches] == [(16,), (16, 4)] * 3
    assert dataset.most <= 2
