"""Samplers that yield a sample more than once: drawn by weight, or passed over without end."""

import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioload.errors import ArgumentError
from aioload.samplers import InfiniteSampler, ShuffleSampler, WeightedSampler
from aioload.samplers.infinite import by_pass
from aioload.samplers.weighted import draw, running_sums

deterministic = settings(deadline=None, derandomize=True, max_examples=30)


def test_samples_are_drawn_as_often_as_their_weight_says() -> None:
    weights = np.random.RandomState(0).standard_exponential(200)
    weights[[0, 17, 18, 199]] = 0
    expected = 200_000 * weights / weights.sum()
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        sampler = WeightedSampler(weights, 200_000, seed=seed)
        counts = np.bincount(list(sampler.iter_from(epoch, 0)), minlength=200)
        assert not counts[weights == 0].any()
        inside = expected > 0
        chi_square = ((counts[inside] - expected[inside]) ** 2 / expected[inside]).sum()
        degrees = inside.sum() - 1
        assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees)


def test_draws_have_nothing_to_do_with_each_other() -> None:
    num_draws, size = 50_000, 20
    epochs = np.array([list(WeightedSampler(np.ones(size), num_draws, seed=seed)) for seed in (0, 1)])
    later = np.array(list(WeightedSampler(np.ones(size), num_draws).iter_from(1, 0)))
    pairs = [(epochs[0][1:], epochs[0][:-1]), (epochs[0], epochs[1]), (epochs[0], later), (epochs[1], later)]
    for first, second in pairs:
        counts = np.bincount(first * size + second, minlength=size**2)
        expected = len(first) / size**2
        assert ((counts - expected) ** 2 / expected).sum() < 399 + 4.5 * np.sqrt(2 * 399)


def test_draws_at_the_edges() -> None:
    sums = running_sums(np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0]))
    shares = np.array([0.999999, 0.0, 0.25, 0.2499999, 0.75, np.nextafter(1, 0)])
    assert draw(sums, shares).tolist() == [4, 1, 3, 1, 4, 4]
    tiny = running_sums(np.array([0.0, 5e-324, 0.0]))
    assert draw(tiny, np.array([0.0, 0.6, np.nextafter(1, 0)])).tolist() == [1, 1, 1]


def test_weights_of_any_kind() -> None:
    expected = list(WeightedSampler([1.0, 2.0, 0.0, 4.0], 50))
    for weights in (np.array([1, 2, 0, 4], dtype=np.uint8), torch.tensor([1, 2, 0, 4], dtype=torch.float32)):
        assert list(WeightedSampler(weights, 50)) == expected
    mutable = np.array([1.0, 2.0, 0.0, 4.0])
    sampler = WeightedSampler(mutable, 50)
    mutable[:] = 0
    assert list(sampler) == expected
    assert set(WeightedSampler([False, True, True], 50)) == {1, 2}
    assert list(WeightedSampler([1e300, 1.0], 3)) == [0, 0, 0]


@deterministic
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7), st.integers(1, 5), st.integers(1, 6))
def test_endless_passes_are_the_shuffles_one_after_another(
    num_samples: int, batch_size: int, num_batches: int, world_size: int, num_epochs: int
) -> None:
    ranks = [
        InfiniteSampler(
            num_samples, batch_size=batch_size, num_batches=num_batches, seed=9, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    parts = [list(chain.from_iterable(list(sampler) for _ in range(num_epochs))) for sampler in ranks]
    stream = list(chain.from_iterable(zip(*parts, strict=True)))
    assert len(stream) == num_epochs * num_batches * batch_size * world_size
    shuffled = ShuffleSampler(num_samples, seed=9)
    passes = chain.from_iterable(shuffled.iter_from(number, 0) for number in range(-(-len(stream) // num_samples)))
    assert stream == list(passes)[: len(stream)]
    counts = Counter(stream)
    assert max(counts.values()) - min(counts[index] for index in range(num_samples)) <= 1


def test_an_epoch_far_away_begins_at_once() -> None:
    sampler = InfiniteSampler(10**9, batch_size=512, num_batches=10**5, rank=7, world_size=1000)
    place = ((10**12 * len(sampler)) + 10**7) * 1000 + 7
    number, position = divmod(place, 10**9)
    assert next(sampler.iter_from(10**12, 10**7)) == next(ShuffleSampler(10**9).iter_from(number, position))
    assert len(sampler) == 512 * 10**5


@deterministic
@given(st.integers(0, 10**20), st.integers(0, 50), st.integers(1, 30), st.integers(1, 40))
def test_places_pass_by_pass(start: int, count: int, step: int, num_samples: int) -> None:
    places = range(start, start + count * step, step)
    found = [number * num_samples + place for number, part in by_pass(places, num_samples) for place in part]
    assert found == list(places)
    assert all(part and part[-1] < num_samples for _, part in by_pass(places, num_samples))


def test_bad_arguments() -> None:
    for weights in ([[1.0]], 1.0, ["a"], [1, -1], [math.nan, 1], [math.inf], [1e308, 1e308], [0, 0], []):
        with pytest.raises(ArgumentError, match="weights must"):
            WeightedSampler(weights, 3)
    with pytest.raises(ArgumentError, match=r"got -1\.5 at index 1"):
        WeightedSampler([1, -1.5], 3)
    with pytest.raises(ArgumentError, match="num_samples must be a whole number of at least 0, got -1"):
        WeightedSampler([1], -1)
    with pytest.raises(ArgumentError, match="at least one sample"):
        InfiniteSampler(0, batch_size=1, num_batches=1)
    for name, value in (("batch_size", 0), ("num_batches", 0), ("world_size", 0), ("rank", 2), ("rank", -1)):
        arguments = {"batch_size": 1, "num_batches": 1, "world_size": 2, name: value}
        with pytest.raises(ArgumentError, match=f"{name} must be a whole number"):
            InfiniteSampler(3, **arguments)
