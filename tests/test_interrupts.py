"""Interrupts: Ctrl-C reaches the consumer at once, and no batch is lost by it."""

import asyncio
import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import failing
import numpy as np
import pytest
import torch
from conftest import join_all, loader_threads
from failing import CASES, MakeCase
from outcomes import FACES, Load, of_async_iterator, of_iterator

from aioload import DataLoader, TensorDataset, error_context
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedItems


def interrupt_when(ready: Callable[[], None]) -> threading.Thread:
    """Send this process a SIGINT, as Ctrl-C does, when ``ready`` returns."""

    def send() -> None:
        ready()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset, GatedItems])
@pytest.mark.parametrize("persistent", [False, True], ids=["own threads", "persistent threads"])
def test_no_batch_is_lost_by_an_interrupt_while_waiting(kind: Any, persistent: bool) -> None:
    with (
        kind(8) as dataset,
        DataLoader(dataset, num_workers=2, persistent_workers=persistent) as loader,
    ):
        batches = iter(loader)
        for index in range(8):
            with pytest.raises(KeyboardInterrupt):
                wait_interrupted(batches, lambda: dataset.gates.wait_started(index))  # noqa: B023
            dataset.gates.open(index)
            assert int(next(batches)) == index
        assert list(batches) == []


def wait_interrupted(batches: Iterator[Any], ready: Callable[[], None]) -> None:
    thread = interrupt_when(ready)
    try:
        next(batches)
    finally:
        thread.join()


class Interrupted(GatedDataset):
    """Ctrl-C comes once while each of the samples is loaded."""

    def __getitem__(self, index: int) -> int:
        if index not in self.gates.started:
            self.gates.pass_through(index)
            signal.raise_signal(signal.SIGINT)
        return index


class AsyncInterrupted(Interrupted):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitem__(index)


class InterruptedItems(GatedItems):
    def __init__(self, size: int, *, opened: bool) -> None:
        super().__init__(size, opened=opened)
        self.position = -1
        self.interrupted = False

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        self.position += 1
        if self.position == self.size:
            raise StopIteration
        self.interrupted = False
        return self.position


