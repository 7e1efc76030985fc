"""The benchmark of a GPU: what it makes of traces and rounds, and that each line of it can be run."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cards import Rehearsal, made_up_events
from benchmarks.first_on_device import first_batch
from benchmarks.gpu import SECTIONS, Session, run
from benchmarks.gpu_copies import BARE, shares_of_bare_copy, those_that_run
from benchmarks.gpu_steps import num_to_take
from benchmarks.gpu_training import CACHED, overhead_lines, overheads, worth_a_trace, write_jpegs
from benchmarks.paired import Comparison, Rival
from benchmarks.traces import Interval, common, kernels, length, steady, summary, union

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def moments(intervals: list[Interval]) -> set[int]:
    """Return the whole numbers at which stretches of length 1 begin."""
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_unions_and_what_they_have_in_common_are_those_of_sets(ones: list[Interval], others: list[Interval]) -> None:
    one, other = union(ones), union(others)
    assert moments(one) == moments(ones)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(one))
    assert length(one) == len(moments(ones))
    both = common(one, other)
    assert moments(both) == moments(ones) & moments(others)
    assert both == union(both)


def test_a_trace_says_how_idle_the_device_was_and_what_was_copied_meanwhile() -> None:
    events = steady(made_up_events(), 0.25)
    assert kernels(events) == [(100, 150), (150, 200), (250, 300)]
    found = summary(events)
    assert found == {
        "window_ms": 0.2,
        "num_kernels": 3,
        "idle_share": 0.25,
        "num_copies": 2,
        "copied_mb": 3.0,
        "copying_ms": 0.06,
        "copied_under_kernels_share": pytest.approx(50 / 60),
        "pinned_copies": 2,
        "copy_streams": [13],
    }


def test_a_trace_without_a_device_says_nothing() -> None:
    found = summary(steady([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}], 0.5))
    assert (found["num_kernels"], found["idle_share"], found["copied_under_kernels_share"]) == (0, None, None)


def comparison_of(**seconds: list[float]) -> Comparison:
    epochs: dict[str, list[tuple[float, float]]] = {
        name: [(1, each) for each in rows] for name, rows in seconds.items()
    }
    groups = {name: name.split()[0] for name in epochs}
    return Comparison(title="", unit="ms", groups=groups, epochs=epochs)


def test_overheads_are_those_of_the_same_round() -> None:
    comparison = comparison_of(**{"aioload": [1.1, 2.0, 4.4], CACHED: [1.0, 2.0, 4.0], "torch 8": [2.0, 3.0, 4.0]})
    found = overheads(comparison)
    assert found == {"aioload": pytest.approx([0.1, 0, 0.1]), "torch 8": pytest.approx([1, 0.5, 0])}
    assert overhead_lines(comparison)[0] == "  overhead of aioload: 10.00 (0.00 - 10.00) %"
    assert overheads(comparison_of(aioload=[1.0])) == {}


def test_rates_are_shares_of_the_bare_copy_of_the_same_round() -> None:
    comparison = comparison_of(**{"aioload": [2.0, 1.0], BARE: [1.0, 4.0]})
    assert shares_of_bare_copy(comparison) == {"aioload": [0.5, 4.0]}
    assert shares_of_bare_copy(comparison_of(aioload=[1.0])) == {}


def test_of_torchs_settings_the_best_is_traced() -> None:
    comparison = comparison_of(**{"aioload": [1.0], CACHED: [1.0], "torch 8": [2.0], "torch 16": [1.5]})
    feeders: dict[str, Any] = dict.fromkeys(["aioload", CACHED, "torch 8", "torch 16", "torch, which failed"])
    assert list(worth_a_trace(comparison, feeders)) == ["aioload", CACHED, "torch 16"]


def test_a_way_that_fails_is_named_and_left_out() -> None:
    def fail() -> Any:
        raise RuntimeError("Bus error")

    rivals = [Rival(name="one", epoch=lambda: (1, 1.0), group=""), Rival(name="other", epoch=fail, group="")]
    able, notes = those_that_run(rivals)
    assert able == rivals[:1]
    assert notes == ["other failed: RuntimeError('Bus error')"]


def test_a_step_is_made_as_long_as_it_is_to_be() -> None:
    assert [num_to_take(each_s, 1e-3) for each_s in (2e-4, 3e-4, 1.0)] == [5, 3, 1]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks are quicker with one, and more so where the other cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread", "forks_are_served", "no_process_is_left")
def test_it_can_be_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, report = tmp_path / "trace.json.gz", tmp_path / "gpu.json"
    session = Session(Rehearsal(), 1, trace, tmp_path)
    names = [name for name in SECTIONS if name != "first"]  # which needs processes
    figures = run(session, names, report)
    assert [name for name in names if "failed" in figures["sections"][name]] == [], capsys.readouterr().out
    assert json.loads(report.read_text()).keys() == {"facts", "rounds", "sections"}
    assert json.loads(gzip.decompress(trace.read_bytes())) == {"traceEvents": made_up_events()}


@pytest.mark.usefixtures("one_thread")
def test_the_first_batch_can_be_rehearsed(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 2)
    for name in ("aioload", "torch"):
        figures = first_batch(name, tmp_path, 0, is_real=False)
        assert 0 < figures["from_loader_ms"] < figures["from_start_ms"]


def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SECTIONS, "copies", lambda session: 1 / 0)
    monkeypatch.setitem(SECTIONS, "ring", lambda session: {"found": 1})
    figures = run(Session(Rehearsal(), 1, tmp_path, tmp_path), ["copies", "ring"], None)
    assert "ZeroDivisionError" in figures["sections"]["copies"]["failed"]
    assert figures["sections"]["ring"]["found"] == 1
