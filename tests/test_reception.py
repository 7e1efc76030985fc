"""Who takes in what a loader asks of its engine processes: the thread that is at hand, and else the main thread."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aioload
from aioload.engine import reception
from aioload.engine.channel import Channel, new_channel
from aioload.engine.messages import End, Load, Notes, send
from aioload.engine.reception import Reception

NOTES = Notes([], [])
LONG_S = 60.0


class Desk:
    """A reception whose main thread is one of the test, and what has been handled there, with the thread that did."""

    def __init__(self) -> None:
        self._loader, end = new_channel()
        self._channel = Channel(end)
        self.handled: list[tuple[Any, threading.Thread]] = []
        self.error: BaseException | None = None
        self.get_patience: Callable[[], float | None] = lambda: None
        self.num_looks = 0
        self.on_message: Callable[[Any], None] = lambda _: None
        self.reception = Reception(self._channel, self._handle)
        self.main = threading.Thread(target=self._serve)
        self.main.start()

    def ask(self, *messages: Any) -> None:
        """Send messages, as a loader does."""
        for message in messages:
            send(self._loader, message)

    def come_again_soon(self) -> None:
        """Come for messages again and again, as a thread that finishes batches, until the main thread relies on it."""

        def is_relied_on() -> bool:
            self.reception.take_in()
            self.ask(NOTES)  # so that the main thread sees that
            return "resting" in repr(self.reception)

        self.reception.take_in()
        until(is_relied_on)
        self.reception.take_in()
        self.handled.clear()

    def handled_by(self, thread: threading.Thread) -> list[Any]:
        return [message for message, by in self.handled if by is thread]

    def hang_up(self) -> None:
        """End the channel, as a loader does."""
        self._loader.shut()

    def close(self) -> None:
        self.hang_up()
        self.reception.listen()
        self.main.join()
        self.reception.close()
        self._loader.close()
        self._channel.close()

    def _handle(self, message: Any, file: int | None) -> None:
        assert file is None
        self.handled.append((message, threading.current_thread()))
        self.on_message(message)

    def _serve(self) -> None:
        try:
            self.reception.serve(lambda: self.get_patience(), self._look)
        except BaseException as exc:
            self.error = exc

    def _look(self) -> None:
        self.num_looks += 1


@pytest.fixture
def is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whoever came once relied on for as long as a test lasts."""
    monkeypatch.setattr(reception, "QUICK_S", LONG_S)
    monkeypatch.setattr(reception, "REST_S", LONG_S)


@pytest.fixture
def desk(is_patient: None) -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def load(number: int) -> Load:
    return Load(0, number, [number], 0, 0, [], [])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_main_thread_handles_what_comes(desk: Desk) -> None:
    messages = [load(0), load(1), NOTES, End(0)]
    desk.ask(*messages)
    until(lambda: desk.handled_by(desk.main) == messages)


def test_a_thread_that_comes_often_handles_what_comes_and_the_main_thread_sleeps(desk: Desk) -> None:
    desk.come_again_soon()
    messages = [load(1), NOTES, load(2)]
    desk.ask(*messages)
    time.sleep(0.1)
    assert not desk.handled
    desk.reception.take_in()
    assert desk.handled_by(threading.current_thread()) == messages


def test_the_main_thread_is_woken_up_by_a_thread_that_goes_to_sleep(desk: Desk) -> None:
    desk.come_again_soon()
    desk.ask(load(1))
    desk.reception.listen()
    until(lambda: desk.handled_by(desk.main) == [load(1)])
    desk.ask(load(2))
    until(lambda: desk.handled_by(desk.main) == [load(1), load(2)])


def test_what_is_for_the_main_thread_and_all_behind_it_is_left_to_it(desk: Desk) -> None:
    desk.come_again_soon()
    desk.ask(load(3), End(0), load(0), load(1))
    desk.reception.take_in()
    assert desk.handled[0] == (load(3), threading.current_thread())
    until(lambda: desk.handled_by(desk.main) == [End(0), load(0), load(1)])


@pytest.mark.parametrize("left", ["a message", "an error", "the end"])
def test_what_is_left_to_the_main_thread_is_seen_though_it_is_about_to_wait(desk: Desk, left: str) -> None:
    about_to_wait, may_wait = threading.Event(), threading.Event()

    def hold_up() -> float | None:
        about_to_wait.set()
        may_wait.wait(LONG_S)
        return None

    desk.get_patience = hold_up
    desk.ask(NOTES)  # so that it asks
    about_to_wait.wait(LONG_S)
    error = RuntimeError("no thread is to be had")
    if left == "a message":
        desk.ask(End(0))
    elif left == "the end":
        desk.hang_up()
    else:
        desk.ask(load(1))
        desk.on_message = lambda _: refuse(error)
    desk.reception.take_in()
    may_wait.set()
    if left == "a message":
        until(lambda: desk.handled_by(desk.main) == [NOTES, End(0)])
    else:
        desk.main.join()
        assert desk.error is (error if left == "an error" else None)


