"""Interrupts, wherever they come: no batch is lost by one, nor counted twice, and nothing is left behind."""

import asyncio.base_events
import contextlib
import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from abroad import stacked
from conftest import join_all, loader_threads
from interrupting import InterruptedAt

from aioload import DataLoader, FileDataset, TensorDataset, get_worker_info
from aioload.testing import SimulatedDevice

with SimulatedDevice() as AT_ONCE:  # a device that does all at once: as it does at the end of this
    pass

NUMBERS = [torch.tensor([number]) for number in range(12)]


PAIRS = [[number, number + 1] for number in range(0, 12, 2)]


class Listed(torch.utils.data.IterableDataset[torch.Tensor]):
    """The numbers, of which each worker has a part."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        return iter(NUMBERS if worker is None else NUMBERS[worker.id :: worker.num_workers])


class Faulty:
    """The third one cannot be had."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise LookupError(index)
        return NUMBERS[index]


class Awaited:
    def __len__(self) -> int:
        return len(NUMBERS)

    async def __getitem__(self, index: int) -> torch.Tensor:
        return NUMBERS[index]


ROWS = TensorDataset(torch.cat([number[None] for number in NUMBERS]))
INLINE = {"num_workers": 0, "timeout": 0}
CASES: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "rows": (ROWS, {}, PAIRS),  # gathered in the thread that is interrupted
    "rows in any order": (ROWS, {"in_order": False}, PAIRS),
    "no threads": (NUMBERS, INLINE, PAIRS),
    "no threads, items": (Listed(), INLINE, PAIRS),
    "no threads, errors": (Faulty(), {"on_error": "skip", **INLINE}, [[0, 1], [3], *PAIRS[2:]]),
    "no threads, awaited": (Awaited(), INLINE, PAIRS),
    "threads": (NUMBERS, {}, PAIRS),
    "items": (Listed(), {}, PAIRS),
    "items of two": (Listed(), {"iterable_workers": 2}, [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]),
    "errors": (Faulty(), {"on_error": "skip"}, [[0, 1], [3], *PAIRS[2:]]),
    "device": (NUMBERS, {"device": AT_ONCE}, PAIRS),
    "process": (NUMBERS, {"processes": 1}, PAIRS),
    "process, pickled": (NUMBERS, {"processes": 1, "collate_fn": stacked}, PAIRS),  # and unpickled by the consumer
}


@pytest.mark.usefixtures("forks_are_served", "no_process_is_left")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that comes in a finalizer
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("dataset", "arguments", "expected"), CASES.values(), ids=CASES)
def test_no_batch_is_lost(dataset: Any, arguments: dict[str, Any], expected: list[Any], at: int) -> None:
    arguments, num_passes = {"num_workers": 1, "timeout": 60, **arguments}, 0
    with DataLoader(dataset, 2, persistent_workers=arguments["num_workers"] > 0, **arguments) as loader:
        for number in itertools.count(1):
            batches = iter(loader)
            got = [values(next(batches)) for _ in range(at)]
            interrupt = InterruptedAt(number)
            try:
                with interrupt:
                    batch = next(batches)
            except KeyboardInterrupt:
                pass
            else:
                got.append(values(batch))
            assert batches.state_dict()["num_yielded"] == len(got)
            try:
                got += [values(batch) for batch in batches]
            except KeyboardInterrupt:  # it came in the middle of the sampler, of which this is code of ours
                assert (arguments["num_workers"], at, got) == (0, 0, [])
                continue
            assert got == expected
            num_passes += 1
            if interrupt.num_places < number:
                break
        if type(dataset) is Faulty:
            assert [error.index for error in loader.errors()] == [2] * loader.stats().errors
            assert loader.stats().errors == num_passes
    assert number > 50


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_was_interrupted_can_be_used_again() -> None:
    for number in itertools.count(1):
        loader = DataLoader(Awaited(), 2, num_workers=0)
        batches, interrupt = iter(loader), InterruptedAt(number, asyncio.base_events)
        got = [values(next(batches))]
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            got.append(values(next(batches)))
        got += [values(batch) for batch in batches]
        assert got == PAIRS
        if interrupt.num_places < number:
            break
    assert number > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine that never ran
@pytest.mark.parametrize("persistent", [False, True], ids=["own threads", "persistent threads"])
def test_the_beginning_of_a_pass_leaves_a_loader_that_works(persistent: bool) -> None:
    for number in itertools.count(1):
        with DataLoader(NUMBERS, 2, num_workers=1, timeout=60, persistent_workers=persistent) as loader:
            interrupt = InterruptedAt(number)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                iter(loader)
            assert [values(batch) for batch in loader] == PAIRS
        del loader
        assert join_all(loader_threads()) == set()
        if interrupt.num_places < number:
            break
    assert number > 100


def values(batch: Any) -> Any:
    """Return the numbers in a batch, whatever it is made of."""
    (rows,) = [batch] if isinstance(batch, torch.Tensor) else batch.values() if isinstance(batch, dict) else batch
    return rows.flatten().tolist()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that comes in a finalizer
@pytest.mark.parametrize("is_closed_again", [True, False])
def test_the_end_of_a_pass_leaves_no_thread(tmp_path: Path, is_closed_again: bool) -> None:
    (tmp_path / "file").write_text("1")
    files = FileDataset([tmp_path / "file"] * 4, lambda data, _: int(data))
    for number in itertools.count(1):
        loader = DataLoader(files, 2, num_workers=2, num_concurrent_reads=2)
        batches = iter(loader)
        next(batches)
        interrupt = InterruptedAt(number, threading)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            batches.close()
        if is_closed_again:
            loader.close()
        del batches, loader
        gc.collect()
        assert join_all(loader_threads()) == set(), number
        if interrupt.num_places < number:
            break
    assert number > 20
