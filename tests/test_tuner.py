"""The tuner against models of storage: how many threads it lets work, and how soon.

A model tells the jobs per second, and the seconds a job takes, of so many threads. No clock is involved.
"""

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioload.engine import tuner
from aioload.engine.tuner import Tuning, Window

Model: TypeAlias = Callable[[int], tuple[float, float]]

SIZE = 32


def from_cache(limit: int) -> tuple[float, float]:
    """Reads of 13 us that all need the interpreter lock, which costs more the more threads want it."""
    lock_s = 13.3e-6 * limit**0.46  # 75,000/s on one thread, 55,000/s on two, 15,000/s on 32
    return 1 / lock_s, limit * lock_s


def after(latency_s: float) -> Model:
    """Reads that wait, side by side, and need the interpreter lock for 15 us each."""

    def model(limit: int) -> tuple[float, float]:
        rate = min(limit / latency_s, 1 / 15e-6)
        return rate, limit / rate

    return model


def on_cores(job_s: float, cores: int) -> Model:
    """Decoding that gives up the interpreter lock."""

    def model(limit: int) -> tuple[float, float]:
        rate = min(limit, cores) / job_s
        return rate, limit / rate

    return model


def simulate(
    model: Callable[[float], Model], *, size: int, start: int, seconds: float, noise: float = 0.0, seed: int = 0
) -> list[tuple[float, int]]:
    """Return the limit after each window, with the time; ``model`` is given the time."""
    generator = random.Random(seed)
    tuning, now_s = Tuning(start), 0.0
    limits = [(now_s, start)]
    while now_s < seconds:
        rate, job_s = model(now_s)(tuning.limit)
        factor = math.exp(generator.gauss(0, noise))
        rate, job_s = rate * factor, job_s / factor
        elapsed_s = max(tuner.MIN_WINDOW_S, tuner.MIN_WINDOW_JOBS / rate)
        if elapsed_s > tuner.MAX_WINDOW_S:
            elapsed_s = max(tuner.MAX_WINDOW_S, 1 / rate)
        now_s += elapsed_s
        window = Window(max(1, int(rate * elapsed_s)), elapsed_s, job_s, saturated=True)
        tuning = tuner.step(tuning, size, window, now_s)
        assert 1 <= tuning.limit <= size
        limits.append((now_s, tuning.limit))
    return limits


def share(limits: list[tuple[float, int]], good: range, since_s: float = 0.0) -> float:
    """Return the part of the time for which the limit was a good one."""
    spans = [(end - start, limit in good) for (start, limit), (end, _) in pairwise(limits) if start >= since_s]
    return sum(span for span, is_good in spans if is_good) / sum(span for span, _ in spans)


MODELS: dict[str, tuple[Model, int, range]] = {
    "page cache": (from_cache, SIZE, range(1, 2)),
    "1 ms": (after(1e-3), SIZE, range(SIZE, SIZE + 1)),
    "7 ms": (after(7e-3), SIZE, range(SIZE, SIZE + 1)),
    "100 ms": (after(0.1), SIZE, range(SIZE, SIZE + 1)),
    # 14 threads are as fast as 32.
    "200 us": (after(2e-4), SIZE, range(14, SIZE + 1)),
    "JPEG on two cores": (on_cores(2e-3, 2), 2, range(2, 3)),
    "JPEG on one core": (on_cores(2e-3, 1), 1, range(1, 2)),
}
every_model = pytest.mark.parametrize(("model", "size", "good"), MODELS.values(), ids=MODELS)


@every_model
def test_the_right_limit_is_found_in_few_windows_from_any_start(model: Model, size: int, good: range) -> None:
    for start in (1, size):  # pools begin with either
        limits = simulate(lambda _: model, size=size, start=start, seconds=10)
        assert any(limit in good for _, limit in limits[:10])
        assert share(limits[10:], good) > 0.95


@every_model
def test_noise_does_not_mislead_it_for_long(model: Model, size: int, good: range) -> None:
    for seed in range(5):
        limits = simulate(lambda _: model, size=size, start=1, seconds=20, noise=0.1, seed=seed)
        assert share(limits, good) > 0.95


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_follows_storage_that_changes(noise: float) -> None:
    slow = after(7e-3)
    for seed in range(5):
        warming = simulate(
            lambda now_s: slow if now_s < 5 else from_cache, size=SIZE, start=1, seconds=10, noise=noise, seed=seed
        )
        assert share([each for each in warming if each[0] < 5], range(SIZE, SIZE + 1)) > 0.9
        assert share(warming, range(1, 2), since_s=5.1) > 0.9
        cooling = simulate(
            lambda now_s: from_cache if now_s < 5 else slow, size=SIZE, start=1, seconds=10, noise=noise, seed=seed
        )
        assert share([each for each in cooling if each[0] < 5], range(1, 2)) > 0.9
        assert share(cooling, range(SIZE, SIZE + 1), since_s=5.1) > 0.9


@given(
    limit=st.integers(1, SIZE),
    rival_limit=st.integers(0, SIZE),
    rival_rate=st.floats(0, 1e6),
    hold_until_s=st.floats(0, 10),
    num_jobs=st.integers(1, 10**6),
    elapsed_s=st.floats(1e-3, 10),
    mean_job_s=st.floats(1e-7, 10),
    saturated=st.booleans(),
    now_s=st.floats(0, 10),
)
def test_the_limit_stays_between_one_thread_and_all(
    limit: int,
    rival_limit: int,
    rival_rate: float,
    hold_until_s: float,
    num_jobs: int,
    elapsed_s: float,
    mean_job_s: float,
    saturated: bool,
    now_s: float,
) -> None:
    tuning = Tuning(limit, rival_limit, rival_rate, hold_until_s)
    after_step = tuner.step(tuning, SIZE, Window(num_jobs, elapsed_s, mean_job_s, saturated), now_s)
    assert 1 <= after_step.limit <= SIZE


def test_a_window_is_full_with_some_jobs_and_some_time_or_any_job_and_more_time() -> None:
    def is_full(num_jobs: int, elapsed_s: float) -> bool:
        return Window(num_jobs, elapsed_s, 0.001, saturated=True).is_full

    assert is_full(8, 0.005)
    assert not is_full(7, 0.005)
    assert not is_full(1000, 0.004)
    assert is_full(1, 0.025)
    assert not is_full(0, 10.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_a_moving_average_stays_among_its_samples(samples: list[float]) -> None:
    average: float | None = None
    for sample in samples:
        average = tuner.smoothed(average, sample)
    assert average is not None
    assert min(samples) - 1e-9 <= average <= max(samples) + 1e-9
