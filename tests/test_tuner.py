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


def efficiency(limits: list[tuple[float, int]], model: Model, size: int, since_s: float = 0.0) -> float:
    """Return the jobs done since then, over those that the best limit would have brought."""
    spans = [(end - start, limit) for (start, limit), (end, _) in pairwise(limits) if start >= since_s]
    best = max(model(limit)[0] for limit in range(1, size + 1))
    return sum(span * model(limit)[0] for span, limit in spans) / (best * sum(span for span, _ in spans))


MODELS: dict[str, tuple[Model, int]] = {
    "page cache": (from_cache, SIZE),
    "200 us": (after(2e-4), SIZE),
    "1 ms": (after(1e-3), SIZE),
    "7 ms": (after(7e-3), SIZE),
    "100 ms": (after(0.1), SIZE),
    "JPEG on two cores": (on_cores(2e-3, 2), 2),
    "JPEG on one core": (on_cores(2e-3, 1), 1),
    "pure Python": (on_cores(5e-3, 1), 2),
}
every_model = pytest.mark.parametrize(("model", "size"), MODELS.values(), ids=MODELS)


@every_model
def test_a_good_limit_is_found_in_few_windows(model: Model, size: int) -> None:
    best = max(model(limit)[0] for limit in range(1, size + 1))
    for start in (1, size):  # as pools begin
        limits = simulate(lambda _: model, size=size, start=start, seconds=10)
        assert any(model(limit)[0] > best / tuner.GAIN for _, limit in limits[:7])
        assert efficiency(limits[7:], model, size) > 0.95


@every_model
@pytest.mark.parametrize("start", [2, 8, 32])
def test_wherever_it_is_it_finds_out(start: int, model: Model, size: int) -> None:
    """Also down, where it has got to several threads in a moment of noise and more of them bring nothing."""
    limits = simulate(lambda _: model, size=size, start=min(start, size), seconds=10)
    assert efficiency(limits, model, size) > 0.95


@every_model
def test_noise_does_not_mislead_it_for_long(model: Model, size: int) -> None:
    for seed in range(5):
        limits = simulate(lambda _: model, size=size, start=1, seconds=20, noise=0.1, seed=seed)
        assert efficiency(limits, model, size) > 0.95


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_follows_storage_that_changes(noise: float) -> None:
    slow = after(7e-3)
    for before, then in ((slow, from_cache), (from_cache, slow)):
        for seed in range(5):
            limits = simulate(
                lambda now_s, before=before, then=then: before if now_s < 5 else then,  # type: ignore[misc]
                size=SIZE,
                start=1,
                seconds=10,
                noise=noise,
                seed=seed,
            )
            assert efficiency([each for each in limits if each[0] < 5], before, SIZE) > 0.95
            assert efficiency(limits, then, SIZE, since_s=5.1) > 0.95


@given(
    limit=st.integers(1, SIZE),
    rival_limit=st.integers(0, SIZE),
    rival_rate=st.floats(0, 1e6),
    hold_until_s=st.floats(0, 10),
    tries_fewer=st.booleans(),
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
    tries_fewer: bool,
    num_jobs: int,
    elapsed_s: float,
    mean_job_s: float,
    saturated: bool,
    now_s: float,
) -> None:
    tuning = Tuning(limit, rival_limit, rival_rate, hold_until_s, tries_fewer)
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


BUSY = Window(num_jobs=4, elapsed_s=0.025, mean_job_s=5e-3, saturated=True)
CALM = Window(num_jobs=300, elapsed_s=0.005, mean_job_s=16e-6, saturated=True)


def limits_after(windows: list[Window], tuning: Tuning) -> list[int]:
    limits = []
    for number, window in enumerate(windows):
        tuning = tuner.step(tuning, SIZE, window, 10.0 + 0.01 * number)
        limits.append(tuning.limit)
    return limits


def test_one_thread_gets_company_when_several_windows_in_a_row_ask_for_it() -> None:
    assert limits_after([BUSY] * tuner.SLOW_WINDOWS, Tuning(1)) == [1] * (tuner.SLOW_WINDOWS - 1) + [SIZE]
    moments = ([BUSY] * (tuner.SLOW_WINDOWS - 1) + [CALM]) * 3
    assert limits_after(moments, Tuning(1)) == [1] * len(moments)


@pytest.mark.parametrize("limit", [1, 4])
def test_no_thread_is_added_where_those_awake_have_too_little_to_do(limit: int) -> None:
    idle = Window(BUSY.num_jobs, BUSY.elapsed_s, BUSY.mean_job_s, saturated=False)
    assert limits_after([idle] * 10, Tuning(limit)) == [limit] * 10


@pytest.mark.parametrize("num_jobs", [10, 60, 128])
def test_answers_that_come_all_at_once_are_not_taken_for_quick_ones(num_jobs: int) -> None:
    window = Window(num_jobs, 0.006, 0.07, saturated=True)  # 128 reads of 70 ms in step: on the whole 1,800/s
    assert tuner.step(Tuning(128), 128, window, 1.0) == Tuning(128)
    assert tuner.step(Tuning(128), 256, window, 1.0) == Tuning(256)  # nothing is put to the test either
    assert tuner.widened(Tuning(64), 128, window) == Tuning(128)


def test_all_work_when_some_are_stuck_and_go_on_if_little_was_done_before() -> None:
    tuning = tuner.widened(Tuning(1), SIZE, BUSY)
    assert limits_after([BUSY] * 5, tuning) == [SIZE] * 5


def test_all_work_when_some_are_stuck_and_rest_again_if_few_did_more_before() -> None:
    tuning = tuner.widened(Tuning(1), SIZE, CALM)
    assert tuning.limit == SIZE
    crowded = Window(num_jobs=50, elapsed_s=0.005, mean_job_s=2e-3, saturated=True)
    assert limits_after([crowded, CALM], tuning) == [1, 1]
