"""Bell: wakes up a thread that waits in ``poll``."""

import contextlib
import socket


class Bell:
    """A descriptor to wait on. Any thread may ring; one waits, and answers."""

    def __init__(self) -> None:
        self._waits, self._rings = socket.socketpair()
        for end in (self._waits, self._rings):
            end.setblocking(False)

    def __repr__(self) -> str:
        return f"<Bell {self._waits.fileno()}>"

    def fileno(self) -> int:
        """Return the descriptor that is readable when somebody has rung."""
        return self._waits.fileno()

    def ring(self) -> None:
        """Wake up who waits, or who will. Never waits; when it is closed, it does nothing."""
        with contextlib.suppress(OSError):  # closed, or so many have rung that this one will not be missed
            self._rings.send(b"!")

    def answer(self) -> None:
        """Take notice of all that have rung so far."""
        with contextlib.suppress(BlockingIOError):
            self._waits.recv(4096)

    def close(self) -> None:
        """Close it. Others may still ring."""
        self._rings.close()
        self._waits.close()
