"""The limit of reads against models of storage: how near to the best one it settles, and how soon.

A model says when a read that begins now will end. No clock is involved.
"""

import heapq
import math
import random
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioload.engine import limit, pools, tuner
from aioload.engine.regulator import MAX_READS, Regulator, allowed_handles, most_reads

MOST = 64

Storage: TypeAlias = Callable[[float, int], float]
"""Returns when a read ends, of the time at which it begins and of how many are under way with it."""


def noise(seed: int, spread: float = 0.2) -> Callable[[], float]:
    generator = random.Random(seed)
    return lambda: math.exp(generator.gauss(0, spread))


def with_fixed_latency(seed: int, latency_s: float = 0.02) -> Storage:
    factor = noise(seed, 0.05)
    return lambda now_s, _: now_s + latency_s * factor()


def past_a_knee(seed: int, knee: int = 24, latency_s: float = 0.02) -> Storage:
    """Latency rises faster than the reads under way, so that more of them bring less."""
    factor = noise(seed)
    return lambda now_s, num: now_s + latency_s * max(1.0, num / knee) ** 1.4 * factor()


def with_bandwidth(seed: int, rate: float = 1000.0, latency_s: float = 0.02) -> Storage:
    factor, free_s = noise(seed), [0.0]

    def ends(now_s: float, _: int) -> float:
        free_s[0] = max(free_s[0], now_s) + factor() / rate
        return max(free_s[0], now_s + latency_s * factor())

    return ends


def with_a_heavy_tail(seed: int) -> Storage:
    """One read in 100 takes a hundred times as long, for it waits, which keeps no other from being served."""
    generator, usual = random.Random(seed), past_a_knee(seed)
    served: list[float] = []

    def ends(now_s: float, _: int) -> float:
        while served and served[0] <= now_s:
            heapq.heappop(served)
        end_s = usual(now_s, len(served) + 1)
        if generator.random() < 0.01:
            return now_s + 100 * (end_s - now_s)
        heapq.heappush(served, end_s)
        return end_s

    return ends


def that_stalls(seed: int) -> Storage:
    """Nothing comes from second 5 to second 15."""
    usual = past_a_knee(seed)

    def ends(now_s: float, num: int) -> float:
        end_s = usual(now_s, num)
        return end_s if end_s < 5 or now_s >= 15 else 15 + end_s % 0.01

    return ends


def that_warms(seed: int) -> Storage:
    """A cache has ever more of the files, after 10 s all; reading from it needs a lock that many make dear."""
    generator, factor, free_s = random.Random(seed), noise(seed), [0.0]

    def ends(now_s: float, num: int) -> float:
        if generator.random() >= now_s / 10:
            return now_s + 0.02 * factor()
        free_s[0] = max(free_s[0], now_s) + 0.0004 * num**0.3 * factor()
        return free_s[0]

    return ends


MODELS: dict[str, Callable[[int], Storage]] = {
    "fixed latency": with_fixed_latency,
    "past a knee": past_a_knee,
    "bandwidth": with_bandwidth,
    "heavy tail": with_a_heavy_tail,
    "a stall of 10 s": that_stalls,
    "a cache that warms": that_warms,
}


class Fixed(Regulator):
    """One that never moves."""

    def note(self, window: tuner.Window, now_s: float) -> bool:
        return False


def fixed(number: int) -> Regulator:
    regulator = Fixed(number)
    regulator.climb = limit.Climb(number)
    return regulator


