"""A read that lasts long is raced by a second one: the first to succeed counts, and nothing else changes."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import FACES, Load, by_for, of_iterator
from waiting import READERS, BlockingReader, MakeReader, Numbers, Storage

from aioload import DataLoader, FileDataset, Hedge, MemoryCache, ReadPolicy, error_context
from aioload.engine.pace import LEAST_READS, Pace
from aioload.engine.race import Race
from aioload.errors import ArgumentError
from aioload.readers.policy import Tries

EAGER = Hedge(factor=1, min_delay_s=0.002, max_share=1)
POLICY = ReadPolicy(hedge=EAGER, retries=0)

SIZE, LAST = 128, 127
"""The last sample is the one that is slow: by then it is known how long reads take."""


every_reader = pytest.mark.parametrize("reader", READERS)


def slow_storage(*slow: tuple[int, int]) -> Storage:
    """Return one in which these reads wait: of that location, counted from 0."""
    return Storage(lambda location, number: (location, number) in slow)


def loader_of(reader: Any, **arguments: Any) -> DataLoader[int]:
    arguments = {"num_workers": 2, "num_concurrent_reads": 4, "read": POLICY, **arguments}
    dataset: Any = Numbers(SIZE)
    return DataLoader(dataset, 8, reader=reader, **arguments)


def batches_before(batches: Iterator[Any], num_batches: int) -> list[int]:
    """Take so many batches, so that it is known how long reads take when the next one is asked for."""
    return [number for batch in itertools.islice(batches, num_batches) for number in batch.tolist()]


@every_reader
@pytest.mark.parametrize("load", FACES)
def test_a_slow_read_is_overtaken(reader: MakeReader, load: Load) -> None:
    with slow_storage((LAST, 0)) as storage:
        # The first read of the last sample never comes back: this ends only if the second one counts.
        got = load(Numbers(SIZE), batch_size=8, num_concurrent_reads=4, read=POLICY, reader=reader(storage))
        assert got == np.arange(SIZE).reshape(-1, 8).tolist()
        assert storage.num_reads[LAST] == 2
        assert storage.gates.started == [(LAST, 0)]


@every_reader
def test_what_is_raced_is_counted(reader: MakeReader) -> None:
    with slow_storage((LAST, 0)) as storage, loader_of(reader(storage)) as loader:
        assert sum(sum(batch.tolist()) for batch in loader) == sum(range(SIZE))
        stats = loader.stats()
        assert stats.hedges >= 1  # a busy machine may make others slow
        assert stats.hedges_won >= 1
        assert storage.num_reads.total() == SIZE + stats.hedges
        assert stats.samples == SIZE


def test_the_slow_read_may_win_after_all() -> None:
    with slow_storage((LAST, 0), (LAST, 1)) as storage, loader_of(BlockingReader(storage)) as loader:
        batches = iter(loader)
        batches_before(batches, SIZE // 8 - 1)
        storage.gates.wait_started((LAST, 1))
        storage.gates.open((LAST, 0))
        assert next(batches).tolist()[-1] == LAST
        storage.gates.open((LAST, 1))
        assert next(batches, None) is None
        assert loader.stats().samples == SIZE


@every_reader
def test_an_error_of_one_is_no_error_if_the_other_succeeds(reader: MakeReader) -> None:
    for fails in (0, 1):
        with slow_storage((LAST, 0), (LAST, 1)) as storage, loader_of(reader(storage)) as loader:
            storage.gates.fail((LAST, fails), OSError("lost"))
            batches = iter(loader)
            batches_before(batches, SIZE // 8 - 1)
            storage.gates.wait_started((LAST, 0), (LAST, 1))
            storage.gates.open((LAST, fails))
            storage.gates.wait_finished((LAST, fails))
            storage.gates.open((LAST, 1 - fails))
            assert next(batches).tolist()[-1] == LAST


@every_reader
def test_if_both_fail_one_error_comes(reader: MakeReader) -> None:
    errors = {(LAST, 0): OSError("lost"), (LAST, 1): OSError("lost again")}
    with slow_storage(*errors) as storage, loader_of(reader(storage)) as loader:
        for key, error in errors.items():
            storage.gates.fail(key, error)
        batches = iter(loader)
        batches_before(batches, SIZE // 8 - 1)
        storage.gates.wait_started(*errors)
        storage.gates.open_all()
        *_, raised = of_iterator(batches)
        assert raised in errors.values()
        context = error_context(raised)
        assert context is not None
        assert (context.index, context.location, context.stage) == (LAST, LAST, "read")


@every_reader
def test_what_a_cache_gives_is_no_measure_of_reads(reader: MakeReader) -> None:
    cache = MemoryCache(1 << 20)
    with slow_storage((LAST, 0)) as storage:
        make = reader(storage)
        numbers: Any = Numbers(LAST)
        with DataLoader(numbers, 8, num_workers=2, reader=make, cache=cache) as filling:
            list(filling)
        with loader_of(make, cache=cache) as loader:
            batches = iter(loader)
            batches_before(batches, SIZE // 8 - 1)
            storage.gates.wait_started((LAST, 0))
            time.sleep(0.1)  # fifty times as long as a read would be waited for, had the others been seen
            storage.gates.open_all()
            assert len(list(batches)) == 1
            stats = loader.stats()
            assert (stats.cache_hits, stats.cache_misses, stats.hedges) == (LAST, 1, 0)
            assert storage.num_reads[LAST] == 1


def test_threads_that_lose_do_not_count() -> None:
    slow = {(number, 0) for number in range(64, 68)}  # as many as there are threads
    with slow_storage(*slow) as storage, loader_of(BlockingReader(storage), prefetch_factor=8) as loader:
        batches = iter(loader)
        got = batches_before(batches, 12)  # threads that wait for the storage have others in their places
        assert got == list(range(96))
        assert storage.gates.in_flight == 4


def test_no_more_threads_are_lent_than_there_are_reads() -> None:
    slow = {(number, 0) for number in range(64, SIZE)}
    with slow_storage(*slow) as storage, loader_of(BlockingReader(storage), prefetch_factor=8) as loader:
        batches = iter(loader)
        batches_before(batches, 8)
        storage.gates.wait_num_started(8)  # four that are raced, and four that nobody can race
        assert storage.gates.max_in_flight == 8
        storage.gates.open_all()
        assert [batch.tolist()[0] for batch in batches] == list(range(64, SIZE, 8))
        assert storage.gates.max_in_flight <= 8


def test_no_more_than_their_share_is_raced() -> None:
    slow = {(number, 0) for number in range(64, SIZE)}
    policy = ReadPolicy(hedge=Hedge(factor=1, min_delay_s=0.002, max_share=0.05), retries=0)
    with slow_storage(*slow) as storage, loader_of(BlockingReader(storage), read=policy, prefetch_factor=8) as loader:
        batches = iter(loader)
        batches_before(batches, 8)
        storage.gates.wait_num_started(4)
        storage.gates.open_all()
        of_iterator(batches)
        # A second read that has not begun when its batch is complete is not made.
        assert storage.num_reads.total() - SIZE <= loader.stats().hedges <= 0.05 * SIZE + 1


@every_reader
def test_nothing_is_raced_unless_asked_for(reader: MakeReader) -> None:
    with slow_storage((LAST, 0)) as storage, loader_of(reader(storage), read=None) as loader:
        batches = iter(loader)
        batches_before(batches, SIZE // 8 - 1)
        storage.gates.wait_started((LAST, 0))
        storage.gates.open_all()
        of_iterator(batches)
        assert storage.num_reads.total() == SIZE
        assert loader.stats().hedges == 0


@every_reader
def test_closing_while_two_reads_race(reader: MakeReader) -> None:
    with slow_storage((LAST, 0), (LAST, 1)) as storage:
        loader = loader_of(reader(storage))
        batches = iter(loader)
        batches_before(batches, SIZE // 8 - 1)
        storage.gates.wait_started((LAST, 0), (LAST, 1))
        closing = threading.Thread(target=loader.close)
        closing.start()
        storage.gates.open_all()
        closing.join()


def test_persistent_workers_remember_how_long_reads_take() -> None:
    with slow_storage((0, 1)) as storage, loader_of(BlockingReader(storage), persistent_workers=True) as loader:
        for _ in range(2):  # the first sample of the second epoch is slow
            assert sum(sum(batch.tolist()) for batch in loader) == sum(range(SIZE))


def test_files_are_raced_too(tmp_path: Any) -> None:
    for number in range(64):
        (tmp_path / str(number)).write_text(str(number))
    files = FileDataset([tmp_path / str(number) for number in range(64)], lambda data, _: int(data))
    assert by_for(files, batch_size=64, read=POLICY) == [list(range(64))]


BAD = [
    *({"quantile": value} for value in (0, 1, 1.5, "0.9", True, None)),
    *({"factor": value} for value in (0.9, float("inf"), float("nan"), "2")),
    *({"min_delay_s": value} for value in (-1, float("nan"), None)),
    *({"max_share": value} for value in (0, 1.1, -0.1, True)),
]


@pytest.mark.parametrize("arguments", BAD, ids=str)
def test_what_a_hedge_cannot_be(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ArgumentError, match=rf"{name} must be a number .*; got {value!r}"):
        Hedge(**arguments)


@pytest.mark.parametrize("hedge", [1, "yes", 0.05, Hedge], ids=str)
def test_what_is_no_hedge(hedge: Any) -> None:
    with pytest.raises(ArgumentError, match="hedge must be True, False or a Hedge; got"):
        ReadPolicy(hedge=hedge)


@pytest.mark.parametrize(("hedge", "expected"), [(None, None), (False, None), (True, Hedge()), (EAGER, EAGER)])
def test_what_a_hedge_may_be(hedge: Any, expected: Hedge | None) -> None:
    assert ReadPolicy(hedge=hedge).hedge_or_none == expected


@given(st.lists(st.floats(1e-5, 100), min_size=LEAST_READS, max_size=500), st.floats(0.01, 0.99))
def test_the_quantile_is_right_to_a_tenth(times: list[float], share: float) -> None:
    pace = Pace()
    for time_s in times:
        pace.note(time_s)
    found = pace.quantile_s(share)
    assert found is not None
    exact = np.quantile(times, share, method="inverted_cdf")
    assert exact / 1.1001 <= found <= exact * 1.1001


def test_the_quantile_follows() -> None:
    pace = Pace()
    for _ in range(10_000):
        pace.note(0.001)
    for _ in range(200):
        pace.note(0.1)
    assert 0.09 < (pace.quantile_s(0.95) or 0) < 0.12
    for _ in range(10_000):
        pace.note(0.001)
    assert 0.0009 < (pace.quantile_s(0.95) or 0) < 0.0012


def test_too_few_reads_say_nothing() -> None:
    pace = Pace()
    for _ in range(LEAST_READS - 1):
        pace.note(1.0)
        assert pace.quantile_s(0.5) is None


@given(st.lists(st.booleans(), max_size=2000), st.sampled_from([0.01, 0.05, 0.5, 1.0]))
def test_second_reads_stay_within_their_share(asks: list[bool], max_share: float) -> None:
    pace, num_taken = Pace(), 0
    for number, asks_now in enumerate(asks, 1):
        pace.note(0.01)
        num_taken += asks_now and pace.take(max_share)
        assert num_taken <= max_share * number
    assert num_taken >= min(sum(asks), 1) * (max_share * len(asks) >= 1 and asks[-1])


def test_second_reads_are_not_saved_up_for_ever() -> None:
    pace = Pace()
    for _ in range(100_000):
        pace.note(0.01)
    num_taken = sum(pace.take(0.05) for _ in range(1000))
    assert 0 < num_taken <= 50


@given(st.lists(st.sampled_from(["enter", "win", "leave"]), max_size=20))
def test_whatever_happens_a_race_is_settled_once(events: list[str]) -> None:
    race = Race(None, None, 0, "", Tries(ReadPolicy(retries=0)))
    num_running, num_settled = 1, 0
    for event in [*events, *["leave"] * 20]:
        if num_running == 0:
            break
        if event == "enter":
            entered = race.enter()
            assert entered == (num_settled == 0)
            num_running += entered
        else:
            num_settled += race.win() if event == "win" else race.leave()
            num_running -= 1
        assert num_settled <= 1
    assert num_settled == 1
