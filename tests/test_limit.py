"""The limit of reads against models of storage: how near to the best one it settles, and how soon.

A model says when a read that begins now will end. No clock is involved.
"""

import heapq
import math
import random
from collections.abc import Callable
from typing import TypeAlias

import pytest

from aioload.engine import limit, pools, tuner
from aioload.engine.regulator import Regulator

MOST = 128

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
    """One read in 100 takes a hundred times as long."""
    generator, usual = random.Random(seed), past_a_knee(seed, knee=48)
    return lambda now_s, num: now_s + (usual(now_s, num) - now_s) * (100 if generator.random() < 0.01 else 1)


def that_stalls(seed: int) -> Storage:
    """Nothing comes from second 5 to second 15."""
    usual = past_a_knee(seed)

    def ends(now_s: float, num: int) -> float:
        end_s = usual(now_s, num)
        return end_s if end_s < 5 or now_s >= 15 else 15 + end_s % 0.01

    return ends


def that_warms(seed: int) -> Storage:
    """A cache has ever more of the files, at last all of them; each read needs a lock that many make dear."""
    generator, factor, free_s = random.Random(seed), noise(seed), [0.0]

    def ends(now_s: float, num: int) -> float:
        hit = generator.random() < now_s / 10
        free_s[0] = max(free_s[0], now_s + (0.0 if hit else 0.01)) + 0.0002 * num**0.3 * factor() if hit else free_s[0]
        return free_s[0] if hit else now_s + 0.02 * factor()

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
    now_s = window_began_s = busy_s = 0.0
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
            since_s = now_s - pools.HANGING_JOBS * window.mean_job_s
            num_hanging = sum(began_s < since_s for _, began_s in under_way)
            num_allowed = min(regulator.maximum, regulator.limit + num_hanging)
            window_began_s, num_jobs, busy_s, saturated = now_s, 0, 0.0, True
    if wait is not None:
        regulator.demand.end_wait(wait, now_s)
    return ended


def rate(ended: list[tuple[float, int]], since_s: float, until_s: float) -> float:
    return sum(since_s <= now_s < until_s for now_s, _ in ended) / (until_s - since_s)
