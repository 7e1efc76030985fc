"""``num_concurrent_reads="auto"``: how many reads are under way follows what is found, and nothing else changes."""

import inspect
import pickle
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outcomes import of_iterator

from aioload import DataLoader, FileDataset
from aioload.engine import limit, pools, regulator, tuner
from aioload.testing import AsyncGatedDataset, GatedFiles


def make(kind: str, folder: Path, size: int) -> Any:
    return GatedFiles(folder, size) if kind == "files" else AsyncGatedDataset(size)


every_kind = pytest.mark.parametrize("kind", ["files", "async"])


def test_it_is_the_default_and_stays_what_was_given() -> None:
    assert inspect.signature(DataLoader).parameters["num_concurrent_reads"].default == "auto"
    loader: DataLoader[int] = DataLoader(range(4))
    assert loader.num_concurrent_reads == "auto"
    assert pickle.loads(pickle.dumps(loader)).num_concurrent_reads == "auto"
    assert of_iterator(iter(loader)) == [[0], [1], [2], [3]]


@every_kind
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_few_reads_begin_and_what_is_chosen_is_in_the_stats(kind: str, batch_size: int, tmp_path: Path) -> None:
    with make(kind, tmp_path, 100) as dataset, DataLoader(dataset, batch_size, num_workers=1) as loader:
        assert (loader.stats().reads_limit, loader.stats().batches_limit) == (0, 0)
        batches = iter(loader)
        dataset.gates.wait_num_started(limit.START)
        assert dataset.gates.in_flight == limit.START
        stats = loader.stats()
        assert (stats.reads_limit, stats.decode_limit) == (limit.START, 1)
        assert stats.batches_limit == max(2, limit.START // batch_size)
        dataset.gates.open_all()
        assert [number for batch in of_iterator(batches) for number in batch] == list(range(100))


def always(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the limit become ``number`` as soon as something has been read."""
    monkeypatch.setattr(tuner, "MIN_WINDOW_S", 0.0)
    monkeypatch.setattr(tuner, "MAX_WINDOW_S", 0.0)
    monkeypatch.setattr(limit, "MIN_WINDOW_S", 0.0)
    monkeypatch.setattr(limit, "JOBS_PER_READ", 0)
    monkeypatch.setattr(regulator, "settling_s", lambda _: 0.0)
    monkeypatch.setattr(regulator, "step", lambda *_: limit.Climb(number))
    monkeypatch.setattr(tuner, "step", lambda _, size, __, ___: tuner.Tuning(size))
    monkeypatch.setattr(pools, "HANGING_JOBS", 10**9)  # or others may be under way in their place
    monkeypatch.setattr(limit, "STALL_S", float("inf"))


@every_kind
@pytest.mark.parametrize("batch_size", [1, 8])
def test_the_look_ahead_follows_the_reads_that_may_be_under_way(
    kind: str, batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(100, monkeypatch)
    with make(kind, tmp_path, 800) as dataset, DataLoader(dataset, batch_size, num_workers=1) as loader:
        dataset.gates.open(*range(400))
        batches = iter(loader)
        taken = [number for _ in range(400 // batch_size) for number in next(batches).tolist()]
        waiting = threading.Thread(target=lambda: taken.extend(next(batches).tolist()))
        waiting.start()
        dataset.gates.wait_started(*range(400, 500))
        assert dataset.gates.in_flight == 100
        assert loader.stats().reads_limit == 100
        dataset.gates.open_all()
        waiting.join()
        assert taken + [number for batch in of_iterator(batches) for number in batch] == list(range(800))


class PassAfterPass:
    """A sampler of 100 more indices in each pass."""

    def __init__(self) -> None:
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, self.first + 100
        return iter(range(first, first + 100))


@every_kind
@pytest.mark.parametrize("persistent", [False, True])
def test_the_next_pass_begins_with_what_this_one_found(
    kind: str, persistent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(40, monkeypatch)
    arguments: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent, "prefetch_factor": 10}
    with make(kind, tmp_path, 200) as dataset:
        dataset.gates.open(*range(100))
        with DataLoader(dataset, 10, sampler=PassAfterPass(), **arguments) as loader:
            assert len(of_iterator(iter(loader))) == 10
            batches = iter(loader)
            dataset.gates.wait_num_started(140)
            assert dataset.gates.in_flight == 40
            assert dataset.gates.in_flight == 40
            dataset.gates.open_all()
            assert len(of_iterator(batches)) == 10


def test_as_many_again_may_begin_when_all_that_may_be_under_way_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "STALL_S", 0.0)
    with GatedFiles(tmp_path, 100) as dataset, DataLoader(dataset, 100, num_workers=1) as loader:
        batches = iter(loader)
        waiting = threading.Thread(target=next, args=(batches,))
        waiting.start()
        dataset.gates.wait_num_started(2 * limit.START)
        assert dataset.gates.in_flight == 2 * limit.START
        dataset.gates.open_all()
        waiting.join()


@every_kind
@pytest.mark.parametrize("in_order", [True, False])
def test_a_limit_that_changes_with_each_read_loses_no_sample(
    kind: str, in_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(0)
    always(1, monkeypatch)
    monkeypatch.setattr(regulator, "step", lambda *_: limit.Climb(generator.choice((1, 2, 30, 100))))
    dataset: Any = AsyncGatedDataset(400, opened=True)
    if kind == "files":
        for index in range(400):
            (tmp_path / str(index)).write_text(str(index))
        dataset = FileDataset([tmp_path / str(index) for index in range(400)], lambda data, _: int(data))
    with DataLoader(dataset, 40, num_workers=2, in_order=in_order) as loader:
        for _ in range(10):
            batches = [batch.tolist() for batch in loader]
            assert sorted(batches) == [list(range(first, first + 40)) for first in range(0, 400, 40)]
            assert not in_order or batches == sorted(batches)
