"""Channel: messages between two processes of one machine, each of which arrives whole or not at all."""

import contextlib
import errno
import io
import itertools
import os
import socket
import struct
import weakref
from array import array
from collections.abc import Callable
from typing import Any

from aioload.engine.shortage import explained

_HEAD = struct.Struct("<?Q")
"""Whether it is the message's last part, and the message's number."""

PART_BYTES = 48 << 10
"""Messages that are larger go in parts: a packet must fit into the socket's buffer, which is some 200 KB."""

_ancillary_bytes = socket.CMSG_SPACE(array("i").itemsize)

# As plain numbers: members of an enum take 1 us to be put together, of the 9 us of a message.
_NOW, _CLOSED_BY_EXEC, _CUT = (int(flag) for flag in (socket.MSG_DONTWAIT, socket.MSG_CMSG_CLOEXEC, socket.MSG_CTRUNC))

_ends: "weakref.WeakSet[Channel]" = weakref.WeakSet()


class Channel:
    """One end of a socket that keeps messages apart. Any thread may send; one at a time receives.

    Packets are atomic, so an interrupt between two of them leaves nothing half written: a message of one packet needs
    no lock, and of several the parts are told from those of others by their number. A message that an interrupt cut
    off is never received.

    An end that is inherited by a fork is closed there: else the other end would not learn that this process is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._numbers = itertools.count()
        self._parts: dict[int, tuple[list[bytes], int | None]] = {}
        self._kept: io.FileIO | None = None
        self.on_full: Callable[[], None] | None = None
        """Called, by who sends, before waiting for the other side to receive."""

    def __repr__(self) -> str:
        return f"<Channel {self._socket.fileno()}>"

    def keep(self, other: io.FileIO) -> None:
        """Have ``other`` closed when this end is, and where this end is inherited by a fork.

        Like a socket it forgets its number before it closes it: a fork at that moment must not close what has it next.
        A :class:`~multiprocessing.connection.Connection` does not.
        """
        self._kept = other

    def fileno(self) -> int:
        """Return the descriptor to wait on for something to receive."""
        return self._socket.fileno()

    def send(self, message: bytes, file: int | None = None) -> bool:
        """Send a message, and with it a copy of an open file; ``False`` if nobody is there to receive it.

        Waits as long as the other side has not received some hundreds of messages.
        """
        number, files = next(self._numbers), []
        if file is not None:
            files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file]))]
        starts = range(0, len(message) or 1, PART_BYTES)
        try:
            for start in starts:
                head = _HEAD.pack(start == starts[-1], number)
                part = message if len(starts) == 1 else message[start : start + PART_BYTES]
                self._send_packet([head, part], files)
                files = []
        except OSError:
            return False
        return True

    def _send_packet(self, buffers: list[bytes], files: list[tuple[int, int, Any]]) -> None:
        if self.on_full is not None:
            try:
                self._socket.sendmsg(buffers, files, _NOW)
            except BlockingIOError:
                self.on_full()
            else:
                return
        self._socket.sendmsg(buffers, files)

    def receive(self, *, wait: bool = True) -> tuple[bytes, int | None] | None:
        """Return the next message and the file that came with it, which is the caller's; ``None`` at the end.

        Args:
            wait: Whether to wait for it.

        Raises:
            BlockingIOError: There is none, and we are not to wait.
            OSError: This process has too many files open for the one that came.
        """
        asked = _CLOSED_BY_EXEC if wait else _CLOSED_BY_EXEC | _NOW
        while True:
            try:
                packet, files, flags, _ = self._socket.recvmsg(_HEAD.size + PART_BYTES, _ancillary_bytes, asked)
            except BlockingIOError:
                raise
            except ConnectionResetError:  # said once, and first, where the other end is gone and left some unread
                continue
            except OSError:  # closed here
                return None
            if not packet:
                return None
            if flags & _CUT:
                with explained("Memory of an engine process"):
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            file = array("i", files[0][2])[0] if files else None
            is_last, number = _HEAD.unpack_from(packet)
            if is_last and number not in self._parts:
                return packet[_HEAD.size :], file
            parts, file = self._parts.setdefault(number, ([], file))  # it comes with the first of them
            parts.append(packet[_HEAD.size :])
            if is_last:
                del self._parts[number]
                return b"".join(parts), file

    def shut(self) -> None:
        """End it at both ends: what was sent is still received, and then the end. Again, it does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Nobody may use it any more."""
        self._socket.close()
        if self._kept is not None:
            self._kept.close()


def new_channel() -> tuple[Channel, socket.socket]:
    """Return one end, and the socket of the other end, which can be given to a process that is started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    _ends.add(channel)
    return channel, theirs


def _close_inherited() -> None:
    for channel in tuple(_ends):
        channel.close()


os.register_at_fork(after_in_child=_close_inherited)
