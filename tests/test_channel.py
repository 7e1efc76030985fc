"""Channels and segments, which carry what engine processes and their loader have to say and to show."""

import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aioload.engine.channel import Channel, new_channel
from aioload.engine.division import divide
from aioload.engine.member import Member
from aioload.engine.segments import Segments, map_file
from aioload.stats import Tally


@pytest.fixture
def ends() -> "Iterator[tuple[Channel, Channel]]":
    ours, theirs = new_channel()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


@pytest.mark.parametrize("size", [0, 1, (48 << 10) - 1, 48 << 10, (48 << 10) + 1, 1_000_000])
def test_messages_arrive_whole(ends: tuple[Channel, Channel], size: int) -> None:
    one, other = ends
    messages = [os.urandom(size) for _ in range(3)]
    sender = threading.Thread(target=lambda: [one.send(message) for message in messages])
    sender.start()
    assert [other.receive() for _ in messages] == [(message, None) for message in messages]
    sender.join()


def test_messages_of_several_threads_are_not_mixed_up(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    messages = [bytes([number]) * 300_000 for number in range(4)]
    senders = [threading.Thread(target=one.send, args=(message,)) for message in messages]
    for sender in senders:
        sender.start()
    got = [other.receive() for _ in senders]
    for sender in senders:
        sender.join()
    assert sorted(each for each in got if each is not None) == [(message, None) for message in messages]


def test_the_end_comes_behind_what_was_sent(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert one.send(b"last")
    one.shut()
    assert other.receive() == (b"last", None)
    assert other.receive() is None
    assert not other.send(b"nobody is there")
    assert one.receive() is None


def test_the_end_comes_behind_what_was_sent_by_who_left_much_unread(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert one.send(b"never read")
    assert other.send(b"first")
    assert other.send(b"last")
    other.close()
    assert one.receive(wait=False) == (b"first", None)
    assert one.receive() == (b"last", None)
    assert one.receive() is None
    assert one.receive(wait=False) is None


def test_who_receives_waits_as_long_as_it_is_told(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    with pytest.raises(BlockingIOError):
        other.receive(wait=False)
    one.send(b"there")
    assert other.receive(wait=False) == (b"there", None)
    sender = threading.Timer(0.1, one.send, [b"later"])
    sender.start()
    assert other.receive() == (b"later", None)
    sender.join()
    one.shut()
    assert other.receive(wait=False) is None


@pytest.mark.parametrize("has_memfd", [True, False])
def test_both_sides_see_a_segment(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, has_memfd: bool
) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    one, other = ends
    segments = Segments()
    memory = segments.new_memory(100_000)
    number = segments.number_of(memory.data_ptr())
    file = segments.take_file(number)
    assert file is not None
    assert segments.take_file(number) is None
    one.send(b"here it is", file)
    os.close(file)
    received = other.receive()
    assert received is not None
    assert received[0] == b"here it is"
    assert received[1] is not None
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    seen = map_file(received[1])
    assert len(list(Path("/proc/self/fd").iterdir())) == num_files - 1
    memory[99_999] = 7
    assert seen[99_999] == 7
    seen[0] = 8
    part = memory[:10].numpy()
    del memory
    gc.collect()
    assert not segments.dropped
    assert part[0] == 8
    del part
    gc.collect()
    assert list(segments.dropped) == [number]
    assert np.count_nonzero(seen) == 2


def test_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        Segments().new_memory(4096)


def test_a_fork_in_the_middle_of_closing_closes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it closed by its number would be whatever has that number next."""
    is_over, (part,) = False, divide(1, 1, 1, 1)
    parent, report = os.getpid(), sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", lambda args: report(args) if os.getpid() == parent else os._exit(1))

    def open_and_close() -> None:
        while not is_over:
            Member(part, Tally(), lambda: None).end(0.0)

    thread = threading.Thread(target=open_and_close)
    thread.start()
    codes = []
    try:
        for _ in range(100):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside a thread
                pid = os.fork()
            if pid == 0:
                os._exit(0)
            codes.append(os.waitpid(pid, 0)[1])
    finally:
        is_over = True
        thread.join()
    assert codes == [0] * 100