def refuse(error: Exception) -> None:
    raise error


def test_the_main_thread_does_not_rely_on_a_thread_that_comes_seldom(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "QUICK_S", 0.0)
    for number in range(1, 4):
        desk.reception.take_in()
        desk.ask(load(number))
        until(lambda: len(desk.handled_by(desk.main)) == number)  # noqa: B023


def test_the_main_thread_waits_for_a_thread_that_does_not_come_back_no_longer_than_it_rests(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "REST_S", 0.2)
    began_s = time.monotonic()
    desk.come_again_soon()
    desk.ask(load(1))
    until(lambda: desk.handled_by(desk.main) == [load(1)])
    assert time.monotonic() - began_s >= 0.1


def test_an_error_in_another_thread_is_the_main_threads(desk: Desk) -> None:
    error = RuntimeError("no thread is to be had")

    desk.come_again_soon()
    desk.on_message = lambda _: refuse(error)
    desk.ask(load(1), load(2))
    desk.reception.take_in()
    desk.main.join()
    assert desk.error is error
    assert [message for message, _ in desk.handled] == [load(1)]


def test_the_end_is_seen_though_another_thread_saw_it_first(desk: Desk) -> None:
    began_s = time.monotonic()
    desk.come_again_soon()
    desk.ask(load(1))
    desk.hang_up()
    desk.reception.take_in()
    desk.main.join()
    assert time.monotonic() - began_s < LONG_S / 2  # not left lying until the main thread has rested
    assert desk.error is None
    assert desk.handled_by(threading.current_thread()) == [load(1)]


def test_nobody_waits_for_the_main_thread_that_handles_something(desk: Desk) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(message: Any) -> None:
        if isinstance(message, End):
            has_begun.set()
            may_end.wait(LONG_S)

    desk.on_message = wait
    desk.ask(End(0), load(1))
    has_begun.wait(LONG_S)
    desk.reception.take_in()
    assert not desk.handled_by(threading.current_thread())
    may_end.set()
    until(lambda: desk.handled_by(desk.main) == [End(0), load(1)])


def test_somebody_looks_while_nothing_comes(desk: Desk) -> None:
    desk.get_patience = lambda: 0.001
    desk.ask(NOTES)
    until(lambda: desk.num_looks > 2)


SIZE = 600


class Singly:
    """Samples that are asked for one by one."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Together(Singly):
    """Samples that are asked for by the batch."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Awaited:
    """Samples that are awaited."""

    def __len__(self) -> int:
        return SIZE

    async def __getitem__(self, index: int) -> int:
        return index


class InTurn(torch.utils.data.IterableDataset[int]):
    """Samples that come in their own order, from the first worker."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(SIZE if info is None or info.id == 0 else 0))


def in_files(folder: Path) -> Any:
    paths = [folder / str(number) for number in range(SIZE)]
    for path in paths:
        path.write_bytes(b"0123")
    return aioload.FileDataset(paths, lambda _, index: index)


@pytest.mark.usefixtures("forks_are_served", "no_process_is_left")
def test_a_process_that_may_open_too_few_files_to_begin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "Bell", lambda: refuse(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    loader = aioload.DataLoader(Singly(), 4, processes=1, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(OSError, match="Too many open files: What an engine process begins with could not be had"):
        next(iter(loader))


@pytest.mark.usefixtures("forks_are_served", "no_process_is_left", "is_patient")
@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("arguments", [{}, {"prefetch_bytes": 64}, {"prefetch_factor": 16}], ids=str)
@pytest.mark.parametrize("kind", [Singly, Together, Awaited, InTurn, in_files])
def test_nothing_is_left_lying_though_the_main_thread_rests_until_it_is_woken_up(
    kind: Callable[..., Any], arguments: dict[str, Any], num_workers: int, tmp_path: Path
) -> None:
    dataset = in_files(tmp_path) if kind is in_files else kind()
    began_s = time.monotonic()
    with aioload.DataLoader(
        dataset,
        4,
        processes=1,
        num_workers=num_workers,
        persistent_workers=True,
        multiprocessing_context="fork",
        **arguments,
    ) as loader:
        for _ in range(2):
            batches = iter(loader)
            assert [next(batches).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
            batches.close()
            assert sorted(index for batch in loader for index in batch.tolist()) == list(range(SIZE))
    assert time.monotonic() - began_s < LONG_S / 2
