"""Reception: what a loader asks of an engine process is taken in by whoever is at hand.

That is the main thread, which waits for it; but where one thread does all the work, and batches follow each other
within few milliseconds, it is that thread, between two batches, and the main thread sleeps. To wake it up takes longer
than a message, and it would take the interpreter from the thread that reads: with 4 KB files in batches of 64, one
process loads 1.3 times as many without.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aioload.engine.channel import Channel
from aioload.engine.messages import Load, Notes, received

QUICK_S = 0.005
"""A thread that comes twice within this time is expected to come again ..."""

REST_S = 0.01
"""... and relied on for so long: at the worst, where it is held up, a message lies there for this time."""


class Reception:
    """The messages that come by one channel, in their order, by one thread at a time.

    Args:
        channel: What they come by.
        handle: Called with each message and the file that came with it.
    """

    def __init__(self, channel: Channel, handle: Callable[[Any, int | None], None]) -> None:
        self._channel, self._handle = channel, handle
        self._turn = threading.Lock()
        self._left: deque[tuple[Any, int | None] | BaseException | None] = deque()
        """What has been received and not handled: a message with its file, an error, ``None`` for the end."""
        self._alarm = threading.Lock()  # released to wake the main thread up
        self._alarm.acquire()
        self._rests_until_s = self._taken_in_s = 0.0
        self._is_resting = False

    def __repr__(self) -> str:
        return f"<Reception of {self._channel} {len(self._left)} left{' resting' if self._is_resting else ''}>"

    def take_in(self, *, is_alone: bool) -> None:
        """Handle what has come, as far as that may be done here. By a thread that has finished a batch; never waits.

        Args:
            is_alone: Whether no other thread is at work, and this one goes on working.
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
        except BaseException as exc:  # the process cannot go on
            self._left.append(exc)
        finally:
            self._turn.release()
        now_s, before_s = time.monotonic(), self._taken_in_s
        self._taken_in_s = now_s
        if is_alone and not self._left and now_s - before_s < QUICK_S:
            self._rests_until_s = now_s + REST_S
        else:
            self.listen()

    def listen(self) -> None:
        """Have the main thread wait for messages from now on: a thread that could take some in goes to sleep."""
        self._rests_until_s = 0.0
        if self._is_resting:
            with contextlib.suppress(RuntimeError):  # another thread has just done it
                self._alarm.release()

    def serve(self, patience: Callable[[], float | None], look: Callable[[], None]) -> None:
        """Handle messages until the other side is gone. In the main thread.

        Args:
            patience: Returns how many seconds to wait for a message before ``look`` is called, ``None`` for ever.
            look: See ``patience``.
        """
        while True:
            self._rest()
            if not self._left and not self._channel.wait(patience()):
                look()
                continue
            with self._turn:
                if not self._left and not self._receive():  # another thread was faster
                    continue
                message = self._left.popleft()
                if message is None:
                    return
                if isinstance(message, BaseException):
                    raise message
                self._handle(*message)

    def _rest(self) -> None:
        """Sleep while another thread takes messages in."""
        self._is_resting = True  # before looking: who takes that back wakes us up
        while not self._left and (left_s := self._rests_until_s - time.monotonic()) > 0:
            self._alarm.acquire(timeout=left_s)
        self._is_resting = False

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
