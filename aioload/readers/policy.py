"""Policy: which reads are tried again when they fail, how often, and after how long."""

import asyncio
import contextlib
import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aioload.arguments import whole_number
from aioload.errors import ArgumentError
from aioload.readers.hedge import Hedge, hedge_or_none
from aioload.stats import Tally

T = TypeVar("T")

# What a storage says when it, or the way to it, was in trouble for a moment. ESTALE: another client has replaced the
# file, and opening it by its path again finds the new one. ENFILE and EMFILE pass when others close theirs.
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EBUSY", "EINTR", "EIO", "EMFILE", "ENFILE", "ENOLINK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET"),
        *("ENETUNREACH", "EPIPE"),
    )
    if hasattr(errno, name)
)

LONGEST_ASKED_S = 600.0
"""Who asks to be left alone for longer is not waited for."""

_jitter = random.Random()  # of its own: whoever seeds Python's generator gets the numbers it expects


def passes(exc: Exception) -> bool:
    """Whether a read that failed with ``exc`` may succeed a little later.

    True of I/O errors, stale handles, time-outs, lost connections and a lack of file handles; False of files that are
    not there, or may not be read, and of all that is no ``OSError``.
    """
    return isinstance(exc, ConnectionError | TimeoutError) or (isinstance(exc, OSError) and exc.errno in _PASSING)


def asked_for_s(exc: Exception) -> float:
    """Return how many seconds ``exc`` asks to be left alone for: its ``retry_after_s``, if that is such a number."""
    seconds: Any = getattr(exc, "retry_after_s", None)
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < float("inf"):
        return float(seconds)
    return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """What is done about reads that fail.

    A read is tried again after a pause drawn at random from 0 to ``backoff_s`` seconds, 0 to twice that before
    the next time, and so on up to ``max_backoff_s``: so that many readers do not come back at the same moment. An
    error with a ``retry_after_s``, in seconds, makes the pause at least that long, beyond ``max_backoff_s`` too; that
    is what a server asked for (``Retry-After``), where the reader learns of it. More than 600 seconds are not waited
    for. The reading thread pauses; others go on. When no try is left, the last error is that of the sample.

    Attributes:
        retries: How often a read is tried again; 0 for never.
        backoff_s: The longest first pause, in seconds.
        max_backoff_s: The longest pause of all, in seconds, but for ``retry_after_s``.
        retry_on: Whether a read that failed with this exception is worth another try.
        timeout_s: How long one try may last, in seconds; ``None`` for any time. Then it is given up, which counts as a
            :class:`~aioload.errors.ReadTimeoutError`, and tried again like others. A blocked read cannot be called
            back: its thread stays until the storage answers, another takes its place, and as many as there are
            concurrent reads may be stuck at once; beyond, reads that time out fail at once. An async reader's
            coroutine is cancelled. (Nothing watches a blocking read with ``num_workers=0``.)
        hedge: Whether, and when, a read that lasts long gets a second one beside it; ``True`` for a
            :class:`~aioload.readers.Hedge` with its defaults.

    Raises:
        ArgumentError: A value cannot work.
    """

    retries: int = 3
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    retry_on: Callable[[Exception], bool] = passes
    timeout_s: float | None = None
    hedge: Hedge | bool | None = None

    def __post_init__(self) -> None:
        whole_number("retries", self.retries, 0)
        hedge_or_none(self.hedge)
        timeout_s: Any = self.timeout_s
        if timeout_s is not None and (
            isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf")
        ):
            message = f"timeout_s must be a number of seconds above 0, or None for any time; got {timeout_s!r}."
            raise ArgumentError(message)
        for name in ("backoff_s", "max_backoff_s"):
            seconds: Any = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
                message = f"{name} must be a number of seconds from 0 up; got {seconds!r}."
                raise ArgumentError(message)
        retry_on: Any = self.retry_on
        if isinstance(retry_on, type) or not callable(retry_on):  # a class would make an instance, which is true
            message = (
                "retry_on must be a function that is given the exception and returns whether to try again, such as "
                f"lambda exc: isinstance(exc, OSError); got {retry_on!r}."
            )
            raise ArgumentError(message)

    @property
    def hedge_or_none(self) -> Hedge | None:
        """How slow reads are raced, ``None`` if they are not."""
        return hedge_or_none(self.hedge)

    @property
    def is_watched(self) -> bool:
        """Whether somebody must look after reads that last long."""
        return self.timeout_s is not None or self.hedge_or_none is not None

    def pause_s(self, number: int) -> float:
        """Return how long to wait before try ``number`` again, counted from 0, in seconds; another time each time."""
        # The exponent is bounded since floats are.
        return _jitter.uniform(0, min(self.max_backoff_s, self.backoff_s * 2.0 ** min(number, 60)))

    def try_again(self, read: Callable[[], T], exc: Exception, pause: Callable[[float], bool]) -> T:
        """Repeat a read that has failed, as often as it is worth it.

        Args:
            read: The read.
            exc: What it raised.
            pause: Waits for so many seconds, and returns whether to go on; else ``exc`` is raised. Called before
                each try.

        Raises:
            Exception: What the last try raised, with a note of how many there were.
        """
        tries = Tries(self)
        try:
            while pause(tries.next_pause_s(exc)):
                try:
                    return read()
                except Exception as other:
                    exc = other
            raise exc
        finally:
            del exc  # its traceback has this frame: without it, what the consumer lets go of is gone at once

    async def try_again_async(self, read: Callable[[], Awaitable[T]], exc: Exception, tally: Tally) -> T:
        """As :meth:`try_again`, for a coroutine, which can be cancelled in any pause; ``tally`` counts the tries."""
        tries = Tries(self)
        try:
            while True:
                await asyncio.sleep(tries.next_pause_s(exc))
                tally.retries += 1
                try:
                    return await read()
                except Exception as other:
                    exc = other
        finally:
            del exc


class Tries:
    """Those of one read."""

    def __init__(self, policy: ReadPolicy) -> None:
        self._policy, self._number = policy, 0

    def next_pause_s(self, exc: Exception) -> float:
        """Return how long to wait before another try, or raise ``exc`` if there is to be none."""
        number, self._number = self._number, self._number + 1
        asked_s = asked_for_s(exc)
        if number < self._policy.retries and asked_s <= LONGEST_ASKED_S and self._policy.retry_on(exc):
            return max(self._policy.pause_s(number), asked_s)
        if number > 0:
            with contextlib.suppress(Exception):  # an exception may refuse notes
                exc.add_note(f"It was read {number + 1} times.")
        try:
            raise exc
        finally:
            del exc


def policy_or_default(read: Any) -> ReadPolicy:
    """Return a loader's policy, the default one for ``None``.

    Raises:
        ArgumentError: It is something else.
    """
    if read is None:
        return ReadPolicy()
    if not isinstance(read, ReadPolicy):
        message = f"read must be a ReadPolicy; got {read!r}."
        raise ArgumentError(message)
    return read
