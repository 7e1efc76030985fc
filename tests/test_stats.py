"""What a loader says of its work is exact."""

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from failing import AsyncNumbers, IterableNumbers, ManyNumbers, MapNumbers, StagedNumbers
from opener import opening_when_logged
from outcomes import of_async_iterator, of_iterator

from aioload import DataLoader, FileDataset, LoaderStats
from aioload.engine import plan
from aioload.stats import Ledger
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles

COUNTS = ("samples", "batches", "bytes_read")
TIMES = ("read_s", "decode_s", "collate_s", "wait_s")


def counts(stats: LoaderStats) -> tuple[int, ...]:
    return tuple(getattr(stats, name) for name in COUNTS)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "getitems", "iterable", "async", "tensors", "files"])
def test_counts_are_exact_over_passes(kind: str, num_workers: int, tmp_path: Path) -> None:
    makers: dict[str, Any] = {
        "map": MapNumbers,
        "getitems": ManyNumbers,
        "iterable": IterableNumbers,
        "async": AsyncNumbers,
        "tensors": lambda: torch.utils.data.TensorDataset(torch.arange(4)),
        "files": lambda: StagedNumbers(tmp_path),
    }
    dataset = makers[kind]()
    num_bytes = 4 if kind == "files" else 0
    with DataLoader(dataset, batch_size=3, num_workers=num_workers) as loader:
        assert counts(loader.stats()) == (0, 0, 0)
        for epoch in range(1, 4):
            assert len(of_iterator(iter(loader))) == 2
            assert counts(loader.stats()) == (4 * epoch, 2 * epoch, num_bytes * epoch)
    assert counts(loader.stats()) == (12, 6, 3 * num_bytes)
    assert loader.stats().reads_in_flight == 0


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_bytes_are_counted_however_files_are_read(num_workers: int, tmp_path: Path) -> None:
    """One at a time by several threads, or many by one where reads are tiny; those that are not decoded, too."""

    def decode(data: bytes, index: int) -> int:
        if fails and index % 10 == 3:
            raise ValueError(index)
        return len(data)

    paths = [tmp_path / str(index) for index in range(400)]
    for index, path in enumerate(paths):
        path.write_bytes(b"x" * index)
    for batch_size, fails in ((1, True), (20, False)):
        with DataLoader(FileDataset(paths, decode), batch_size, num_workers=num_workers) as loader:
            for epoch in range(1, 4):
                assert len(of_iterator(iter(loader))) == 400 // batch_size
                assert loader.stats().bytes_read == epoch * sum(range(400))
                assert loader.stats().samples == epoch * (360 if fails else 400)


def test_failed_samples_and_batches_are_not_counted() -> None:
    with DataLoader(MapNumbers(ValueError()), batch_size=1, num_workers=2) as loader:
        assert len(of_iterator(iter(loader))) == 4
        assert counts(loader.stats()) == (3, 3, 0)


def test_a_snapshot_is_immutable_and_stays_what_it_was() -> None:
    with DataLoader(range(4), num_workers=1) as loader:
        before = loader.stats()
        assert len(of_iterator(iter(loader))) == 4
        assert before == LoaderStats()
        with pytest.raises(dataclasses.FrozenInstanceError):
            before.samples = 7  # type: ignore[misc]
        assert loader.stats().samples == 4


@pytest.mark.parametrize("kind", ["files", "async"])
def test_reads_in_flight_are_those_that_have_begun_and_not_ended(kind: str, tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 40) if kind == "files" else AsyncGatedDataset(40) as dataset:  # noqa: SIM117
        with DataLoader(dataset, batch_size=4, num_workers=1, num_concurrent_reads=10) as loader:
            batches = iter(loader)
            dataset.gates.wait_num_started(10)
            stats = loader.stats()
            assert (stats.reads_in_flight, stats.reads_limit) == (10, 10)
            dataset.gates.open_all()
            assert len(of_iterator(batches)) == 10
            assert loader.stats().reads_in_flight == 0


@pytest.mark.parametrize("kind", ["files", "async"])
def test_nothing_is_in_flight_after_a_pass_was_given_up(kind: str, tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 40) if kind == "files" else AsyncGatedDataset(40) as dataset:
        loader = DataLoader(dataset, num_workers=1, num_concurrent_reads=10)
        batches = iter(loader)
        dataset.gates.wait_num_started(10)
        if kind == "files":  # a read cannot be cancelled
            dataset.gates.open_all()
        batches.close()
        loader.close()
        dataset.gates.open_all()
        assert loader.stats().reads_in_flight == 0


def test_a_consumer_that_does_not_wait_has_not_waited() -> None:
    tensors = torch.utils.data.TensorDataset(torch.arange(8))  # so few that the consumer gathers them itself
    for dataset, num_workers in ((tensors, 1), (MapNumbers(), 0)):
        with DataLoader(dataset, num_workers=num_workers) as loader:
            assert len(of_iterator(iter(loader))) == len(loader)
            assert loader.stats().wait_s == 0


def test_waiting_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SLOW_AFTER_S", 0.02)
    for by_async_for in (False, True):
        with GatedDataset(1) as dataset, opening_when_logged(dataset.gates):
            loader = DataLoader(dataset, num_workers=1)
            got = asyncio.run(of_async_iterator(aiter(loader))) if by_async_for else of_iterator(iter(loader))
        assert got == [[0]]
        assert loader.stats().wait_s >= 0.02


def test_nothing_ever_shrinks_over_passes_and_iterators(tmp_path: Path) -> None:
    dataset = StagedNumbers(tmp_path)
    with DataLoader(dataset, num_workers=2) as loader:
        seen = [loader.stats()]
        for _ in range(3):
            for batches in (iter(loader), iter(loader)):
                next(batches)
                seen.append(loader.stats())
                batches.close()
                seen.append(loader.stats())
            for _ in loader:
                seen.append(loader.stats())  # noqa: PERF401
    seen.append(loader.stats())
    for name in (*COUNTS, *TIMES):
        values = [getattr(stats, name) for stats in seen]
        assert values == sorted(values), name
    assert all(getattr(seen[-1], name) > 0 for name in (*COUNTS, *TIMES))


def test_batches_of_several_consumers_are_all_counted() -> None:
    with DataLoader(range(900), num_workers=2) as loader:
        batches = iter(loader)
        got: list[list[Any]] = [[], [], []]
        threads = [threading.Thread(target=lambda mine=mine: mine.extend(of_iterator(batches))) for mine in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(value for mine in got for (value,) in mine) == list(range(900))
        assert counts(loader.stats()) == (900, 900, 0)


def test_a_ledger_adds_up_threads_that_live_and_threads_that_have_ended() -> None:
    ledger = Ledger()
    first, second = ledger.open(), ledger.open()
    first.samples, second.samples, second.reads_in_flight = 2, 3, 1
    assert ledger.snapshot(reads_limit=8) == LoaderStats(samples=5, reads_in_flight=1, reads_limit=8)
    ledger.close(second)
    ledger.close(second)
    second.samples = 100  # of no account any more
    assert ledger.snapshot(reads_limit=8) == LoaderStats(samples=5, reads_limit=8)
