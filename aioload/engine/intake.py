"""Intake: what engine processes send is received, all that has come at a time, while somebody waits for it."""

import select
from collections.abc import Callable, Iterator, Sequence

from aioload.engine.bell import Bell
from aioload.engine.channel import PART_BYTES
from aioload.engine.member import Member
from aioload.engine.shortage import explained


class Intake:
    """What comes from engine processes. One thread receives; any may call the other methods.

    Raises:
        OSError: Too few files may be open.
    """

    def __init__(self) -> None:
        with explained("What engine processes begin with"):
            self._bell = Bell()
        self._is_pressed = self._closed = False
        self._is_listening = False  # whether it wakes up by itself when something comes

    def __repr__(self) -> str:
        state = "closed" if self._closed else "pressed" if self._is_pressed else "open"
        return f"<Intake {state}>"

    def look(self) -> None:
        """Have what has come, and comes next, received if that is wanted; it was so before this call. Never waits."""
        if not self._is_listening:
            self._bell.ring()

    def press(self) -> None:
        """Receive all that comes from now on: a socket is full, and others that should load wait for that."""
        self._is_pressed = True
        self._bell.ring()

    def shut(self) -> None:
        """Receive no more. Never waits."""
        self._closed = True
        self._bell.ring()

    def close(self) -> None:
        """Let go of what it has open. Others may still call the other methods."""
        self._bell.close()

    def messages(
        self, members: Sequence[Member], is_wanted: Callable[[], bool]
    ) -> Iterator[tuple[Member, bytes | None, int | None]]:
        """Yield each message with who sent it and the file that came with it, and ``None`` once a process has ended.

        It goes on until :meth:`shut`, or until who asks has had enough. What a process sent before it died counts.

        Args:
            members: The processes.
            is_wanted: Returns whether messages are wanted; else they are left where they are.
        """
        quiet, attentive, bell = select.poll(), select.poll(), self._bell.fileno()
        sentinels = {member.process.sentinel: member for member in members if member.process is not None}
        for poll in (quiet, attentive):
            for file in (bell, *sentinels):
                poll.register(file, select.POLLIN)
        channels = {member.channel.fileno(): member for member in members}
        for file in channels:
            attentive.register(file, select.POLLIN)
        while not self._closed:
            self._is_listening = False  # before asking: who begins to want it behind that has to ring
            self._is_listening = self._is_pressed or is_wanted()
            files = {file for file, _ in (attentive if self._is_listening else quiet).poll()}
            if bell in files:
                self._bell.answer()
            dead = [sentinels[file] for file in files if file in sentinels]
            is_one_of_them = self._is_listening and not dead and bell not in files
            yield from self._received([channels[file] for file in files] if is_one_of_them else members, dead)

    def _received(self, senders: Sequence[Member], dead: list[Member]) -> list[tuple[Member, bytes | None, int | None]]:
        """Return what there is: all of it before any is taken in, as whoever that wakes up goes on beside the rest."""
        received: list[tuple[Member, bytes | None, int | None]] = []
        for member in senders:
            try:
                while (message := member.channel.receive(wait=False)) is not None:
                    received.append((member, *message))
                    self._is_pressed |= len(message[0]) > PART_BYTES
            except BlockingIOError:  # that is all
                continue
            dead.append(member)
        return [*received, *((member, None, None) for member in dead)]
