"""Which threads decode: those for decoding, or those that read where decoding costs less than handing over."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from failing import AsyncNumbers, IterableNumbers, ManyNumbers, MapNumbers
from outcomes import of_iterator

from aioload import DataLoader, ErrorContext, FileDataset, TensorDataset, error_context
from aioload.engine import staged
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems, Gates


class Decoding:
    """Decodes numbers, and notes on which threads."""

    def __init__(self) -> None:
        self.threads: dict[int, str] = {}
        self.dear_from = 1_000_000

    def __call__(self, data: bytes, index: int) -> int:
        self.threads[index] = threading.current_thread().name
        if index >= self.dear_from:
            until = time.thread_time() + 0.001
            while time.thread_time() < until:
                pass
        return int(data)

    def kind(self, index: int) -> str:
        """Return what the thread that decoded ``index`` is for."""
        return self.threads[index].split("-")[1]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(index) for index in range(400)]
    for index, path in enumerate(paths):
        path.write_text(str(index))
    return paths


def test_the_first_sample_is_decoded_on_a_decode_thread_and_cheap_ones_on_the_thread_that_read(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "INLINE_BELOW_S", 1.0)
    monkeypatch.setattr(staged, "OFFLOAD_ABOVE_S", 1.0)
    for batch_size in (1, 20):
        decoding = Decoding()
        files = FileDataset(paths, decoding)
        with DataLoader(files, batch_size, num_workers=2, num_concurrent_reads=1) as loader:
            assert sum(map(len, of_iterator(iter(loader)))) == 400
        assert decoding.kind(0) == "decode"
        assert decoding.kind(399) == "read"


def test_dear_ones_are_decoded_on_decode_threads(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "INLINE_BELOW_S", 0.0)
    decoding = Decoding()
    with DataLoader(FileDataset(paths, decoding), num_workers=2) as loader:
        assert len(of_iterator(iter(loader))) == 400
    assert {decoding.kind(index) for index in range(400)} == {"decode"}


@pytest.mark.parametrize("batch_size", [1, 20])
def test_they_go_back_to_decode_threads_when_they_turn_dear(paths: list[Path], batch_size: int) -> None:
    decoding = Decoding()
    decoding.dear_from = 200
    files = FileDataset(paths, decoding)
    with DataLoader(files, batch_size, num_workers=2, num_concurrent_reads=1) as loader:
        assert sum(map(len, of_iterator(iter(loader)))) == 400
    assert decoding.kind(399) == "decode"


def test_they_stay_on_decode_threads_where_worker_init_fn_has_been_called(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "INLINE_BELOW_S", 1.0)
    for persistent in (False, True):
        decoding = Decoding()
        begun: list[tuple[int, str, int]] = []

        def begin(number: int) -> None:
            begun.append((number, threading.current_thread().name, len(decoding.threads)))  # noqa: B023

        with DataLoader(
            FileDataset(paths, decoding), num_workers=3, worker_init_fn=begin, persistent_workers=persistent
        ) as loader:
            for epoch in range(1, 4):
                assert len(of_iterator(iter(loader))) == 400
                assert set(decoding.threads.values()) <= {name for _, name, _ in begun}
                # Each number once, by threads for as long as they live.
                assert sorted(number for number, _, _ in begun) == sorted([0, 1, 2] * (1 if persistent else epoch))
        assert {name for _, name, _ in begun} == {f"aioload-decode-{number}" for number in range(3)}
        assert begun[0][2] == 0  # no sample was decoded before


def test_nothing_is_loaded_before_worker_init_fn_has_returned_in_every_worker(tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 4, opened=True) as dataset:
        gates = Gates()

        def begin(number: int) -> None:
            gates.pass_through(number)

        got: list[Any] = []
        loader = DataLoader(dataset, num_workers=2, worker_init_fn=begin)
        consumer = threading.Thread(target=lambda: got.extend(of_iterator(iter(loader))))
        consumer.start()
        gates.open(0)
        gates.wait_started(1)
        assert not dataset.gates.started
        gates.open(1)
        consumer.join()
        assert got == [[0], [1], [2], [3]]


class BrokenError(Exception):
    pass


class Beginnings:
    """A ``worker_init_fn`` that the test lets return, and that fails in the last of three workers."""

    def __init__(self) -> None:
        self.gates = Gates()
        self.error = BrokenError()
        self.gates.fail("worker 2", self.error)
        self.gates.open("worker 0", "worker 1")

    def __call__(self, number: int) -> None:
        self.gates.pass_through(f"worker {number}")


GATED: list[Callable[[Path], Any]] = [
    lambda _: GatedDataset(4, opened=True),
    lambda _: AsyncGatedDataset(4, opened=True),
    lambda folder: GatedFiles(folder, 4, opened=True),
]
every_kind = pytest.mark.parametrize("make", GATED, ids=["map", "async", "files"])


@every_kind
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_init_fn_that_fails_in_the_last_worker_is_not_lost(
    make: Callable[[Path], Any], persistent: bool, tmp_path: Path
) -> None:
    begin = Beginnings()
    begin.gates.open("worker 2")
    with (
        make(tmp_path) as dataset,
        DataLoader(dataset, num_workers=3, worker_init_fn=begin, persistent_workers=persistent) as loader,
    ):
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(BrokenError) as caught:
                next(batches)
            assert caught.value is begin.error
        context = error_context(begin.error)
        assert context is not None
        assert context.stage == "worker_init_fn"
        loader.worker_init_fn = None
        assert of_iterator(iter(loader)) == [[0], [1], [2], [3]]


@every_kind
async def test_it_is_not_lost_by_a_coroutine_either(make: Callable[[Path], Any], tmp_path: Path) -> None:
    begin = Beginnings()
    with make(tmp_path) as dataset:
        async with DataLoader(dataset, num_workers=3, worker_init_fn=begin) as loader:
            first = asyncio.ensure_future(anext(aiter(loader)))
            await asyncio.to_thread(begin.gates.wait_started, "worker 2")
            begin.gates.open("worker 2")
            with pytest.raises(BrokenError):
                await first


@pytest.mark.parametrize("persistent", [False, True])
def test_it_comes_first_where_it_begins_an_iterable_dataset(persistent: bool) -> None:
    begin = Beginnings()
    begin.gates.fail("worker 0", begin.error)
    with (
        GatedItems(4, opened=True) as dataset,
        DataLoader(dataset, num_workers=3, worker_init_fn=begin, persistent_workers=persistent) as loader,
    ):
        assert of_iterator(iter(loader)) == [begin.error]
        assert error_context(begin.error) == ErrorContext(None, None, "worker_init_fn")
        assert set(dataset.gates.started) == set()


def test_it_is_not_lost_where_rows_are_gathered_without_threads() -> None:
    begin = Beginnings()
    loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=3, worker_init_fn=begin)

    def let_fail() -> None:
        begin.gates.wait_started("worker 2")
        begin.gates.open("worker 2")

    thread = threading.Thread(target=let_fail)
    thread.start()
    with pytest.raises(BrokenError) as caught:
        list(loader)
    assert caught.value is begin.error
    thread.join()


async def test_it_is_not_lost_where_rows_are_gathered_for_a_coroutine() -> None:
    begin = Beginnings()
    async with DataLoader(TensorDataset(torch.arange(4)), num_workers=3, worker_init_fn=begin) as loader:
        first = asyncio.ensure_future(anext(aiter(loader)))
        await asyncio.to_thread(begin.gates.wait_started, "worker 2")
        begin.gates.open("worker 2")
        with pytest.raises(BrokenError):
            await first


@every_kind
async def test_a_pass_can_be_dropped_before_every_worker_has_begun(make: Callable[[Path], Any], tmp_path: Path) -> None:
    begin = Beginnings()
    with make(tmp_path) as dataset:
        batches = aiter(DataLoader(dataset, num_workers=3, worker_init_fn=begin))
        await asyncio.to_thread(begin.gates.wait_started, "worker 2")
        del batches
        begin.gates.open_all()


SEEDED: list[Callable[[], Any]] = [MapNumbers, AsyncNumbers, IterableNumbers, lambda: TensorDataset(torch.arange(4))]


@pytest.mark.parametrize("make", SEEDED, ids=["map", "async", "iterable", "tensors"])
def test_what_worker_init_fn_seeds_is_not_the_consumers(make: Callable[[], Any]) -> None:
    seeds = []

    def seed_all(number: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        seeds.append((torch.initial_seed() - info.seed, random.getstate(), float(np.random.rand())))
        torch.manual_seed(12345)
        random.seed(number)
        np.random.seed(number)

    def drawn(**arguments: Any) -> list[Any]:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        seen = []
        for _ in range(3):
            list(DataLoader(make(), num_workers=2, **arguments))
            seen.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
        return seen

    assert drawn(worker_init_fn=seed_all) == drawn()
    assert {offset for offset, _, _ in seeds} == {0}
    assert len({state for _, state, _ in seeds}) == len({number for _, _, number in seeds}) == len(seeds)


@pytest.mark.parametrize("make", [AsyncNumbers, MapNumbers, ManyNumbers, IterableNumbers])
def test_a_collate_fn_runs_on_a_decode_thread_and_never_holds_up_the_loop(make: Callable[[], Any]) -> None:
    names = []

    def collate(samples: list[int]) -> list[int]:
        names.append(threading.current_thread().name)
        return samples

    with DataLoader(make(), batch_size=2, num_workers=1, collate_fn=collate) as loader:
        assert of_iterator(iter(loader)) == [[0, 1], [2, 3]]
    assert names == ["aioload-decode-0"] * 2