@pytest.mark.parametrize(
    ("kind", "num_interrupts"),
    [(Interrupted, 6), (AsyncInterrupted, 6), (InterruptedItems, 7)],  # once more at the end of the items
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_no_batch_is_lost_by_an_interrupt_without_threads(kind: Any, num_interrupts: int, drop_last: bool) -> None:
    batches = iter(DataLoader(kind(6, opened=True), 2, num_workers=0, drop_last=drop_last))
    got, interrupts = [], 0
    while True:
        try:
            got.append(next(batches).tolist())
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert got == [[0, 1], [2, 3], [4, 5]]
    assert interrupts == num_interrupts


@pytest.mark.filterwarnings("ignore:.*loaded again and dropped:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2], ids=["goes on without threads", "goes on with threads"])
@pytest.mark.parametrize("kind", [Interrupted, AsyncInterrupted, InterruptedItems])
def test_a_state_that_is_saved_on_an_interrupt_counts_the_batches_that_came(kind: Any, num_workers: int) -> None:
    """As trainers save one on Ctrl-C."""
    for num_before in range(3):
        with DataLoader(kind(6, opened=True), 2, num_workers=0) as loader:
            batches, got = iter(loader), list[Any]()
            while True:
                try:
                    got.append(next(batches).tolist())
                except KeyboardInterrupt:
                    if len(got) == num_before:
                        break
            state = loader.state_dict()
        assert state["num_yielded"] == num_before
        whole = GatedItems if kind is InterruptedItems else GatedDataset
        with DataLoader(whole(6, opened=True), 2, num_workers=num_workers) as loader:
            loader.load_state_dict(state)
            assert got + [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.filterwarnings("ignore:.*loaded again and dropped:UserWarning")
@pytest.mark.parametrize("kind", [GatedDataset, AsyncGatedDataset, GatedItems])
def test_a_state_that_is_saved_on_an_interrupt_while_waiting(kind: Any) -> None:
    for num_before in range(3):
        with kind(3) as dataset, DataLoader(dataset, num_workers=2) as loader:
            dataset.gates.open(*range(num_before))
            batches = iter(loader)
            assert [int(next(batches)) for _ in range(num_before)] == list(range(num_before))
            with pytest.raises(KeyboardInterrupt):
                wait_interrupted(batches, lambda: dataset.gates.wait_started(num_before))  # noqa: B023
            state = loader.state_dict()
            dataset.gates.open_all()
        with DataLoader(kind(3, opened=True), num_workers=2) as loader:
            loader.load_state_dict(state)
            assert [int(batch) for batch in loader] == list(range(num_before, 3))


@pytest.mark.parametrize("load", FACES)
@pytest.mark.parametrize("make_case", CASES)
def test_an_interrupt_of_the_datasets_own_is_an_error_as_any_other(
    make_case: MakeCase, load: Load, tmp_path: Path
) -> None:
    error = KeyboardInterrupt(3)
    case = make_case(error, tmp_path)
    assert load(case.dataset, **case.arguments) == [*case.before, error, *case.after]
    assert error_context(error) == case.context


@pytest.mark.parametrize("drop_last", [False, True])
def test_items_before_an_interrupt_of_the_datasets_own_come_before_it(drop_last: bool) -> None:
    error = KeyboardInterrupt()
    dataset = failing.IterableNumbers(error)
    with DataLoader(dataset, 3, num_workers=1, drop_last=drop_last) as loader:
        got = of_iterator(iter(loader))
    assert got == ([error] if drop_last else [[0, 1], error, [3]])
    context = error_context(error)
    assert context is not None
    assert (context.index, context.stage) == (2, "fetch")


def raise_interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


class Interrupting:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            raise_interrupt(number, frame)


def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


def interrupted_and_reported() -> None:
    try:
        interrupted()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("cleaned up") from None


def interrupted_and_raised_again() -> None:
    try:
        interrupted()
    except KeyboardInterrupt as exc:
        raise exc


def interrupted_in_a_loop() -> None:
    async def wait() -> None:
        interrupted()
        await asyncio.sleep(60)

    asyncio.run(wait())


HANDLERS: dict[str, Any] = {
    "default": signal.default_int_handler,
    "function": raise_interrupt,
    "method": Interrupting().handle,
    "object": Interrupting(),
    "partial": functools.partial(functools.partial(raise_interrupt)),
}


@pytest.fixture
def handle() -> Iterator[Callable[[Any], None]]:
    """Install a handler for SIGINT and, if it is no built-in one, for SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def install(handler: Any) -> None:
        for number in before:
            signal.signal(number, handler)

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


class InterruptedBy(GatedDataset):
    """Something that ends in a signal happens once while each of the samples is loaded."""

    def __init__(self, happen: Callable[[], None]) -> None:
        super().__init__(4, opened=True)
        self.happen = happen

    def __getitem__(self, index: int) -> int:
        if index not in self.gates.started:
            self.gates.pass_through(index)
            self.happen()
        return index


class AsyncInterruptedBy(InterruptedBy):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS.keys())
@pytest.mark.parametrize("happen", [interrupted, terminated, interrupted_and_reported, interrupted_and_raised_again])
@pytest.mark.parametrize("kind", [InterruptedBy, AsyncInterruptedBy])
def test_no_batch_is_lost_by_a_signal_whatever_handles_it(
    kind: type[InterruptedBy], happen: Callable[[], None], handler: Any, handle: Callable[[Any], None]
) -> None:
    handle(handler)
    got = of_iterator(iter(DataLoader(kind(happen), 2, num_workers=0)))
    assert [each for each in got if isinstance(each, list)] == [[0, 1], [2, 3]]
    interrupts = [each for each in got if not isinstance(each, list)]
    assert [type(each) for each in interrupts] == [KeyboardInterrupt] * 4
    assert [error_context(each) for each in interrupts] == [None] * 4


def test_no_batch_is_lost_by_an_interrupt_of_a_loop_that_the_dataset_runs() -> None:
    got = of_iterator(iter(DataLoader(InterruptedBy(interrupted_in_a_loop), 2, num_workers=0)))
    assert [each for each in got if isinstance(each, list)] == [[0, 1], [2, 3]]


def test_no_batch_is_lost_by_an_interrupt_of_a_coroutine_without_threads(handle: Callable[[Any], None]) -> None:
    async def consume() -> list[Any]:
        handle(raise_interrupt)  # asyncio's would cancel the task
        dataset = AsyncInterruptedBy(interrupted)
        return await of_async_iterator(aiter(DataLoader(dataset, 2, num_workers=0)))

    got = asyncio.run(consume())
    assert [each for each in got if isinstance(each, list)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupted_sampler_does_not_end_the_pass_in_silence(num_workers: int) -> None:
    loader = DataLoader(range(6), sampler=Killed(is_whole=False), num_workers=num_workers)
    assert numbers_or_interrupts(iter(loader)) == [0, 1, 2, 3, 4]
    state = loader.state_dict()
    loader.close()
    loader = DataLoader(range(6), sampler=Killed(is_whole=True), num_workers=num_workers)
    loader.load_state_dict(state)
    assert [int(batch) for batch in loader] == [5]


class Killed(torch.utils.data.Sampler[int]):
    """Ctrl-C comes before the last index, in a generator, which it ends."""

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        if not self.is_whole:
            signal.raise_signal(signal.SIGINT)
        yield 5


class KilledItems(Killed, torch.utils.data.IterableDataset[int]):
    pass


def numbers_or_interrupts(batches: Iterator[Any]) -> list[int]:
    """Return the numbers; there must be two interrupts: when it came, and in place of the end."""
    got, interrupts = [], 0
    while True:
        try:
            got.append(int(next(batches)))
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    return got


@pytest.mark.filterwarnings("ignore:.*loaded again and dropped:UserWarning")
def test_interrupted_items_do_not_end_the_pass_in_silence() -> None:
    loader = DataLoader(KilledItems(is_whole=False), num_workers=0)
    assert numbers_or_interrupts(iter(loader)) == [0, 1, 2, 3, 4]
    state = loader.state_dict()
    for num_workers in (0, 1):
        with DataLoader(KilledItems(is_whole=True), num_workers=num_workers) as loader:
            loader.load_state_dict(state)
            assert [int(batch) for batch in loader] == [5]


def test_an_interrupted_loop_stops_loading_though_its_traceback_is_kept() -> None:
    dataset = GatedDataset(1000, opened=True)

    def consume() -> None:
        batches = iter(DataLoader(dataset, num_workers=2))  # stays in the traceback
        for batch in batches:
            if batch == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        consume()
    kept = [caught]
    del caught
    dataset.gates.wait_num_started(8)  # four consumed, four ahead
    kept.clear()
    gc.collect()
    assert join_all(loader_threads()) == set()
    assert len(dataset.gates.started) == 8


class InterruptingIndex:
    """An index that Ctrl-C comes to once, when a batch is gathered from tensors."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.interrupted = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        return np.array(self.index)

    def __int__(self) -> int:
        return self.index


def test_no_batch_is_lost_by_an_interrupt_while_it_is_gathered() -> None:
    sampler = [*range(5), InterruptingIndex(5), *range(6, 10)]
    batches = iter(DataLoader(TensorDataset(torch.arange(10)), sampler=sampler, num_workers=2))
    got, interrupts = [], 0
    while True:
        try:
            got.append(int(next(batches)[0]))
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert (got, interrupts) == (list(range(10)), 1)
