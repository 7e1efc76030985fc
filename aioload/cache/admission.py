"""Admission: what has to go from a full cache for what comes, and what may stay.

A pass over the data asks for each key once. Where there are more keys than the cache holds, each new one that takes the
place of an old one takes it from one that was going to be asked for: least-recently-used caches come to a hit rate of
0 when the order is always the same, and of 15 % where half of a shuffled set fits. So what is there stays, and half of
the set is half of the hits; only what nobody asks for any more has to go. How long is that? Longer than the keys that
are asked for take to come again, which is learnt from a sample of them, those that were not kept included.
"""

import math
from typing import Any

from aioload.cache.lock import Lock

_MOST_SAMPLED = 1024
_LEAST_SAMPLED = 16

_SHARE_AGAIN = 0.75
"""A round is over when this share of the keys seen in it has been seen twice: after 1.7 to 2 passes over the data,
shuffled or not, wherever it began."""

_FIRST_PATIENCE = 3
"""A sample that was begun with a pass is through in twice the time that its first key took to come again."""

_MOST_LOOKS_SKIPPED = 64


class Admission:
    """Says what may go. Any thread may call any method.

    Times are on one clock, of the caller's: seconds, or the number of keys asked for.

    Args:
        now: The time at which keys begin to be noted. What was used last before it counts as used then.
        slack: What is not asked for during so many rounds may go. A key of a shuffled set may have to wait for two
            passes, so that 1.25 rounds are enough where all passes take equally long.

    Attributes:
        mask: Keys with ``hash(key) & mask == 0`` are to be noted, and no others.
    """

    def __init__(self, now: float, slack: float) -> None:
        self.mask = 0
        self._lock = Lock()
        self._start = self._began = now
        self._patience, self._slack = math.inf, slack  # until a first key has come again
        self._round: float | None = None  # how long the last one took
        self._came_again: dict[Any, bool] = {}
        self._num_again = 0
        self._skip, self._skipped = 0, 0

    def note(self, key: Any, now: float) -> None:
        """Take notice that a key of the sample is asked for."""
        with self._lock:
            if now - self._began > self._patience:  # these do not come again, or take longer
                if self._round is not None:
                    self._round = max(self._round, now - self._began)
                self._begin(now, 2 * self._patience)
            again = self._came_again.get(key)
            if again is None:
                self._came_again[key] = False
                if len(self._came_again) > _MOST_SAMPLED:
                    self._thin_out()
            elif not again:
                self._came_again[key] = True
                self._num_again += 1
                if self._patience == math.inf:
                    self._patience = _FIRST_PATIENCE * (now - self._began)
                if _LEAST_SAMPLED <= len(self._came_again) <= self._num_again / _SHARE_AGAIN:
                    self._round = now - self._began
                    self._begin(now, self._slack * self._round)

    def may_go(self, last_used: float, now: float) -> bool:
        """Whether what was last used then is not asked for any more."""
        length = self._round
        if length is None:
            return False
        return now - max(last_used, self._start) > self._slack * max(length, now - self._began)

    def is_worth_a_look(self) -> bool:
        """Whether to look for what may go, now that there is no room; seldom where it was in vain."""
        if self._round is None:
            return False
        with self._lock:
            self._skipped += 1
            return self._skipped > self._skip

    def looked(self, *, found: bool) -> None:
        """Take notice of whether a look found something."""
        with self._lock:
            self._skip = 0 if found else min(2 * self._skip + 1, _MOST_LOOKS_SKIPPED)
            self._skipped = 0

    def _begin(self, now: float, patience: float) -> None:
        self._began, self._patience = now, patience
        self._came_again.clear()
        self._num_again = 0
        self.mask >>= 2  # the keys may be fewer by now

    def _thin_out(self) -> None:
        self.mask = 2 * self.mask + 1
        self._came_again = {key: again for key, again in self._came_again.items() if hash(key) & self.mask == 0}
        self._num_again = sum(self._came_again.values())
