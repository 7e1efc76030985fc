"""Batches of similar length, and batches in which each class has its share."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioload.errors import ArgumentError
from aioload.samplers import BucketBatchSampler, StratifiedBatchSampler
from aioload.samplers.stratified import Quotas, grouped

deterministic = settings(deadline=None, derandomize=True, max_examples=40)


def sizes_of(num_samples: int, batch_size: int, *, drop_last: bool) -> list[int]:
    full, rest = divmod(num_samples, batch_size)
    return [batch_size] * full + ([rest] if rest and not drop_last else [])


@deterministic
@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans())
def test_buckets_have_each_sample_once(
    lengths: list[int], batch_size: int, num_batches: int, drop_last: bool, shuffle: bool
) -> None:
    sampler = BucketBatchSampler(
        lengths, batch_size, drop_last=drop_last, num_batches_per_bucket=num_batches, shuffle=shuffle
    )
    sizes = sizes_of(len(lengths), batch_size, drop_last=drop_last)
    for epoch in range(3):
        batches = list(sampler.iter_from(epoch, 0))
        assert [len(batch) for batch in batches] == sizes
        assert len(sampler) == len(sizes)
        indices = [index for batch in batches for index in batch]
        assert len(set(indices)) == len(indices) == sum(sizes)
        assert set(indices) <= set(range(len(lengths)))
        assert sampler.padding_waste(epoch) == pytest.approx(waste_of(batches, lengths))


def waste_of(batches: list[list[int]], lengths: Any) -> float:
    padded = sum(max(lengths[index] for index in batch) * len(batch) for batch in batches)
    used = sum(lengths[index] for batch in batches for index in batch)
    return 1 - used / padded if padded else 0.0


LENGTHS = (np.random.RandomState(0).standard_exponential(5000) * 100).astype(np.int64)


def test_batches_are_of_similar_length_and_fewer_batches_a_bucket_are_less_so() -> None:
    wastes = [
        BucketBatchSampler(LENGTHS, 16, num_batches_per_bucket=number).padding_waste() for number in (1, 10, 100, 1000)
    ]
    assert wastes == sorted(wastes, reverse=True)
    assert wastes[0] > 0.6
    assert wastes[2] < 0.1
    assert wastes[3] < 0.02


def test_a_single_bucket_sorts_all() -> None:
    sampler = BucketBatchSampler(LENGTHS, 16, num_batches_per_bucket=1000, drop_last=True)
    spans = sorted((min(LENGTHS[batch]), max(LENGTHS[batch])) for batch in sampler)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


def test_batches_and_what_is_in_them_come_in_no_order() -> None:
    lengths = np.random.RandomState(0).random(5000)
    sampler = BucketBatchSampler(lengths, 16, num_batches_per_bucket=1000, drop_last=True)
    first, second = list(sampler), list(sampler)
    assert first != second
    for batches in (first, second):
        longest = np.array([max(lengths[batch]) for batch in batches])
        assert 0.4 < (longest[1:] > longest[:-1]).mean() < 0.6
        within = lengths[np.array(batches)]
        assert 0.45 < (within[:, 1:] > within[:, :-1]).mean() < 0.55
    seeded = BucketBatchSampler(lengths, 16, num_batches_per_bucket=1000, drop_last=True, seed=1)
    assert list(seeded) not in (first, second)


def test_buckets_without_shuffling_are_sorted_parts_of_the_data() -> None:
    lengths = [5, 1, 4, 2, 9, 8, 7, 6, 3, 3]
    sampler = BucketBatchSampler(lengths, 2, shuffle=False, num_batches_per_bucket=2)
    assert list(sampler) == [[1, 3], [2, 0], [7, 6], [5, 4], [8, 9]]
    assert list(sampler) == [[1, 3], [2, 0], [7, 6], [5, 4], [8, 9]]


def test_no_sample_is_always_left_out_or_always_in_the_short_batch() -> None:
    lengths = list(range(11))
    for drop_last in (False, True):
        sampler = BucketBatchSampler(lengths, 4, drop_last=drop_last)
        ever_missing: set[int] = set()
        for epoch in range(200):
            full = list(sampler.iter_from(epoch, 0))[:2]
            missing = set(lengths) - {index for batch in full for index in batch}
            assert len(missing) == 3
            ever_missing |= missing
        assert ever_missing == set(lengths)


@deterministic
@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 12), st.booleans(), st.integers(0, 2**64 - 1))
def test_each_class_has_its_share(labels: list[int], batch_size: int, drop_last: bool, seed: int) -> None:
    sampler = StratifiedBatchSampler(labels, batch_size, drop_last=drop_last, seed=seed)
    sizes = sizes_of(len(labels), batch_size, drop_last=drop_last)
    for epoch in range(2):
        batches = list(sampler.iter_from(epoch, 0))
        assert [len(batch) for batch in batches] == sizes
        indices = [index for batch in batches for index in batch]
        assert len(set(indices)) == len(indices)
        for label in set(labels):
            for batch in batches:
                count = sum(labels[index] == label for index in batch)
                share = labels.count(label) * len(batch) / len(labels)
                assert abs(count - share) < 1
                if labels.count(label) >= len(labels) / batch_size and len(batch) == batch_size:
                    assert count >= 1


def test_many_classes_of_many_sizes() -> None:
    labels = np.concatenate([np.full(size, size) for size in range(1, 80)])
    np.random.RandomState(0).shuffle(labels)
    counts = np.bincount(labels, minlength=80)
    for batch_size in (1, 7, 64, 79, 100, 3159, 3160, 5000):
        batches = list(StratifiedBatchSampler(labels, batch_size))
        assert sorted(index for batch in batches for index in batch) == list(range(labels.size))
        found = np.array([np.bincount(labels[batch], minlength=80) for batch in batches])
        shares = counts * np.array([len(batch) for batch in batches])[:, np.newaxis] / labels.size
        assert np.abs(found - shares).max() < 1


def test_who_meets_whom_is_random() -> None:
    labels = [0] * 8 + [1] * 4
    sampler = StratifiedBatchSampler(labels, 3)
    meetings = np.zeros((12, 12))
    places = np.zeros((12, 12))
    for epoch in range(600):
        batches = np.array(list(sampler.iter_from(epoch, 0)))
        for batch in batches:
            meetings[np.ix_(batch, batch)] += 1
        places[batches.ravel(), np.arange(12)] += 1
    for group in (range(8), range(8, 12)):
        together = meetings[np.ix_(group, group)][~np.eye(len(group), dtype=bool)]
        assert np.ptp(together) <= 6 * np.sqrt(together.mean())
    across = meetings[:8, 8:]
    assert np.ptp(across) <= 6 * np.sqrt(across.mean())
    assert np.abs(places - 50).max() < 4.5 * np.sqrt(50)


def test_a_rare_class_is_in_any_batch() -> None:
    for labels, batch_size in (([0] + [1] * 9, 2), ([0, 0] + [1] * 8 + [2, 2], 3)):
        sampler = StratifiedBatchSampler(labels, batch_size)
        counts = np.zeros(len(sampler))
        for epoch in range(200):
            counts += [0 in batch for batch in sampler.iter_from(epoch, 0)]
        expected = 200 / len(sampler)
        assert np.abs(counts - expected).max() < 4 * np.sqrt(expected)


def test_all_classes_meet() -> None:
    labels = np.repeat(np.arange(12), 5)
    sampler = StratifiedBatchSampler(labels, 4)
    in_one = np.zeros((12, 12), dtype=np.int64)
    in_all = np.zeros((12, 12), dtype=np.int64)
    for epoch in range(200):
        batches = [labels[batch] for batch in sampler.iter_from(epoch, 0)]
        for classes in batches:
            assert len(set(classes)) == 4
            in_all[np.ix_(classes, classes)] += 1
            if epoch == 0:
                in_one[np.ix_(classes, classes)] += 1
    others = ~np.eye(12, dtype=bool)
    assert (in_one[others] > 0).mean() > 0.6
    expected = 200 * 15 * 12 / 132
    assert np.abs(in_all[others] - expected).max() < 5 * np.sqrt(expected)


def test_grouping_is_stable_however_many_groups() -> None:
    values = np.array([65000, 3, 65000, 1, 3])
    assert grouped(values, 2**16).tolist() == grouped(values, 2**16 + 1).tolist() == [3, 1, 4, 0, 2]


def test_remainders_go_to_those_nearest_to_one_more() -> None:
    quotas = Quotas.of(np.array([4, 1, 3]), 6)
    assert [each.tolist() for each in quotas] == [[1, 0, 1], [3, 0, 2], [0, 1, 0]]


def test_labels_of_any_kind_make_the_same_batches() -> None:
    numbers = [3, 1, 1, 3, 2, 2, 1]
    expected = list(StratifiedBatchSampler(numbers, 3))
    kinds: list[Any] = [np.array(numbers, dtype=np.uint8), torch.tensor(numbers), [f"class {n}" for n in numbers]]
    for labels in kinds:
        assert list(StratifiedBatchSampler(labels, 3)) == expected
    assert list(BucketBatchSampler(torch.tensor([1.5, 2.5, 0.5]), 2, shuffle=False)) == [[2, 0], [1]]


def test_bad_arguments() -> None:
    for lengths in ([[1]], 3, [1, -1], [1.0, float("nan")], [float("inf")], ["a"], [1, None], [[1], [1, 2]]):
        with pytest.raises(ArgumentError, match="lengths must"):
            BucketBatchSampler(lengths, 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="got -3 at index 2"):
        BucketBatchSampler([1, 2, -3, -4], 2)
    for labels in ([[1]], 3, [1.5], [None], torch.tensor([1.0], dtype=torch.bfloat16)):
        with pytest.raises(ArgumentError, match="labels must"):
            StratifiedBatchSampler(labels, 2)  # type: ignore[arg-type]
    kinds: list[Any] = [BucketBatchSampler, StratifiedBatchSampler]
    for make in kinds:
        for batch_size in (0, -1, 1.5, None):
            with pytest.raises(ArgumentError, match="batch_size must be a whole number of at least 1, got"):
                make([1], batch_size)
        with pytest.raises(ArgumentError, match="drop_last must be True or False, got 1"):
            make([1], 1, drop_last=1)
    with pytest.raises(ArgumentError, match="num_batches_per_bucket"):
        BucketBatchSampler([1], 1, num_batches_per_bucket=0)
