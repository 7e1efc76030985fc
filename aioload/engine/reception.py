"""Reception: what a loader asks of an engine process is taken in by whoever is at hand.

That is the main thread, which waits for it; but where one thread does all the work, and batches follow each other
within few milliseconds, it is that thread, between two batches, and the main thread sleeps. To wake it up takes longer
than a message, and it would take the interpreter from the thread that reads: one process loads 1.08 times as many 4 KB
files without it, in batches of 64, and takes 0.91 of the processor time for each (medians of 31 runs in turns).
"""

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aioload.engine.bell import Bell
from aioload.engine.channel import Channel
from aioload.engine.messages import Load, Notes, received
from aioload.engine.shortage import explained

QUICK_S = 0.005
"""A thread that comes twice within this time is expected to come again ..."""

REST_S = 0.01
"""... and relied on for so long: at the worst, where it is held up, a message lies there for this time."""


class Reception:
    """The messages that come by one channel, in their order, by one thread at a time.

    Args:
        channel: What they come by.
        handle: Called with each message and the file that came with it.

    Raises:
        OSError: Too few files may be open.
    """

    def __init__(self, channel: Channel, handle: Callable[[Any, int | None], None]) -> None:
        self._channel, self._handle = channel, handle
        self._turn = threading.Lock()
        self._left: deque[tuple[Any, int | None] | BaseException | None] = deque()
        """What has been received and not handled: a message with its file, an error, ``None`` for the end."""
        with explained("What an engine process begins with"):
            self._bell = Bell()
        self._is_there = select.poll()  # for whose turn it is
        self._is_there.register(channel.fileno(), select.POLLIN)
        self._rests_until_s = self._taken_in_s = 0.0
        self._is_resting = False

    def __repr__(self) -> str:
        return f"<Reception of {self._channel} {len(self._left)} left{' resting' if self._is_resting else ''}>"

    def take_in(self) -> None:
        """Handle what has come, as far as that may be done here; never waits.

        By a thread that has finished a batch and goes on working, where no other thread is at work.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            while not self._left and self._receive():
                message = self._left[0]
                if not isinstance(message, tuple) or not _is_anyones(message[0]):
                    break
                self._left.clear()
                self._handle(*message)
                if not self._is_there.poll(0):  # there rarely is more, and to ask takes less than to try
                    break
        except BaseException as exc:  # the process cannot go on
            self._left.append(exc)
        finally:
            self._turn.release()
        now_s, before_s = time.monotonic(), self._taken_in_s
        self._taken_in_s = now_s
        if not self._left and now_s - before_s < QUICK_S:
            self._rests_until_s = now_s + REST_S
            return
        self.listen()
        if self._left:
            self._bell.ring()  # also where the main thread does not rest: it may wait for what is no longer there

    def listen(self) -> None:
        """Have the main thread wait for messages from now on: who could take some in goes to sleep, or is not alone."""
        self._rests_until_s = 0.0
        if self._is_resting:
            self._bell.ring()

    def serve(self, patience: Callable[[], float | None], look: Callable[[], None]) -> None:
        """Handle messages until the other side is gone. In the main thread.

        Args:
            patience: Returns how many seconds to wait for a message before ``look`` is called, ``None`` for ever.
            look: See ``patience``.
        """
        quiet, attentive = select.poll(), select.poll()
        for poll in (quiet, attentive):
            poll.register(self._bell.fileno(), select.POLLIN)
        attentive.register(self._channel.fileno(), select.POLLIN)
        while True:
            self._rest(quiet)
            if not self._left and not self._wait(attentive, patience()):
                look()
                continue
            with self._turn:
                if not self._left and not self._receive():  # another thread was faster, or it was the bell
                    continue
                message = self._left.popleft()
                if message is None:
                    return
                if isinstance(message, BaseException):
                    raise message
                self._handle(*message)

    def close(self) -> None:
        """Let go of what it has open. Others may still call the other methods."""
        self._bell.close()

    def _rest(self, poll: select.poll) -> None:
        """Sleep while another thread takes messages in."""
        self._is_resting = True  # before looking: who takes that back rings
        while not self._left and (left_s := self._rests_until_s - time.monotonic()) > 0:
            self._wait(poll, left_s)
        self._is_resting = False

    def _wait(self, poll: select.poll, timeout_s: float | None) -> bool:
        files = poll.poll(None if timeout_s is None else timeout_s * 1000)
        if any(file == self._bell.fileno() for file, _ in files):
            self._bell.answer()
        return bool(files)

    def _receive(self) -> bool:
        """Receive the next message, and leave it; ``False`` if there is none yet."""
        try:
            came = self._channel.receive(wait=False)
        except BlockingIOError:
            return False
        self._left.append(None if came is None else (received(came[0]), came[1]))
        return True


def _is_anyones(message: Any) -> bool:
    """Whether any thread may handle a message; whoever handles the first batch of a pass looks after its reads."""
    return isinstance(message, Notes) or (isinstance(message, Load) and message.number > 0)
