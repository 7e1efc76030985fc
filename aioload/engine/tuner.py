"""Tuner: how many threads of a pool should be awake, decided from what the last few milliseconds brought.

A read from page cache takes 10 us, and each of its system calls gives up the interpreter lock and must win it
back. Threads then only take the lock from each other: 20,000 files of 4 KB load at 75,000/s on one thread,
50,000/s on two and 15,000/s on 32. A read that takes milliseconds needs all the threads there are. How long a
job took does not tell the two apart once threads contend; the rate of jobs does. So where the lock could be what
is short, a move is kept only if the rate got better.
"""

import math
from dataclasses import dataclass, replace

TINY_JOB_S = 50e-6
"""A pool whose mean job is shorter gains nothing from a second thread."""

LONG_JOB_S = 300e-6
"""A pool whose mean job is longer, on few threads, gains from every thread."""

SUSPECT_RATE = 5000.0
"""Jobs per second from which on the interpreter lock may be what is short, so that moves are put to the test."""

GAIN = 1.2
"""More threads must bring this much more; fewer threads only no less."""

SLOW_WINDOWS = 3
"""A thread that works alone gets company when so many windows in a row have said that it would pay: one alone may be a
moment in which a virtual machine, or the file's disk, was busy elsewhere."""

HOLD_S = 1.0
"""Seconds for which the outcome of a test stands."""

MIN_WINDOW_S, MIN_WINDOW_JOBS, MAX_WINDOW_S = 0.005, 8, 0.025
"""A window lasts until it has so many jobs and seconds, or any job and so many seconds more."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a pool did for a few milliseconds. ``saturated``: there was always another job queued."""

    num_jobs: int
    elapsed_s: float
    mean_job_s: float
    saturated: bool

    @property
    def is_full(self) -> bool:
        """Whether it says enough to decide from."""
        if self.elapsed_s >= MAX_WINDOW_S:
            return self.num_jobs > 0
        return self.elapsed_s >= MIN_WINDOW_S and self.num_jobs >= MIN_WINDOW_JOBS


@dataclass(frozen=True, slots=True)
class Tuning:
    """Where a pool's tuning stands.

    Attributes:
        limit: Threads that may be awake.
        rival_limit: The limit before a move that is being tested, or 0.
        rival_rate: Jobs per second under that limit.
        hold_until_s: No test begins before this time ...
        tries_fewer: ... but one of fewer threads, since more have brought nothing.
        num_slow: Windows in a row that have spoken for more than one thread.
    """

    limit: int
    rival_limit: int = 0
    rival_rate: float = 0.0
    hold_until_s: float = 0.0
    tries_fewer: bool = False
    num_slow: int = 0


def step(tuning: Tuning, size: int, window: Window, now_s: float) -> Tuning:
    """Return the tuning after ``window``, for a pool of ``size`` threads, at the monotonic time ``now_s``."""
    rate = window.num_jobs / window.elapsed_s
    if tuning.rival_limit and window.saturated:
        needed = tuning.rival_rate * (GAIN if tuning.limit > tuning.rival_limit else 1.0)
        if rate < needed:
            tries_fewer = tuning.limit > tuning.rival_limit > 1
            return Tuning(tuning.rival_limit, hold_until_s=now_s + HOLD_S, tries_fewer=tries_fewer)
        rest_s = 0.0 if tuning.limit > tuning.rival_limit else HOLD_S
        tuning = Tuning(tuning.limit, hold_until_s=now_s + rest_s)
    suspect = is_suspect(tuning.limit, window)
    if window.mean_job_s < TINY_JOB_S or (suspect and not window.saturated):  # some had nothing to do
        return replace(tuning, limit=max(1, tuning.limit // 2), rival_limit=0, num_slow=0)  # fewer will do as well
    if not window.saturated:
        return tuning
    if tuning.tries_fewer and suspect:
        return _moved(tuning, 1, rate, test=True)
    if tuning.limit < size and now_s >= tuning.hold_until_s:
        if tuning.limit == 1 and tuning.num_slow + 1 < SLOW_WINDOWS:
            return replace(tuning, num_slow=tuning.num_slow + 1)
        limit = size if window.mean_job_s >= LONG_JOB_S else min(size, tuning.limit * 2)
        return _moved(tuning, limit, rate, test=suspect)
    if tuning.limit > 1 and suspect and now_s >= tuning.hold_until_s:
        return _moved(tuning, 1, rate, test=True)
    return tuning


def widened(tuning: Tuning, size: int, window: Window) -> Tuning:
    """Return the tuning of a pool whose threads seem to be stuck, ``window`` being what it has done lately.

    All may work. Where few did much a moment ago that is put to the test: the machine may have been stuck, not they.
    """
    rate = window.num_jobs / window.elapsed_s
    return _moved(tuning, size, rate, test=is_suspect(tuning.limit, window))


def is_suspect(limit: int, window: Window) -> bool:
    """Whether the interpreter lock may be what is short, where ``limit`` threads are awake."""
    # A storage answers many reads in one moment, and then none for long. How many it answers on the whole is told by
    # how long each read took: so many threads do no more than that.
    rate = min(window.num_jobs / window.elapsed_s, limit / window.mean_job_s if window.mean_job_s else math.inf)
    return rate > SUSPECT_RATE


def usual(usual_job_s: float, mean_job_s: float) -> float:
    """Return what a job usually takes, after a window of such a mean: a few jobs that take far longer do not count.

    It falls at once, and rises slowly.
    """
    return min(mean_job_s, 1.1 * usual_job_s) if usual_job_s else mean_job_s


def smoothed(average_s: float | None, sample_s: float) -> float:
    """Return the moving average with one more sample; the first sample stands for itself."""
    return sample_s if average_s is None else average_s + 0.25 * (sample_s - average_s)


def _moved(tuning: Tuning, limit: int, rate: float, *, test: bool) -> Tuning:
    if not test:
        return replace(tuning, limit=limit, rival_limit=0, tries_fewer=False, num_slow=0)
    return replace(tuning, limit=limit, rival_limit=tuning.limit, rival_rate=rate, tries_fewer=False, num_slow=0)
