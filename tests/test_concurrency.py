"""What is loaded at the same time as what else."""

import itertools
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from outcomes import of_iterator

from aioload import DataLoader, FileDataset
from aioload.engine import pools, tuner
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_the_samples_of_a_batch_are_loaded_side_by_side(num_workers: int) -> None:
    barrier = threading.Barrier(num_workers)

    class Meeting:
        """A sample comes when as many are being loaded as there are workers."""

        def __len__(self) -> int:
            return 2 * num_workers

        def __getitem__(self, index: int) -> int:
            barrier.wait(60)
            return index

    with DataLoader(Meeting(), batch_size=2 * num_workers, num_workers=num_workers) as loader:
        assert of_iterator(iter(loader)) == [list(range(2 * num_workers))]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def make_files(folder: Path, size: int) -> GatedFiles:
    return GatedFiles(folder, size)


def make_awaited(_: Path, size: int) -> AsyncGatedDataset:
    return AsyncGatedDataset(size)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("make", [make_files, make_awaited])
def test_as_many_reads_are_in_flight_as_asked_for_though_none_is_done_and_nobody_asks(
    make: Any, batch_size: int, tmp_path: Path
) -> None:
    with make(tmp_path, 200) as dataset:
        loader = DataLoader(dataset, batch_size=batch_size, num_workers=1, num_concurrent_reads=24)
        batches = iter(loader)
        dataset.gates.wait_num_started(24)
        assert dataset.gates.in_flight == 24
        dataset.gates.open_all()
        assert flat(of_iterator(batches)) == list(range(200))
        assert dataset.gates.max_in_flight == 24


def test_as_many_are_in_flight_again_when_reads_turn_slow(tmp_path: Path) -> None:
    """Reads of cached files are done by few threads; when the storage turns slow, the others must come back."""
    with GatedFiles(tmp_path, 400) as dataset:
        dataset.gates.open(*range(300))
        with DataLoader(dataset, num_workers=1, num_concurrent_reads=16) as loader:
            batches = iter(loader)
            assert [next(batches).item() for _ in range(300)] == list(range(300))
            waiting = threading.Thread(target=next, args=(batches, None))
            waiting.start()
            dataset.gates.wait_started(*range(300, 316))
            dataset.gates.open_all()
            waiting.join()
            assert flat(of_iterator(batches)) == list(range(301, 400))


@pytest.mark.parametrize("kind", [GatedFiles, GatedDataset])
def test_samples_behind_one_that_turns_slow_are_loaded_beside_it(kind: Any, tmp_path: Path) -> None:
    """Several quick samples go together to one thread; it does not keep those that others could be at."""
    with GatedFiles(tmp_path, 320) if kind is GatedFiles else GatedDataset(320) as dataset:
        dataset.gates.open(*range(300))
        with DataLoader(dataset, 20, num_workers=4, num_concurrent_reads=16) as loader:
            batches = iter(loader)
            assert [next(batches).tolist() for _ in range(15)] == [list(range(n, n + 20)) for n in range(0, 300, 20)]
            last = list[Any]()
            waiting = threading.Thread(target=lambda: last.append(next(batches)))
            waiting.start()
            dataset.gates.wait_started(*range(300, 316 if kind is GatedFiles else 304))
            dataset.gates.open_all()
            waiting.join()
            assert last[0].tolist() == list(range(300, 320))


def test_a_read_that_hangs_while_the_consumer_waits_keeps_no_other_batch_waiting(tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)  # whoever opens it waits for a writer
    for index in range(2000):
        (tmp_path / str(index)).write_text(str(index))
    paths = [tmp_path / str(index) for index in range(2000)]
    paths[500] = hanging
    files = FileDataset(paths, lambda data, _: int(data))
    with DataLoader(files, batch_size=1000, num_workers=1, num_concurrent_reads=4, in_order=False) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == list(range(1000, 2000))
        hanging.write_text("500")
        assert of_iterator(batches) == [list(range(1000))]


