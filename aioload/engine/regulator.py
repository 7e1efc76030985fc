"""Regulator: measures what reads under the present limit bring, and has the limit decided anew."""

import statistics
from dataclasses import replace

from aioload.engine import tuner
from aioload.engine.demand import Demand
from aioload.engine.limit import MIN_STEPS, START, Climb, Window, is_full, is_stall, resumed, settling_s, step

MAX_READS = 256
"""Reads that are never exceeded: a thread of each takes memory, and part of the interpreter's time."""

_SPARE_HANDLES = 64
"""File handles that are left to the rest of the process, or half if there are fewer than twice as many; of the others,
reads take half at most."""


def most_reads(num_handles: int | None) -> int:
    """Return the reads that may ever be under way, in a process that may have so many files open; ``None`` any."""
    if num_handles is None:
        return MAX_READS
    return max(1, min(MAX_READS, (num_handles - min(_SPARE_HANDLES, num_handles // 2)) // 2))


def allowed_handles() -> int | None:
    """Return how many files this process may have open, ``None`` where the system does not say."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


class Regulator:
    """The limit of the reads of one pool, and what consumers make of them.

    One thread at a time calls :meth:`note` and :meth:`lower_maximum`; any may read ``limit``.

    Args:
        maximum: What the limit never exceeds.
        before: The regulator of the pass before, whose limit this one goes on with.
    """

    def __init__(self, maximum: int, before: "Regulator | None" = None) -> None:
        self.maximum = maximum
        self.demand = Demand()
        climb: Climb = Climb(START) if before is None else resumed(before.climb)
        self.climb: Climb = replace(climb, limit=min(maximum, climb.limit))
        self.usual_job_s: float = 0.0 if before is None else before.usual_job_s
        """Seconds that a read took in the latest full window, 0 if there was none."""
        self._settled_s = self._started = self._elapsed_s = self._job_s = self._waited_s = 0.0
        self._num_jobs = 0

    def __repr__(self) -> str:
        return f"<Regulator {self.limit} of {self.maximum}>"

    @property
    def limit(self) -> int:
        """Reads that may be under way."""
        return self.climb.limit

    def note(self, window: tuner.Window, now_s: float) -> bool:
        """Take in what was done in the time up to ``now_s``, all of it under the limit; return whether that changes."""
        job_s = self.usual_job_s or window.mean_job_s
        if window.saturated and is_stall(window.elapsed_s, job_s):
            self._settled_s = now_s + settling_s(job_s)
            self._num_jobs = 0
        if now_s - window.elapsed_s < self._settled_s:
            return False
        if not self._num_jobs:
            self._begin(now_s - window.elapsed_s)
        self._num_jobs += window.num_jobs
        self._elapsed_s += window.elapsed_s
        self._job_s += window.num_jobs * window.mean_job_s
        if not is_full(self.limit, self._num_jobs, self._elapsed_s):
            return False
        before = self.limit
        whole = self._window(now_s)
        self.usual_job_s = whole.mean_job_s
        self.climb = step(self.climb, self.maximum, whole, now_s)
        self._num_jobs = 0
        if self.limit == before:
            return False
        self._settled_s = now_s + settling_s(whole.mean_job_s)
        return True

    def _begin(self, now_s: float) -> None:
        self._num_jobs, self._elapsed_s, self._job_s = 0, 0.0, 0.0
        self._started, self._waited_s = now_s, self.demand.waited_s(now_s)
        self.demand.take_steps()

    def _window(self, now_s: float) -> Window:
        steps = self.demand.take_steps()
        waited_s = self.demand.waited_s(now_s) - self._waited_s
        return Window(
            self._num_jobs,
            self._elapsed_s,
            self._job_s,
            wait_share=min(1.0, waited_s / max(1e-9, now_s - self._started)),
            step_s=statistics.median(steps) if len(steps) >= MIN_STEPS else 0.0,
        )
