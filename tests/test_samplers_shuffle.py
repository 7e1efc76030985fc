"""The order of a shuffle: each index once, and nothing to tell it from chance."""

import tracemalloc
from collections import Counter
from itertools import chain, islice, permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aioload.errors import ArgumentError
from aioload.samplers import ShuffleSampler, permutation, shuffle
from aioload.samplers.permutation import Permutation
from aioload.samplers.streams import Stream

LIMIT = 4.5
"""Standard deviations. The seeds are fixed, so this is passed or failed for good."""


def orders(size: int, *, seeds: range = range(1), epochs: range = range(1)) -> NDArray[np.int64]:
    """Return one order a row."""
    items = (ShuffleSampler(size, seed).iter_from(epoch, 0) for seed in seeds for epoch in epochs)
    return np.fromiter(chain.from_iterable(items), np.int64).reshape(-1, size)


def surprise(counts: NDArray[Any], degrees: int | None = None) -> float:
    """Return by how many standard deviations the chi-square of equally likely cases is too large."""
    degrees = counts.size - 1 if degrees is None else degrees
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2).sum() / expected - degrees) / np.sqrt(2 * degrees))


def test_every_index_once() -> None:
    for size in [*range(71), 127, 128, 1000, 4095, 4096, 4097, 4099, 4900, 8192, 65537]:
        for epoch in (0, 7):
            order = np.fromiter(ShuffleSampler(size, seed=size).iter_from(epoch, 0), np.int64, size)
            assert np.array_equal(np.sort(order), np.arange(size))


def test_the_network_is_a_permutation_of_few_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "TABLE_SIZE", 0)
    for size in range(1, 71):
        assert sorted(Permutation(size, Stream.of(size)).whole().tolist()) == list(range(size))


def test_all_orders_of_four_are_equally_likely() -> None:
    for rows in (orders(4, seeds=range(1200)), orders(4, epochs=range(1200))):
        seen = Counter(map(tuple, rows.tolist()))
        counts = np.array([seen[order] for order in permutations(range(4))])
        assert counts.sum() == len(rows)
        assert surprise(counts) < LIMIT