def simulate(
    storage: Storage, regulator: Regulator, seconds: float, *, demand: Callable[[float], float] | None = None
) -> list[tuple[float, int]]:
    """Return when each read ended, and what the limit was then.

    Args:
        storage: When reads end.
        regulator: Is told. Reads that hang do not count, as in a pool.
        seconds: Until when.
        demand: How many reads a consumer has called for at a time; without it, it always waits for more.
    """
    now_s = window_began_s = busy_s = usual_job_s = 0.0
    num_started = num_jobs = 0
    saturated, ended, num_allowed = True, [], regulator.limit
    under_way: list[tuple[float, float]] = []
    wait = regulator.demand.begin_wait(0.0) if demand is None else None
    while now_s < seconds:
        while len(under_way) < num_allowed and (demand is None or num_started < demand(now_s)):
            num_started += 1
            heapq.heappush(under_way, (storage(now_s, len(under_way) + 1), now_s))
        saturated = saturated and len(under_way) >= regulator.limit
        if not under_way:
            now_s += 0.001
            continue
        now_s, began_s = heapq.heappop(under_way)
        ended.append((now_s, regulator.limit))
        num_jobs, busy_s = num_jobs + 1, busy_s + now_s - began_s
        if now_s - window_began_s >= tuner.MAX_WINDOW_S:
            window = tuner.Window(num_jobs, now_s - window_began_s, busy_s / num_jobs, saturated)
            regulator.note(window, now_s)
            assert 1 <= regulator.limit <= regulator.maximum
            usual_job_s = tuner.usual(usual_job_s, window.mean_job_s)
            since_s = now_s - pools.HANGING_JOBS * usual_job_s
            num_hanging = sum(began_s < since_s for _, began_s in under_way)
            num_allowed = min(regulator.maximum, regulator.limit + num_hanging)
            window_began_s, num_jobs, busy_s, saturated = now_s, 0, 0.0, True
    if wait is not None:
        regulator.demand.end_wait(wait, now_s)
    return ended


def rate(ended: list[tuple[float, int]], since_s: float, until_s: float) -> float:
    return sum(since_s <= now_s < until_s for now_s, _ in ended) / (until_s - since_s)


# The best of the fixed limits, for which :func:`test_these_are_the_best_fixed_limits`, and the seconds that count.
BEST: dict[str, tuple[int, list[tuple[float, float]]]] = {
    "fixed latency": (64, [(2.5, 5)]),
    "past a knee": (23, [(2.5, 8)]),
    "bandwidth": (23, [(2.5, 8)]),
    "heavy tail": (64, [(2.5, 12)]),
    "a stall of 10 s": (23, [(2.5, 5), (15.5, 18)]),
    "a cache that warms": (1, [(2.5, 12)]),
}


def mean_rate(ended: list[tuple[float, int]], spans: list[tuple[float, float]]) -> float:
    seconds = sum(end_s - start_s for start_s, end_s in spans)
    return sum(rate(ended, *span) * (span[1] - span[0]) for span in spans) / seconds


@pytest.mark.parametrize("name", BEST)
def test_it_settles_near_the_best_fixed_limit_within_seconds(name: str) -> None:
    number, spans = BEST[name]
    best = mean_rate(simulate(MODELS[name](0), fixed(number), spans[-1][1]), spans)
    for seed in range(2):
        ended = simulate(MODELS[name](seed), Regulator(MOST), spans[-1][1])
        assert mean_rate(ended, spans) > 0.85 * best


