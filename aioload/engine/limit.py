"""Limit: how many reads may be under way at once, decided from what the last few hundred milliseconds brought.

The storage is asked for more until more bring nothing. Where that is differs by a factor of hundreds: one read where
a disk's heads move, 256 where each waits for a distant server, and the interpreter lock, which every read needs for
some 15 us, sets a bound of its own. A moment's latency does not tell, as a read that waits for the lock and one that
waits for the storage look alike; the rate of reads does. So it is climbed: a move is kept if it pays, and taken back
if not. The shape is that of hill climbing on throughput, as in concurrency limits for servers; what a move must bring
follows from one utility, so that going up and going down never contradict each other. See :func:`gain`.

:mod:`~aioload.engine.tuner` works below it, on milliseconds: it decides how many of the threads that this limit allows
are awake, which is one where reads come from page cache.
"""

import math
from dataclasses import dataclass, replace

START = 16
"""Reads under way before anything is known of the storage."""

PRICE = 0.07
"""What reads under way cost: twice as many must bring 5 % more (2 ** 0.07)."""

STRIDE, SHORT_STRIDE = 2.0, math.sqrt(2)
"""The limit is multiplied by the one while it climbs, and by the other near the top."""

CLEAR = 1.15
"""A move that has brought so much, or cost so much, is decided by one window; others by more."""

MAX_TESTS = 3
"""Windows of a move's test."""

MIN_WINDOW_S, MAX_WINDOW_S, JOBS_PER_READ = 0.1, 2.0, 3
"""A window lasts for so many seconds and so many jobs per read under way, but not longer than that."""

REST_S, MAX_REST_S = 0.5, 8.0
"""Seconds between moves to either side of a limit that has stood its tests; twice as long each time it stands them."""

CHANGED = 1.3
"""A rate at rest that has become so many times higher or lower means that the storage has changed."""

BUSY = 0.85
"""If this part of the reads that may be under way is, they are what limits the rate."""

WAITING = 0.02
"""A consumer that waits for less than this part of the time has all it needs."""

SPARE = 2.0
"""The limit falls to so many times the reads that are under way on average, where the consumer does not wait."""

STEP_NOISE, MIN_STEPS = 1.15, 5
"""The consumer's step is taken to be slower if its median is so many times longer, over so many steps."""

TINY_STEP_S = 1e-4
"""Shorter steps are all the same."""

STALL_S, STALL_JOBS = 0.5, 4.0
"""Reads under way of which none ends for this many seconds, and for as long as so many take, have stalled."""

DOUBT_S = 0.25
"""What windows say of a change is believed when they have said so for this long: for less, it may be a moment in which
the machine was busy elsewhere, or the consumer was."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was read in a few hundred milliseconds under one limit.

    Attributes:
        num_jobs: Reads that ended.
        elapsed_s: How long it was.
        job_s: Seconds that these reads took, each by itself, in sum.
        wait_share: The part of the time for which a consumer waited for a batch, 0 to 1.
        step_s: The median time that a consumer took between a batch and asking for the next, 0 for unknown.
    """

    num_jobs: int
    elapsed_s: float
    job_s: float
    wait_share: float = 1.0
    step_s: float = 0.0

    @property
    def rate(self) -> float:
        """Reads per second."""
        return self.num_jobs / self.elapsed_s

    @property
    def concurrency(self) -> float:
        """Reads that were under way, on average."""
        return self.job_s / self.elapsed_s

    @property
    def mean_job_s(self) -> float:
        """Seconds that a read took."""
        return self.job_s / self.num_jobs if self.num_jobs else 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """What one limit is worth: its rate, and what the consumer's step and waiting were beside it."""

    limit: int
    rate: float
    step_s: float = 0.0
    wait_share: float = 1.0

    def and_(self, window: Window, num_windows: int) -> "Level":
        """Return the mean of ``num_windows`` windows and one more."""

        def mean(value: float, more: float) -> float:
            return value + (more - value) / (num_windows + 1)

        step_s = mean(self.step_s, window.step_s) if self.step_s and window.step_s else self.step_s or window.step_s
        wait_share = mean(self.wait_share, window.wait_share)
        return Level(self.limit, mean(self.rate, window.rate), step_s, wait_share)