@pytest.mark.parametrize("size", [7, 32, 4900])
def test_every_index_is_anywhere_equally_often(size: int) -> None:
    num_cells = min(size, 49)
    for arguments in ({"seeds": range(120)}, {"epochs": range(120)}):
        rows = orders(size, **arguments)
        cells = (np.arange(size) * num_cells // size) * num_cells + rows * num_cells // size
        counts = np.bincount(cells.ravel(), minlength=num_cells**2)
        assert surprise(counts, (num_cells - 1) ** 2) < LIMIT


def test_neighbours_and_those_further_off_differ_by_anything() -> None:
    size, width = 4900, 70  # of the network; places that far apart share a half
    rows = orders(size, seeds=range(20), epochs=range(10))
    for lag in (1, 2, 3, width - 1, width, width + 1, 2 * width):
        differences = (rows[:, lag:] - rows[:, :-lag]) % size
        assert surprise(np.bincount(differences.ravel(), minlength=size)[1:]) < LIMIT
        products = (rows[:, lag:] - (size - 1) / 2) * (rows[:, :-lag] - (size - 1) / 2)
        correlation = products.mean() / (size**2 / 12)
        assert abs(correlation) * np.sqrt(products.size) < LIMIT
    corners = (rows[:, : -width - 1] - rows[:, 1:-width] - rows[:, width:-1] + rows[:, width + 1 :]) % size
    assert surprise(np.bincount(corners.ravel(), minlength=size)) < LIMIT


@pytest.mark.parametrize("size", [50, 4900])
def test_as_many_stay_in_place_as_chance_has_it(size: int) -> None:
    stay = (orders(size, seeds=range(200)) == np.arange(size)).sum(axis=1)
    assert poisson_surprise(stay) < LIMIT


def poisson_surprise(counts: NDArray[Any]) -> float:
    """Return by how many standard deviations counts differ from Poisson(1): 0, 1, 2, or more of a kind."""
    shares = np.exp(-1.0) * np.array([1, 1, 0.5])
    expected = len(counts) * np.append(shares, 1 - shares.sum())
    seen = np.bincount(np.minimum(counts, 3), minlength=4)
    return float((((seen - expected) ** 2 / expected).sum() - 3) / np.sqrt(6))


@pytest.mark.parametrize("size", [50, 4900])
def test_epochs_and_seeds_have_nothing_to_do_with_each_other(size: int) -> None:
    by_epoch = orders(size, seeds=range(3, 4), epochs=range(100))
    by_seed = orders(size, seeds=range(104))
    by_high_bits = orders(size, seeds=range(0, 2**63, 2**57))
    for rows in (by_epoch, by_seed, by_high_bits):
        assert poisson_surprise((rows[1:] == rows[:-1]).sum(axis=1)) < LIMIT
        steps = (rows[1:] - rows[:-1]) % size
        assert surprise(np.bincount(steps.ravel(), minlength=size)) < LIMIT
    # Seed plus one in an epoch is not the seed in the epoch plus one.
    assert poisson_surprise((by_seed[4:-1] == by_epoch[1:]).sum(axis=1)) < LIMIT


def test_words_are_uniform() -> None:
    stream = Stream.of(1, 2)
    words = stream.words(np.arange(4096, dtype=np.uint64))
    assert words.tolist() == [stream.word(counter) for counter in range(4096)]
    bits = (words[:, np.newaxis] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() * 2 * np.sqrt(4096) < LIMIT
    uniform = stream.uniform(np.arange(10**5, dtype=np.uint64))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert surprise(np.bincount((uniform * 1000).astype(np.int64), minlength=1000)) < LIMIT


def test_seeds_epochs_and_purposes_do_not_stand_in_for_each_other() -> None:
    numbers = [(seed, epoch, purpose) for seed in range(20) for epoch in range(20) for purpose in range(5)]
    streams = [Stream.of(*each) for each in numbers] + [Stream.of(*each[:2]) for each in numbers[::5]]
    for values in ([stream.start for stream in streams], [stream.step for stream in streams]):
        assert len(set(values)) == len(streams)
    assert all(stream.step % 2 for stream in streams)


def test_the_order_of_a_seed_never_changes() -> None:
    """A change of these numbers breaks everybody's saved states and repeated experiments."""
    assert list(ShuffleSampler(10, seed=1)) == GOLDEN_FEW
    assert list(islice(ShuffleSampler(10**9, seed=1).iter_from(2, 0), 5)) == GOLDEN_MANY
    assert list(islice(ShuffleSampler(10**9, seed=2**64 - 1).iter_from(2, 10**8), 5)) == GOLDEN_FAR


GOLDEN_FEW = [1, 8, 0, 4, 3, 2, 9, 5, 6, 7]
GOLDEN_MANY = [119246360, 434567669, 138417998, 865064528, 311453528]
GOLDEN_FAR = [630903363, 119176699, 337651415, 237971928, 955902490]


def test_a_long_order_is_computed_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    class Counting(Permutation):
        def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            computed.append(positions.size)
            return super().at(positions)

    monkeypatch.setattr(shuffle, "Permutation", Counting)
    tracemalloc.start()
    try:
        next(iter(ShuffleSampler(10**12)))
        next(ShuffleSampler(10**12).iter_from(0, 999_999_000_000))
        assert sum(computed) <= 200
        list(islice(ShuffleSampler(10**12), 50_000))
        assert max(computed) <= 10_000
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_bad_arguments() -> None:
    for bad in (-1, 1.5, None, "3".__len__, np.array(3.5), 2**62 + 1):
        with pytest.raises(ArgumentError, match="data_source must be a number of samples or have a length, got"):
            ShuffleSampler(bad)  # type: ignore[arg-type]
    for bad in (-1, 2**64, 0.5, None, True):
        with pytest.raises(ArgumentError, match="seed must be a whole number from 0 to 18446744073709551615, got"):
            ShuffleSampler(3, seed=bad)  # type: ignore[arg-type]
    assert len(ShuffleSampler(np.int32(7))) == len(ShuffleSampler("7 chars")) == 7  # type: ignore[arg-type]
