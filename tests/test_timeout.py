"""A batch that does not come: what the timeout and the log say of it, and that nothing is lost by it."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from abroad import Stuck
from opener import opening_when_logged
from outcomes import of_async_iterator, of_iterator

from aioload import AioloadError, DataLoader, FileDataset
from aioload.engine import plan
from aioload.engine.patience import Patience
from aioload.errors import ArgumentError, LoaderTimeoutError
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems, Gates


def in_time(batches: Iterator[Any]) -> Any:
    """Return the next batch; a busy machine may take longer than the timeout to bring it."""
    while True:
        with contextlib.suppress(LoaderTimeoutError):
            return next(batches)


def test_a_timeout_names_what_is_missing_and_asking_again_goes_on() -> None:
    with GatedDataset(3) as dataset, DataLoader(dataset, batch_size=3, num_workers=3, timeout=0.01) as loader:
        dataset.gates.open(1)
        batches = iter(loader)
        dataset.gates.wait_finished(1)
        with pytest.raises(LoaderTimeoutError, match=r"timed out after 0.01 seconds") as caught:
            next(batches)
        for kind in (RuntimeError, TimeoutError, AioloadError):
            assert isinstance(caught.value, kind)
        assert "index 0" in str(caught.value)
        assert "index 2" in str(caught.value)
        dataset.gates.open(0, 2)
        assert of_iterator(batches)[-1] == [0, 1, 2]


def test_a_timeout_names_the_batch_that_is_next() -> None:
    with GatedDataset(2) as dataset, DataLoader(dataset, num_workers=2, timeout=0.01) as loader:
        dataset.gates.open(0)
        batches = iter(loader)
        dataset.gates.wait_finished(0)
        assert in_time(batches).tolist() == [0]
        with pytest.raises(LoaderTimeoutError, match="waiting for batch 1: index 1"):
            next(batches)
        dataset.gates.open_all()
        assert in_time(batches).tolist() == [1]


@pytest.mark.parametrize("sample_s", [0.0, 1e-3])
def test_a_timeout_names_none_that_wait_to_be_collated_together(sample_s: float) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    class Hanging:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(sample_s)
            if index == 5:
                hangs.set()
                goes_on.wait()
            return index

    with DataLoader(Hanging(), 8, num_workers=1, timeout=0.01) as loader:
        batches = iter(loader)
        hangs.wait()
        with pytest.raises(LoaderTimeoutError, match=r"waiting for batch 0: index 5, index 6, index 7\.$"):
            next(batches)
        goes_on.set()
        assert in_time(batches).tolist() == list(range(8))


@pytest.mark.usefixtures("forks_are_served", "no_process_is_left")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_timeout_names_what_a_process_is_loading(num_workers: int) -> None:
    with DataLoader(Stuck(5), 8, processes=1, num_workers=num_workers, timeout=0.02) as loader:
        batches, deadline, message = iter(loader), time.monotonic() + 60, ""
        while not message.endswith("waiting for batch 0: index 5."):  # at first, what is loaded before it
            assert time.monotonic() < deadline, message
            with pytest.raises(LoaderTimeoutError) as caught:
                next(batches)
            message = str(caught.value)


def test_a_timeout_names_the_file_and_few_of_many(tmp_path: Path) -> None:
    with (
        GatedFiles(tmp_path, 6) as dataset,
        DataLoader(dataset, batch_size=6, num_workers=1, timeout=0.01) as loader,
    ):
        with pytest.raises(LoaderTimeoutError) as caught:
            next(iter(loader))
        dataset.gates.open_all()
        names = [f"index {index} ({str(tmp_path / f'{index}.txt')!r})" for index in range(4)]
        assert f"batch 0: {', '.join(names)} and 2 more." in str(caught.value)


def test_a_timeout_names_a_collation_that_does_not_end() -> None:
    gates = Gates()

    def collate(samples: list[int]) -> list[int]:
        gates.pass_through("collate")
        return samples

    with DataLoader(range(2), num_workers=1, batch_size=2, collate_fn=collate, timeout=0.01) as loader:
        batches = iter(loader)
        gates.wait_started("collate")
        with pytest.raises(LoaderTimeoutError, match="waiting for batch 0: its collation"):
            next(batches)
        gates.open_all()
        assert in_time(batches) == [0, 1]


def test_a_timeout_of_a_dataset_with_its_own_order_counts_the_samples() -> None:
    with GatedItems(2) as dataset, DataLoader(dataset, batch_size=2, num_workers=1, timeout=0.01) as loader:
        batches = iter(loader)
        with pytest.raises(LoaderTimeoutError, match="batch 0: sample 0 of the batch, sample 1 of the batch"):
            next(batches)
        dataset.gates.open_all()
        assert in_time(batches).tolist() == [0, 1]


async def test_a_coroutine_times_out_and_goes_on() -> None:
    with AsyncGatedDataset(2) as dataset:
        async with DataLoader(dataset, num_workers=1, timeout=0.01) as loader:
            batches = aiter(loader)
            for _ in range(3):
                with pytest.raises(LoaderTimeoutError, match="batch 0: index 0"):
                    await anext(batches)
            dataset.gates.open_all()
            got = [each for each in await of_async_iterator(batches) if not isinstance(each, TimeoutError)]
            assert got == [[0], [1]]


def test_a_read_that_the_kernel_holds_up_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with DataLoader(FileDataset([path], lambda data, _: int(data)), num_workers=1, timeout=0.01) as loader:
        batches = iter(loader)
        with pytest.raises(LoaderTimeoutError, match=r"index 0 \('.*pipe'\)"):
            next(batches)
        with path.open("w") as pipe:  # waits for a reader
            pipe.write("7")
        assert in_time(batches).tolist() == [7]


def test_a_timeout_needs_threads() -> None:
    with pytest.raises(ArgumentError, match="timeout"):
        DataLoader(range(2), num_workers=0, timeout=1)


def test_the_log_names_what_a_slow_batch_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SLOW_AFTER_S", 0.02)
    for by_async_for in (False, True):
        with GatedDataset(1) as dataset, opening_when_logged(dataset.gates) as log:
            loader = DataLoader(dataset, num_workers=1)
            got = asyncio.run(of_async_iterator(aiter(loader))) if by_async_for else of_iterator(iter(loader))
        assert got == [[0]]
        assert log.messages == ["A batch has been loading for 0.02 s; still waiting for batch 0: index 0."]


def test_the_log_is_silent_where_nothing_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    with DataLoader(range(100), num_workers=2) as loader:
        assert len(of_iterator(iter(loader))) == 100
    assert caplog.records == []


def test_patience_does_each_thing_when_it_is_due() -> None:
    done: list[str] = []
    patience = Patience()
    assert patience.wait_s(0) is None
    patience.at(5, lambda: done.append("five"))
    patience.at(3, lambda: done.append("three"))
    patience.at_each_doubling(1, lambda: done.append("again"))
    assert patience.wait_s(0) == 1
    assert patience.wait_s(1) == 1
    assert done == ["again"]
    assert patience.wait_s(3.5) == 0.5
    assert done == ["again", "again", "three"]
    assert patience.wait_s(20) == 12
    assert done == ["again", "again", "three", "again", "five", "again", "again"]


def test_patience_has_no_end() -> None:
    patience = Patience()
    patience.at(float("inf"), lambda: None)
    assert patience.wait_s(1) == threading.TIMEOUT_MAX


def test_a_timeout_may_be_as_long_as_one_likes() -> None:
    with DataLoader(range(3), num_workers=1, timeout=float("inf")) as loader:
        assert of_iterator(iter(loader)) == [[0], [1], [2]]


@pytest.mark.parametrize("how", ["for", "async for"])
def test_a_consumer_that_asks_often_and_waits_for_less_gets_what_can_be_had(tmp_path: Path, how: str) -> None:
    """Reads that hang must not keep others waiting, though no single wait is long enough to notice."""
    for index in range(2000):
        (tmp_path / str(index)).write_text(str(index))
    paths = [tmp_path / str(index) for index in range(2000)]
    for hanging in (300, 700, 1100):
        paths[hanging] = tmp_path / f"hanging {hanging}"
        os.mkfifo(paths[hanging])  # whoever opens it waits for a writer
    files = FileDataset(paths, lambda data, _: int(data))
    timeout = 0.002 if how == "for" else 0
    arguments: dict[str, Any] = {"num_workers": 1, "num_concurrent_reads": 8, "prefetch_factor": 8, "in_order": False}
    with DataLoader(files, 100, timeout=timeout, **arguments) as loader:
        if how == "for":
            batches = iter(loader)
            got = [in_time(batches) for _ in range(17)]
        else:
            got = asyncio.run(polled(loader, 17))
        assert sorted(batch.tolist() for batch in got) == [
            list(range(first, first + 100)) for first in range(0, 2000, 100) if first not in (300, 700, 1100)
        ]
        for hanging in (300, 700, 1100):
            paths[hanging].write_text(str(hanging))


async def polled(loader: DataLoader[Any], num_batches: int) -> list[Any]:
    batches = aiter(loader)
    got: list[Any] = []
    while len(got) < num_batches:
        with contextlib.suppress(TimeoutError):
            got.append(await asyncio.wait_for(anext(batches), 0.002))
    return got


def test_a_wait_that_was_given_up_leaves_nothing_behind() -> None:
    with GatedDataset(1) as dataset, DataLoader(dataset, num_workers=1, timeout=1e-4) as loader:
        batches: Any = iter(loader)
        for _ in range(200):
            with pytest.raises(LoaderTimeoutError):
                next(batches)
        assert len(batches._pass.run._handoff._waiters) <= 1
        dataset.gates.open_all()
        assert int(in_time(batches)) == 0
