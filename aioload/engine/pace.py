"""Pace: how long the latest reads took, and how many second reads they have earned."""

import math

LEAST_READS = 40
"""So many reads must have been seen before one is called slow."""

_KEPT_READS = 2000
"""The estimate is of about so many of the latest reads: older ones lose half of their weight each time."""

_SHORTEST_S, _RATIO, _NUM_BUCKETS = 1e-6, 1.1, 256  # up to 1e-6 * 1.1**256 = 40,000 s, to 10 %
_PER_LOG = 1 / math.log(_RATIO)

_STALE_AFTER_READS = 16
"""A quantile takes 10 us to find, and is asked for once for each read under way: it is found anew after so many."""

_BURST = 32
"""Second reads that a long time without any can have saved up."""


class Pace:
    """What a loader's reads have shown. Any thread may call any method.

    No lock: where two threads count at the same time, one read may be lost, and the estimate does not suffer.
    """

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._num_counted = 0
        self._num_earning = 0  # reads that have earned a share of a second read
        self._num_spent = 0.0
        self._found: dict[float, tuple[int, float]] = {}  # by the share: at which read, and what

    def note(self, elapsed_s: float) -> None:
        """Count a read that took ``elapsed_s`` seconds."""
        bucket = int(math.log(max(elapsed_s, _SHORTEST_S) / _SHORTEST_S) * _PER_LOG)
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += 1
        self._num_counted += 1
        self._num_earning += 1
        if self._num_counted >= _KEPT_READS:
            self._counts = [count // 2 for count in self._counts]
            self._num_counted = sum(self._counts)

    def quantile_s(self, share: float) -> float | None:
        """Return how long the quickest ``share`` of the latest reads took at most, to 10 %; ``None`` of too few."""
        found_at, found_s = self._found.get(share, (-_STALE_AFTER_READS, 0.0))
        if self._num_earning - found_at < _STALE_AFTER_READS:
            return found_s
        counts = self._counts
        total = sum(counts)
        if total < LEAST_READS:
            return None
        wanted = math.ceil(share * total)
        bucket = 0
        for bucket, count in enumerate(counts):  # noqa: B007  # it is where the sum gets there
            wanted -= count
            if wanted <= 0:
                break
        found_s = float(_SHORTEST_S * _RATIO ** (bucket + 1))
        self._found[share] = self._num_earning, found_s
        return found_s

    def take(self, max_share: float) -> bool:
        """Take a second read from what the reads have earned, ``max_share`` each; return whether there was one."""
        earned = max_share * self._num_earning
        self._num_spent = max(self._num_spent, earned - _BURST)
        if earned - self._num_spent < 1:
            return False
        self._num_spent += 1
        return True