def level_of(limit: int, window: Window) -> Level:
    """Return what ``limit`` was worth in one window."""
    return Level(limit, window.rate, window.step_s, window.wait_share)


@dataclass(frozen=True, slots=True)
class Climb:
    """Where the search for the limit stands.

    Attributes:
        limit: Reads that may be under way.
        here: What that is worth, by ``num_windows`` windows; ``None`` if unknown.
        num_windows: Windows under this limit so far, at most ``MAX_TESTS`` where it is at rest.
        rival: The level before a move that is being tested, or ``None``.
        stride: By how much the next move multiplies or divides the limit.
        upward: Whether the next move, or the one under test, goes up.
        num_failed: Moves in a row that were taken back; two of them are one to either side.
        next_move_s: No move begins before this time.
        rest_s: How long the limit rests when both sides have failed.
        doubt_s: For how long windows have told something else than those before.
    """

    limit: int
    here: Level | None = None
    num_windows: int = 0
    rival: Level | None = None
    stride: float = STRIDE
    upward: bool = True
    num_failed: int = 0
    next_move_s: float = 0.0
    rest_s: float = REST_S
    doubt_s: float = 0.0


def is_full(limit: int, num_jobs: int, elapsed_s: float) -> bool:
    """Whether so many jobs in so many seconds are enough of a window."""
    if elapsed_s >= MAX_WINDOW_S:
        return num_jobs > 0
    return elapsed_s >= MIN_WINDOW_S and num_jobs >= JOBS_PER_READ * limit


def settling_s(mean_job_s: float) -> float:
    """Return for how long what is read after a move says nothing: reads begun before are under way still."""
    return min(MAX_WINDOW_S, max(0.02, 1.5 * mean_job_s))


def is_stall(gap_s: float, mean_job_s: float) -> bool:
    """Whether a time in which nothing ended is the storage's standing still; ``mean_job_s`` is of before, 0 unknown."""
    return gap_s > STALL_S and gap_s > STALL_JOBS * mean_job_s > 0


def gain(before: Level, after: Level) -> float:
    """Return by how much ``after`` is better than ``before``: above 1 it is.

    That is the ratio of their rates, less the price of reads under way, less what the consumer's step has lost: a step
    that takes ``g`` times as long counts by the part of the consumer's time that the step is, since what goes on while
    it waits costs nothing.
    """
    price: float = (after.limit / before.limit) ** PRICE
    return after.rate / before.rate / price / _slowdown(before, after)


def resumed(climb: Climb) -> Climb:
    """Return where the search goes on in another pass: nothing is known of it yet, and a move under test is undone."""
    limit = climb.limit if climb.rival is None else climb.rival.limit
    return replace(climb, limit=limit, here=None, num_windows=0, rival=None, doubt_s=0.0)


def step(climb: Climb, maximum: int, window: Window, now_s: float) -> Climb:
    """Return where the search stands after ``window``, at the monotonic time ``now_s``.

    The limit is from 1 to ``maximum``, which may have become smaller.
    """
    if climb.limit > maximum:  # fewer threads can be had than thought
        return Climb(maximum, stride=SHORT_STRIDE, next_move_s=now_s)
    if climb.rival is not None and climb.rival.limit > maximum:  # nor can what the move down was from
        climb = replace(climb, rival=None)
    if window.concurrency < BUSY * climb.limit:
        return _relaxed(climb, window, now_s)
    here = climb.here
    if here is None:
        climb = replace(climb, here=level_of(climb.limit, window), num_windows=1, doubt_s=0.0)
    elif climb.rival is None and _has_changed(here, window):
        doubt_s = climb.doubt_s + window.elapsed_s
        if doubt_s < DOUBT_S:
            return replace(climb, doubt_s=doubt_s)
        climb = Climb(climb.limit, level_of(climb.limit, window), 1, upward=climb.upward, next_move_s=now_s)
    else:
        num_windows = min(climb.num_windows, MAX_TESTS)
        climb = replace(climb, here=here.and_(window, num_windows), num_windows=num_windows + 1, doubt_s=0.0)
    if climb.rival is not None:
        return _judged(climb, maximum, now_s)
    return _moved(climb, maximum) if now_s >= climb.next_move_s else climb


