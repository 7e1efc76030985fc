"""Race: the attempts at one read, on one or more threads, of which one counts.

::

              first success, or the last failure
    RUNNING --------------------------------------> OVER

An attempt that has been given up, since it lasts too long, has failed; its thread may come back with the data all the
same, and is welcome as long as the race runs.
"""

import threading
from typing import Any

from aioload.readers.policy import Tries


class Overtaken(BaseException):  # no error, and nothing may take it for one
    """Another attempt has settled the sample, or will: there is nothing left to do for this one."""


class Attempt:
    """One call of the reader, on one thread.

    Attributes:
        race: What it is part of.
        started_s: When it began, by the performance counter.
        is_ended: Whether the call has returned.
        is_set_aside: Whether another thread works in the place of this one.
        is_given_up: Whether nobody waits for it any more.
    """

    __slots__ = ("is_ended", "is_given_up", "is_set_aside", "race", "started_s")

    def __init__(self, race: "Race", started_s: float) -> None:
        self.race, self.started_s = race, started_s
        self.is_ended = self.is_set_aside = self.is_given_up = False


class Race:
    """The attempts at the read of one sample. Any thread may call any method.

    Args:
        owner: Who reads, and says what is slow.
        batch: The sample's batch.
        position: Its position there.
        location: What is read.
        tries: How often it may be.
        claimed: Bytes that have been counted for it: once, however many attempts there are. They are for who settles
            the sample, as nobody knows when the others come back.
    """

    __slots__ = (
        "_lock",
        "_num_runners",
        "_tries",
        "batch",
        "claimed",
        "is_hedged",
        "is_over",
        "location",
        "owner",
        "position",
    )

    def __init__(self, owner: Any, batch: Any, position: int, location: Any, tries: Tries, claimed: int = 0) -> None:
        self.owner, self.batch, self.position, self.location = owner, batch, position, location
        self.claimed = claimed
        self.is_over = self.is_hedged = False
        self._tries = tries
        self._num_runners = 1  # threads, or jobs on their way to one, that try and have not been given up
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer.
        self._lock = threading.RLock()

    def give_back(self) -> None:
        """Have its bytes counted no longer: it is over, and the sample has not been read."""
        if self.claimed:
            self.batch.claim.give_raw(self.claimed)

    def enter(self) -> bool:
        """Have one more thread run; ``False`` if it is over."""
        with self._lock:
            if self.is_over:
                return False
            self._num_runners += 1
            return True

    def win(self) -> bool:
        """Return whether the caller is the first, and so the one who settles the sample."""
        with self._lock:
            was_over, self.is_over = self.is_over, True
            return not was_over

    def leave(self) -> bool:
        """Have a thread stop to try; return whether its failure is that of the sample: no other is left."""
        with self._lock:
            self._num_runners -= 1
            return self._num_runners == 0 and self.win()

    def pause_s(self, exc: Exception) -> float:
        """Return how long to wait before the next attempt, or raise ``exc`` if there is to be none."""
        with self._lock:
            return self._tries.next_pause_s(exc)

    def end(self, attempt: Attempt) -> bool:
        """Note that a call has returned; return whether its thread had been set aside."""
        with self._lock:
            attempt.is_ended = True
            return attempt.is_set_aside

    def set_aside(self, attempt: Attempt) -> bool:
        """Have the thread of ``attempt`` set aside; ``False`` if the call has returned, or it has been already."""
        with self._lock:
            if attempt.is_ended or attempt.is_set_aside:
                return False
            attempt.is_set_aside = True
            return True

    def give_up(self, attempt: Attempt) -> bool:
        """Wait for ``attempt`` no more; ``False`` if nobody did, or the call has returned."""
        with self._lock:
            if self.is_over or attempt.is_ended or attempt.is_given_up:
                return False
            attempt.is_given_up = True
            return True
