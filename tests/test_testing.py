"""The fakes keep their promises."""

import asyncio
import threading
from pathlib import Path

import pytest

import aioload.testing.gates
from aioload.readers import read_file
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems, Gates


def test_who_comes_to_a_closed_gate_waits_and_who_comes_to_an_open_one_does_not() -> None:
    gates = Gates()
    threads = [threading.Thread(target=gates.pass_through, args=(key,), name=f"by {key}") for key in "ab"]
    for thread in threads:
        thread.start()
    gates.wait_started("a", "b")
    assert (gates.in_flight, gates.max_in_flight, gates.finished) == (2, 2, [])
    assert gates.threads == {"a": "by a", "b": "by b"}
    gates.open("b")
    gates.wait_finished("b")
    assert (gates.in_flight, gates.is_open("a"), gates.is_open("b")) == (1, False, True)
    gates.pass_through("b")
    gates.open_all()
    for thread in threads:
        thread.join()
    assert gates.finished == ["b", "b", "a"]
    gates.pass_through("c")
    assert (gates.in_flight, gates.max_in_flight) == (0, 2)
    assert repr(gates) == "<Gates started=['a', 'b', 'b', 'c'] finished=['b', 'b', 'a', 'c']>"


async def test_a_coroutine_waits_at_a_gate_and_can_be_cancelled() -> None:
    gates = Gates()
    waiting = [asyncio.create_task(gates.pass_through_async(key)) for key in "abc"]
    await asyncio.to_thread(gates.wait_started, "a", "b", "c")
    waiting[2].cancel()
    await asyncio.to_thread(gates.open, "a")  # from another thread
    await waiting[0]
    assert not waiting[1].done()
    gates.open("b")
    await waiting[1]
    await asyncio.wait([waiting[2]])
    assert waiting[2].cancelled()
    assert (sorted(map(str, gates.finished)), gates.in_flight) == (["a", "b", "c"], 0)


async def test_an_error_is_raised_at_its_gate() -> None:
    gates, error = Gates(opened=True), LookupError()
    gates.fail("a", error)
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            gates.pass_through("a")
        assert caught.value is error
        with pytest.raises(LookupError) as caught:
            await gates.pass_through_async("a")
        assert caught.value is error
    assert gates.in_flight == 0


async def test_no_wait_is_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioload.testing.gates, "DEADLINE_S", 0.01)
    gates = Gates()
    with pytest.raises(AssertionError, match=r"Waited 0.01 s for the gate of 'a' to be opened: <Gates started=\['a'\]"):
        gates.pass_through("a")
    with pytest.raises(TimeoutError):
        await gates.pass_through_async("a")
    with pytest.raises(AssertionError, match=r"for \('b',\) to start"):
        gates.wait_started("b")
    with pytest.raises(AssertionError, match="for 3 to start"):
        gates.wait_num_started(3)
    with pytest.raises(AssertionError, match=r"for \('b',\) to finish"):
        gates.wait_finished("b")
    assert gates.in_flight == 0


async def test_each_dataset_gives_its_numbers_and_lets_all_go_at_the_end(tmp_path: Path) -> None:
    for dataset in (GatedDataset(3), GatedFiles(tmp_path, 3, decodes_opened=False)):
        samples: list[int] = []
        thread = threading.Thread(target=lambda d=dataset, s=samples: s.extend(d[index] for index in range(len(d))))
        with dataset:
            thread.start()
            dataset.gates.wait_started(0)
            assert samples == []
        thread.join()
        assert samples == [0, 1, 2]
    with GatedItems(3, opened=True) as items:
        assert list(items) == [0, 1, 2]
    with AsyncGatedDataset(3) as awaited:
        tasks = [asyncio.ensure_future(awaited[index]) for index in range(3)]
    assert await asyncio.gather(*tasks) == [0, 1, 2]


def test_only_opening_a_file_has_to_wait(tmp_path: Path) -> None:
    with GatedFiles(tmp_path, 2) as dataset:
        path = dataset.location(1)
        assert str(path) == str(tmp_path / "1.txt")
        assert dataset.gates.started == []
        dataset.gates.open(1)
        assert read_file(path) == b"1"
        assert read_file(path) == b"1"
        assert dataset.gates.finished == [1]
        assert dataset.decode(b"1", 1) == 1
        assert dataset.decodes.finished == [1]
