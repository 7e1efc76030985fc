"""Roster: the engine processes of a gang, how they are begun together, and how they end."""

import contextlib
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any

from aioload.engine.member import Member
from aioload.engine.parcel import Parcel
from aioload.engine.server import is_up
from aioload.engine.settings import Part
from aioload.engine.shortage import explained
from aioload.stats import Ledger


class Roster:
    """The engine processes of a gang.

    They are asked for first, all at once, and come to be while what they are given is pickled. Where a server may
    still be importing things, they are asked for by who can wait.

    Args:
        parts: What each process is to do.
        ledger: Where what they do is counted.
        on_full: See :class:`~aioload.engine.channel.Channel`.

    Attributes:
        members: The processes, by their numbers.
    """

    def __init__(self, parts: Sequence[Part], ledger: Ledger, on_full: Callable[[], None]) -> None:
        self._parts, self._ledger, self._on_full = parts, ledger, on_full
        self.members: list[Member] = []
        self._dropped: list[Member] = []
        self._unstarted: tuple[Parcel, BaseContext] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Roster {self.members}>"

    def begin(self, contents: dict[str, Any], context: BaseContext) -> None:
        """Have the processes started, as far as nobody waits for that, and given what they are to have first.

        Raises:
            TransferError: Something cannot be pickled.
            OSError: Too few files may be open, or there is no memory.
            ProcessDiedError: A process ended before it was given anything.
        """
        with explained("What engine processes begin with"):
            self._add_members()
            is_early = is_up(context)
            if is_early:  # they come to be while we pickle
                self._start(Parcel({}, is_for_forks=True), context)
            with contextlib.closing(Parcel(contents, is_for_forks=context.get_start_method() == "fork")) as parcel:
                if is_early and parcel.file is None:  # what is given in the course of a start
                    is_early = False
                    self._drop_members()
                    self._add_members()
                for member in self.members:
                    member.greet(parcel)
                if parcel.file is None:
                    self._start(parcel, context)
                elif not is_early:
                    self._unstarted = parcel.wrapping(), context

    def await_start(self) -> None:
        """Wait until all processes are there, and have those started first that could not be without waiting.

        Raises:
            OSError: As :meth:`begin`.
            ProcessDiedError: The server that they are forked off is not there.
        """
        if self._unstarted is not None:
            with explained("What engine processes begin with"):
                self._start(*self._unstarted)
        for member in self.members:
            if member.process is not None:
                member.await_start()

    def shut(self) -> None:
        """Have the processes end, and start no more. Any thread, any time; never waits."""
        self._closed = True
        for member in self.members:
            member.channel.shut()

    def end(self, deadline: float) -> None:
        """See all processes end, and kill those that have not by ``deadline`` (monotonic)."""
        for member in (*self._dropped, *self.members):
            member.end(deadline)
            self._ledger.close(member.tally)

    def _add_members(self) -> None:
        for part in self._parts:
            self.members.append(Member(part, self._ledger.open(), self._on_full))

    def _drop_members(self) -> None:
        for member in self.members:
            member.channel.shut()
        self._dropped = self.members.copy()
        self.members.clear()  # it stays the same list

    def _start(self, parcel: Parcel, context: BaseContext) -> None:
        for member in self.members:
            if not self._closed:
                member.start(parcel, context)