@pytest.mark.parametrize("name", BEST)
def test_these_are_the_best_fixed_limits(name: str) -> None:
    number, _ = BEST[name]
    others = {max(1, number // 2), min(MOST, 2 * number)}
    rates = {each: rate(simulate(MODELS[name](0), fixed(each), 4.5), 2, 4.5) for each in (number, *others)}
    if name == "a cache that warms":  # at last
        rates = {each: rate(simulate(that_warms(0), fixed(each), 11), 10, 11) for each in (1, 2)}
    assert rates[number] >= 0.97 * max(rates.values())


def test_it_follows_storage_that_changes() -> None:
    slow, fast = past_a_knee(0, knee=12, latency_s=0.05), past_a_knee(1, knee=64)

    def changing(now_s: float, num: int) -> float:
        return (slow if now_s < 5 or now_s >= 10 else fast)(now_s, num)

    ended = simulate(changing, Regulator(MOST), 18)
    best_slow = rate(simulate(past_a_knee(0, 12, 0.05), fixed(12), 5), 2, 5)
    best_fast = rate(simulate(past_a_knee(1, 64), fixed(64), 4), 2, 4)
    # When the storage has turned slow, reads that are too many take half a second each: it takes seconds to see that.
    for (start_s, end_s), best in (((2, 5), best_slow), ((7, 10), best_fast), ((15, 18), best_slow)):
        assert rate(ended, start_s, end_s) > 0.85 * best


def test_fewer_are_under_way_while_the_consumer_does_not_wait_and_as_many_as_help_when_it_does() -> None:
    def demand(now_s: float) -> float:  # batches of 32: 200 samples a second, then as many as come
        return 32 * (1 + int(now_s * 200 / 32)) if now_s < 15 else math.inf

    ended = simulate(past_a_knee(0), Regulator(MOST), 20, demand=demand)
    assert rate(ended, 1, 15) == pytest.approx(200, rel=0.05)
    assert {number for now_s, number in ended if 8 < now_s < 15} <= set(range(3, 11))  # 4 are under way on average
    assert rate(ended, 17, 20) > 0.85 * rate(simulate(past_a_knee(0), fixed(23), 6), 2, 6)


def test_a_limit_that_grew_with_the_consumers_step_is_taken_back_unless_it_brings_as_much() -> None:
    before = limit.Level(16, 1000.0, step_s=0.010, wait_share=0.2)
    assert limit.gain(before, limit.Level(32, 1500.0, step_s=0.010, wait_share=0.0)) > 1
    assert limit.gain(before, limit.Level(32, 1500.0, step_s=0.025, wait_share=0.0)) < 1  # 0.8 of 1.5 times as much
    idle = limit.Level(16, 1000.0, step_s=0.0001, wait_share=0.99)  # it waits nearly always: its step is nothing
    assert limit.gain(idle, limit.Level(32, 1500.0, step_s=0.00025, wait_share=0.98)) > 1


levels = st.builds(limit.Level, st.integers(1, 256), st.floats(1, 1e5), st.floats(0, 10), st.floats(0, 1))


@given(levels, levels)
def test_what_is_gained_one_way_is_lost_the_other_way_but_for_the_step(before: limit.Level, after: limit.Level) -> None:
    without = [limit.Level(level.limit, level.rate) for level in (before, after)]
    assert limit.gain(*without) * limit.gain(*reversed(without)) == pytest.approx(1)


def test_time_without_demand_is_no_stall() -> None:
    assert limit.is_stall(1.0, 0.01)
    assert not limit.is_stall(0.1, 0.01)  # too short
    assert not limit.is_stall(1.0, 0.5)  # reads that take long
    assert not limit.is_stall(1.0, 0.0)  # nothing is known yet


def test_reads_never_exceed_what_files_may_be_open() -> None:
    assert most_reads(None) == MAX_READS
    assert most_reads(20_000) == MAX_READS
    assert most_reads(256) == 96
    assert most_reads(64) == 16
    assert most_reads(10) == 2
    assert most_reads(1) == 1
    handles = allowed_handles()
    assert handles is None or handles > 0


@given(
    st.lists(
        st.builds(
            limit.Window, st.integers(1, 10**6), st.floats(0.1, 10), st.floats(0, 1e4), st.floats(0, 1), st.floats(0, 1)
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 256),
    st.integers(1, 256),
)
def test_the_limit_stays_between_one_and_the_most(windows: list[limit.Window], most: int, later: int) -> None:
    climb = limit.Climb(min(limit.START, most))
    for number, window in enumerate(windows):
        maximum = most if number < 10 else min(most, later)
        climb = limit.step(climb, maximum, window, number * 0.2)
        assert 1 <= climb.limit <= maximum
        assert 1 <= limit.resumed(climb).limit <= most


def test_a_move_down_is_not_taken_back_to_what_can_no_longer_be_had() -> None:
    climb = limit.Climb(40, rival=limit.Level(129, 100.0), upward=False)
    for number in range(limit.MAX_TESTS + 2):
        window = limit.Window(1, 2.0, 2.0 * 40)  # all reads are under way, and the rate is far below that of the rival
        climb = limit.step(climb, 64, window, float(number))
        assert climb.limit <= 64


def test_the_next_pass_goes_on_with_what_this_one_found() -> None:
    first = Regulator(MOST)
    simulate(past_a_knee(0, knee=48), first, 5)
    second = Regulator(MOST, first)
    assert 32 <= second.limit <= 91
    assert Regulator(8, first).limit == 8
    best = rate(simulate(past_a_knee(0, 48), fixed(48), 3), 1, 3)
    assert rate(simulate(past_a_knee(1, 48), second, 1), 0.1, 1) > 0.85 * best
