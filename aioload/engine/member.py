"""Member: one engine process, as the loader has it: how it is started, what is shared with it, and how it ended."""

import contextlib
import functools
import io
import multiprocessing
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from aioload.engine import entry
from aioload.engine.channel import new_channel
from aioload.engine.death import died_at_once
from aioload.engine.marks import Marks
from aioload.engine.messages import Contents, Hello, Notes, send
from aioload.engine.parcel import Parcel
from aioload.engine.segments import Mapping
from aioload.engine.server import check_room, interrupts_blocked, new_process
from aioload.engine.settings import Part
from aioload.errors import ArgumentError
from aioload.ring import Ring
from aioload.slot import Slot
from aioload.stats import Tally

_started: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()


class Member:
    """One process, to be started, and this side of what it shares with us.

    Args:
        part: What it is to do.
        tally: What it has done.
        on_full: See :class:`~aioload.engine.channel.Channel`.
    """

    def __init__(self, part: Part, tally: Tally, on_full: Callable[[], None]) -> None:
        self.number, self.tally = part.process, tally
        self.process: Any = None
        self.pid: int | None = None
        """The process's number among the system's, ``None`` if it is not there yet."""
        self.slots: dict[int, Slot] = {}
        self._num_arrivals: Counter[int] = Counter()
        self.freed: deque[tuple[int, int]] = deque()  # appended to by whoever lets the last view go
        self.taken: deque[tuple[int, int]] = deque()
        self.reads_limit = self.decode_limit = self.num_bytes = self.peak_bytes = 0
        self.has_begun = self.is_single = False
        self.marks: Marks | None = None
        """Which samples it is loading, once it has been greeted."""
        self._part = part
        with contextlib.ExitStack() as undo:  # where too few files may be open
            self.channel, end = new_channel()
            undo.callback(self.channel.close)
            undo.callback(end.close)
            life, keep = os.pipe()
            undo.pop_all()
        self.channel.on_full = on_full
        self.channel.keep(io.FileIO(keep, "w"))
        self._ends = end, Connection(life, writable=False)

    def __repr__(self) -> str:
        return f"<Member {self.number} pid={self.pid}>"

    @property
    def name(self) -> str:
        """What a message calls it, at the beginning of a sentence."""
        return f"Engine process {self.number}" + (f" (pid {self.pid})" if self.pid is not None else "")

    def greet(self, parcel: Parcel) -> None:
        """Send it what it has to have first. It may be started before or after that."""
        self.marks = Marks()  # not before the process is asked for: it takes 0.3 ms
        for file in parcel.files:
            self.send(Contents(is_last=file == parcel.files[-1]), file)
        self.send(Hello(), self.marks.file)
        self.marks.close()

    def start(self, parcel: Parcel, context: BaseContext) -> None:
        """Start the process, or ask the server for it, which may have others to fork, or be importing things yet.

        Args:
            parcel: What it is given.
            context: How it is started.

        Raises:
            TransferError: Something cannot be pickled.
            ProcessDiedError: It ended before it was given anything.
        """
        end, life = self._ends
        process = new_process(
            context,
            target=entry.main,
            args=(parcel, end, life, self._part),
            name=f"aioload-{self.number}",
            daemon=True,
        )
        try:
            if context.get_start_method() == "forkserver":
                forkserver.ensure_running()  # not with SIGINT blocked: others' processes come from it too
            check_room()
            with end, life, interrupts_blocked():
                process.start()
        except BrokenPipeError as exc:
            raise died_at_once(self.name) from exc
        self.process = process
        _started.add(process)
        _ended_at_exit().discard(process)  # at its exit the interpreter would wait for the server

    def await_start(self) -> None:
        """Wait until the process is there.

        Raises:
            ProcessDiedError: The server is not.
        """
        self.pid = self.process.pid
        if self.pid is None:
            raise died_at_once(self.name)
        _ended_at_exit().add(self.process)

    def end(self, deadline: float) -> None:
        """See the process end, and kill it at ``deadline`` (monotonic); nobody may use this any more."""
        process, self.process = self.process, None  # not closed: multiprocessing may be joining it, as it does at exit
        if process is not None:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        for end in (*self._ends, self.marks, self.channel):
            if end is not None:
                end.close()
        self.slots.clear()  # not when a collection finds us: their memory may be page-locked

    def notes(self) -> Notes:
        """Return what it has not been told: until :meth:`note_told` the same again."""
        return Notes(list(self.freed.copy()), list(self.taken.copy()))

    def note_told(self, notes: Notes) -> None:
        """Note that it has been sent these. Another thread may have sent them as well."""
        _remove(self.freed, notes.freed)
        _remove(self.taken, notes.taken)

    def send(self, message: NamedTuple, file: int | None = None) -> None:
        """Send it a message; if it has died, that is found out elsewhere."""
        send(self.channel, message, file)

    def forget(self, segment: int) -> None:
        """Let one of its segments go, which is gone there."""
        self.slots.pop(segment, None)
        self._num_arrivals.pop(segment, None)

    def slot(self, segment: int, file: int | None, ring: Ring) -> Slot:
        """Return the slot over one of its segments, which has just been filled."""
        if file is not None:
            self.slots[segment] = ring.adopt(Mapping(file))
        slot = self.slots[segment]
        self._num_arrivals[segment] += 1
        slot.arrive(functools.partial(self.freed.append, (segment, self._num_arrivals[segment])))
        return slot


def check_may_start() -> None:
    """Raise :class:`~aioload.errors.ArgumentError` in a process that may not start others, or not yet."""
    if multiprocessing.current_process().daemon:
        message = (
            "processes= needs processes of its own, and this one is daemonic (a worker of torch's loader or of a pool, "
            "say), which may not start any. Leave processes out here."
        )
        raise ArgumentError(message)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        message = (
            "processes= is for the script itself, and this is one of its processes, which runs it again for what it "
            "defines. Have the script do what it does under if __name__ == '__main__':."
        )
        raise ArgumentError(message)


def _remove(queue: "deque[tuple[int, int]]", items: list[tuple[int, int]]) -> None:
    for item in items:
        try:
            queue.remove(item)
        except ValueError:  # another thread was faster
            continue


def _ended_at_exit() -> set[BaseProcess]:
    """Return the processes that multiprocessing ends, and waits for, when the interpreter ends."""
    return multiprocessing.process._children  # type: ignore[attr-defined,no-any-return]  # noqa: SLF001


def _disown() -> None:
    """Have a fork of this process leave its engine processes alone when it ends; multiprocessing would end them."""
    _ended_at_exit().difference_update(_started)


os.register_at_fork(after_in_child=_disown)