def test_a_read_that_hangs_delays_its_own_batch_and_not_the_reads_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)  # it hangs from the start, also where threads are slow to start
    with GatedFiles(tmp_path, 64, opened=True) as dataset:
        hanging = tmp_path / "hanging"
        os.mkfifo(hanging)
        paths = [hanging, *(tmp_path / f"{index}.txt" for index in range(1, 64))]
        files = FileDataset(paths, dataset.decode)
        with DataLoader(files, batch_size=8, num_workers=1, num_concurrent_reads=4, prefetch_factor=8) as loader:
            batches = iter(loader)
            dataset.decodes.wait_finished(*range(1, 64))
            assert 0 not in dataset.decodes.started
            hanging.write_text("0")
            assert flat(of_iterator(batches)) == list(range(64))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_tuner_that_changes_its_mind_at_each_job_loses_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    """Jobs of several samples are cut short when other threads may work, or must stop."""
    monkeypatch.setattr(tuner, "MIN_WINDOW_S", 0.0)
    monkeypatch.setattr(tuner, "MIN_WINDOW_JOBS", 1)
    generator = random.Random(0)
    monkeypatch.setattr(tuner, "step", lambda _, size, __, ___: tuner.Tuning(generator.choice((1, 1, 2, size))))
    for index in range(400):
        (tmp_path / str(index)).write_text(str(index))
    files = FileDataset([tmp_path / str(index) for index in range(400)], lambda data, _: int(data))
    with DataLoader(files, batch_size=40, num_workers=2, num_concurrent_reads=8, in_order=in_order) as loader:
        for _ in range(20):
            batches = [batch.tolist() for batch in loader]
            assert sorted(batches) == [list(range(first, first + 40)) for first in range(0, 400, 40)]
            assert not in_order or batches == sorted(batches)


class Numbers:
    """Samples that take no time, but let others have the interpreter."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        time.sleep(0)
        return index


@pytest.mark.parametrize("prefetch_bytes", [2000, None])
@pytest.mark.parametrize("are_files", [True, False])
def test_jobs_that_others_take_over_at_any_time_lose_no_sample(
    are_files: bool, prefetch_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few bytes, what is taken over is held back as well."""
    monkeypatch.setattr(tuner, "MIN_WINDOW_S", 0.0)
    monkeypatch.setattr(tuner, "MIN_WINDOW_JOBS", 1)
    monkeypatch.setattr(tuner, "step", lambda *_: tuner.Tuning(1))
    dataset: Any = Numbers(3000)
    if are_files:
        for index in range(3000):
            (tmp_path / str(index)).write_text(str(index))
        dataset = FileDataset([tmp_path / str(index) for index in range(3000)], lambda data, _: int(data))
    num_taken_over, ended, deadline = 0, threading.Event(), time.monotonic() + 60
    arguments: dict[str, Any] = {"prefetch_factor": 4, "prefetch_bytes": prefetch_bytes, "persistent_workers": True}
    with DataLoader(dataset, 40, num_workers=4, num_concurrent_reads=4, **arguments) as loader:
        expected = [list(range(first, first + 40)) for first in range(0, 3000, 40)]
        batches: Any = iter(loader)
        crew: Any = batches._pass.run._crew

        def look() -> None:
            nonlocal num_taken_over
            pool = crew.reads or crew.decode
            while not ended.is_set():
                shares = pool._shares(pool.workers)
                pool.resume([(pool._take_over, shares, None, None)])
                num_taken_over += len(shares)
                time.sleep(0)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            while num_taken_over < 20:
                assert time.monotonic() < deadline
                assert of_iterator(batches) == expected
                batches = iter(loader)
        finally:
            ended.set()
            looking.join()


def test_subsets_of_files_keep_their_reads_in_flight(tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 40) as dataset:
        files: Any = dataset
        half, _ = torch.utils.data.random_split(files, [20, 20], torch.Generator().manual_seed(0))
        nested = torch.utils.data.Subset(half, range(2, 20))
        for subset in (half, nested):
            dataset.gates.started.clear()
            dataset.gates.finished.clear()
            with DataLoader(subset, batch_size=4, num_workers=1, num_concurrent_reads=12) as loader:
                batches = iter(loader)
                dataset.gates.wait_num_started(12)
                dataset.gates.open_all()
                expected = list(half.indices) if subset is half else list(half.indices)[2:]
                assert flat(of_iterator(batches)) == expected


@pytest.mark.parametrize("prefetch_factor", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_no_more_batches_are_ahead_than_asked_for(batch_size: int, prefetch_factor: int) -> None:
    dataset = GatedDataset(100, opened=True)
    with DataLoader(dataset, batch_size=batch_size, num_workers=2, prefetch_factor=prefetch_factor) as loader:
        batches = iter(loader)
        for number in range(100 // batch_size):
            ahead = min((number + 2 * prefetch_factor) * batch_size, 100)
            dataset.gates.wait_started(*range(ahead))
            assert len(dataset.gates.started) == ahead
            assert next(batches).tolist() == list(range(number * batch_size, (number + 1) * batch_size))
        assert next(batches, None) is None