def _judged(climb: Climb, maximum: int, now_s: float) -> Climb:
    """Keep the move under test, take it back, or go on testing."""
    here, rival = climb.here, climb.rival
    assert here is not None
    assert rival is not None
    gained = gain(rival, here)
    if climb.num_windows < MAX_TESTS and 1 / CLEAR < gained < CLEAR:
        return climb
    if gained > 1:
        stride = STRIDE if gained >= CLEAR else climb.stride
        kept = replace(climb, rival=None, stride=stride, num_failed=0, rest_s=REST_S, next_move_s=now_s)
        return _moved(kept, maximum)
    return _taken_back(climb, maximum, now_s)


def _taken_back(climb: Climb, maximum: int, now_s: float) -> Climb:
    rival = climb.rival
    assert rival is not None
    num_failed = climb.num_failed + 1
    back = replace(
        climb,
        limit=rival.limit,
        here=rival,
        num_windows=1,
        rival=None,
        stride=SHORT_STRIDE,
        upward=not climb.upward,
        num_failed=num_failed,
        next_move_s=now_s + MIN_WINDOW_S,
    )
    if num_failed < 2 or not _is_move(back.limit, maximum):
        return back
    return replace(back, num_failed=0, next_move_s=now_s + climb.rest_s, rest_s=min(MAX_REST_S, 2 * climb.rest_s))


def _moved(climb: Climb, maximum: int) -> Climb:
    """Begin to test another limit: the next in the direction of the climb, or where there is none in the other."""
    for upward in (climb.upward, not climb.upward):
        limit = _next(climb.limit, climb.stride, maximum, upward=upward)
        if limit != climb.limit:
            return replace(climb, limit=limit, here=None, num_windows=0, rival=climb.here, upward=upward)
    return climb


def _relaxed(climb: Climb, window: Window, now_s: float) -> Climb:
    """Not all reads that may be under way are: more are of no use, and fewer will do if the consumer does not wait."""
    doubt_s = climb.doubt_s + window.elapsed_s
    if doubt_s < DOUBT_S:
        return replace(climb, doubt_s=doubt_s)
    if climb.rival is not None:
        limit = climb.rival.limit if climb.upward else climb.limit
        return Climb(limit, stride=SHORT_STRIDE, upward=climb.upward, next_move_s=now_s + REST_S, doubt_s=doubt_s)
    if window.wait_share > WAITING:
        return climb
    enough = max(1, math.ceil(SPARE * window.concurrency))
    limit = min(climb.limit, max(enough, int(climb.limit / SHORT_STRIDE)))
    if limit == climb.limit:
        return climb
    return Climb(limit, next_move_s=now_s, doubt_s=doubt_s)


def _has_changed(here: Level, window: Window) -> bool:
    return not here.rate / CHANGED < window.rate < here.rate * CHANGED


def _is_move(limit: int, maximum: int) -> bool:
    return any(_next(limit, SHORT_STRIDE, maximum, upward=upward) != limit for upward in (True, False))


def _next(limit: int, stride: float, maximum: int, *, upward: bool) -> int:
    if upward:
        return min(maximum, max(limit + 1, round(limit * stride)))
    return max(1, min(limit - 1, round(limit / stride)))


def _slowdown(before: Level, after: Level) -> float:
    if not before.step_s or not after.step_s:
        return 1.0
    growth = max(TINY_STEP_S, after.step_s) / max(TINY_STEP_S, before.step_s)
    if 1 / STEP_NOISE < growth < STEP_NOISE:
        return 1.0
    if growth < 1:
        return 1 / _slowdown(after, before)
    return 1 + (growth - 1) * (1 - before.wait_share)
