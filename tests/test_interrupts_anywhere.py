"""Interrupts, wherever they come: no batch is lost by one, nor counted twice, and nothing is left behind."""

import asyncio.base_events
import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from abroad import stacked
from conftest import join_all, loader_threads
from interrupting import InterruptedAt
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from aioload import DataLoader, FileDataset, ShuffleSampler, TensorDataset, get_worker_info
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
SHUFFLED = [list(pair) for pair in zip(*[iter(ShuffleSampler(12, seed=1))] * 2, strict=True)]
INLINE = {"num_workers": 0, "timeout": 0}
CASES: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "rows": (ROWS, {}, PAIRS),  # gathered in the thread that is interrupted
    "rows in any order": (ROWS, {"in_order": False}, PAIRS),
    "no threads": (NUMBERS, INLINE, PAIRS),
    "no threads, shuffled": (NUMBERS, {"sampler": ShuffleSampler(12, seed=1), **INLINE}, SHUFFLED),
    "no threads, items": (Listed(), INLINE, PAIRS),
    "no threads, errors": (Faulty(), {"on_error": "skip", **INLINE}, [[0, 1], [3], *PAIRS[2:]]),
    "no threads, awaited": (Awaited(), INLINE, PAIRS),
    "threads": (NUMBERS, {}, PAIRS),
    "threads, any order": (NUMBERS, {"in_order": False}, PAIRS),
    "shuffled": (NUMBERS, {"sampler": ShuffleSampler(12, seed=1)}, SHUFFLED),
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
    arguments = {"num_workers": 1, "timeout": 60, **arguments}
    with DataLoader(dataset, 2, persistent_workers=arguments["num_workers"] > 0, **arguments) as loader:
        for number in itertools.count(1):
            loader.set_epoch(0)
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
            got += [values(batch) for batch in batches]
            assert got == expected
            if interrupt.num_places < number:
                break
        if type(dataset) is Faulty:
            assert [error.index for error in loader.errors()] == [2] * loader.stats().errors
            assert loader.stats().errors == number
    assert number > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_waits_for_room_goes_on() -> None:
    rows = [torch.full((100_000,), number) for number in range(8)]  # so large that batches begun at first have to wait
    for number in itertools.count(1):
        with DataLoader(rows, 2, num_workers=1, prefetch_factor=3, prefetch_bytes=2_500_000, timeout=60) as loader:
            batches = iter(loader)
            while loader.stats().samples < 2:
                time.sleep(0.001)
            time.sleep(0.01)  # by now the next batch has been found to be one too many
            got, interrupt = list[list[int]](), InterruptedAt(number)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                got.append(next(batches)[:, 0].tolist())
            got += [batch[:, 0].tolist() for batch in batches]
        assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]
        if interrupt.num_places < number:
            break
    assert number > 50


class Wide:
    """So large that a process has room for few of them, until it is told that they have been taken."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((30_000,), index)


@pytest.mark.usefixtures("forks_are_served", "no_process_is_left")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_is_told_what_has_been_taken() -> None:
    arguments: dict[str, Any] = {"processes": 1, "prefetch_factor": 3, "prefetch_bytes": 600_000, "timeout": 60}
    with DataLoader(Wide(), 2, num_workers=1, persistent_workers=True, **arguments) as loader:
        for number in itertools.count(1):
            batches, interrupt = iter(loader), InterruptedAt(number)
            time.sleep(0.01)  # the process has made what it has room for
            got = [next(batches)[:, 0].tolist()]
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                got.append(next(batches)[:, 0].tolist())
            got += [batch[:, 0].tolist() for batch in batches]
            assert got == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
            if interrupt.num_places < number:
                break
    assert number > 100


def shared_generator() -> dict[str, Any]:
    return {"shuffle": True, "generator": torch.Generator().manual_seed(3)}


def with_generator(kind: Any, *arguments: Any, **more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {"sampler": kind(*arguments, **more, generator=torch.Generator().manual_seed(4))}

    return make


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {},
    "shuffled": lambda: {"shuffle": True},
    "by the loader's generator": shared_generator,
    "random": with_generator(RandomSampler, range(12)),
    "with replacement": with_generator(RandomSampler, range(12), replacement=True),
    "subset": with_generator(SubsetRandomSampler, range(12)),
    "weighted": with_generator(WeightedRandomSampler, range(1, 13), 12),
    "distributed": lambda: {"sampler": DistributedSampler(range(12), 2, 1)},  # type: ignore[arg-type]
}


WORKERS: dict[str, tuple[dict[str, Any], int]] = {  # and of how many places one is tried: another with each sampler
    "no workers": ({"num_workers": 0}, 1),
    "threads": ({"num_workers": 1}, 4),
    "persistent threads": ({"num_workers": 1, "persistent_workers": True}, 8),  # the next epoch is drawn ahead
}


@pytest.mark.parametrize(("workers", "step"), WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_torchs_samplers_go_on_where_they_were(name: str, workers: dict[str, Any], step: int) -> None:
    """In the middle of them, too, and in the next epoch."""
    make = SAMPLERS[name]

    def order(number: int) -> tuple[list[list[int]], int]:
        torch.manual_seed(5)
        got = list[list[int]]()
        arguments = make()
        with DataLoader(range(12), 2, **workers, **arguments) as loader:
            batches, interrupt = iter(loader), InterruptedAt(number, torch.utils.data.sampler, most_visits=2)

            def go_on() -> None:
                for batch in batches:
                    got.append(batch.tolist())
                    if type(loader.sampler) is DistributedSampler:
                        loader.sampler.set_epoch(1)  # the next pass's, already

            with contextlib.suppress(KeyboardInterrupt), interrupt:
                go_on()
            try:
                go_on()
            except KeyboardInterrupt:  # by then the global generator may have been drawn from, or not
                assert ("sampler" in arguments, "generator" in arguments, got) == (False, False, [])
                return expected, interrupt.num_places
            for batch in loader:
                got.append(batch.tolist())
        return got, interrupt.num_places

    expected: list[list[int]] = []
    expected, num_places = order(0)
    assert len(expected) in (6, 12)
    for number in range(1 + list(SAMPLERS).index(name) % step, num_places + 1, step):
        assert order(number)[0] == expected, number


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
