"""Processes where the system has not what they need: one error that says what that is, and nothing left behind."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from abroad import Large, Points
from oracle import assert_same, torch_outcomes

from aioload import DataLoader
from aioload.engine.shortage import explained

pytestmark = pytest.mark.usefixtures("forks_are_served", "no_process_is_left")


@contextmanager
def at_most(limit: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def loader_of(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, **{"processes": 2, "num_workers": 2, **arguments})


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_too_few_files_may_be_open(start_method: str) -> None:
    """Whatever it is that one too many would be for."""
    expected, taken = torch_outcomes(Points(24), batch_size=4), set(map(int, os.listdir("/proc/self/fd")))
    refusals = {}
    for allowed in sorted(set(range(max(taken) + 40)) - taken)[:40]:
        with loader_of(Points(24), multiprocessing_context=start_method) as loader:
            try:
                with at_most(resource.RLIMIT_NOFILE, allowed):
                    batches = list(loader)
            except OSError as exc:
                refusals[allowed] = str(exc)
            else:
                assert_same(batches, expected)
    assert 10 <= len(refusals) < 40
    for allowed, text in refusals.items():
        assert f"may have {allowed} open files" in text
        assert "ulimit -n" in text


@pytest.mark.parametrize("allowed", [0, 1000, 200_000])
def test_no_file_may_be_large_enough_to_begin_with(allowed: int) -> None:
    with loader_of(Points(24)) as loader:
        with at_most(resource.RLIMIT_FSIZE, allowed), pytest.raises(OSError, match=rf"{allowed} bytes.*ulimit -f"):
            next(iter(loader))
        assert len(list(loader)) == 6


def test_no_file_may_be_as_large_as_a_batch() -> None:
    with loader_of(Large(), multiprocessing_context="fork") as loader:
        with (
            at_most(resource.RLIMIT_FSIZE, 1 << 20),
            pytest.raises(OSError, match=r"bytes of shared.*ulimit -f"),
        ):
            next(iter(loader))
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("raised", [OSError(13, "Permission denied"), OSError(24, "my own"), OSError("no number")])
def test_other_errors_are_left_alone(raised: OSError) -> None:
    with pytest.raises(OSError, match=raised.args[-1]) as caught, explained("It"):
        raise raised
    assert caught.value is raised
