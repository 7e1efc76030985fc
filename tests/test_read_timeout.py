"""A read that the storage does not answer in time is given up, and tried again on another thread."""

import errno
import time
from collections import Counter
from typing import Any

import pytest
from outcomes import EVERY_WAY, FACES, Load, of_iterator
from scripts import Nursery
from waiting import READERS, AsyncReader, BlockingReader, MakeReader, Numbers, Storage

from aioload import DataLoader, ReadPolicy, error_context
from aioload.errors import ArgumentError, ReadTimeoutError

POLICY = ReadPolicy(timeout_s=0.05, retries=2, backoff_s=0.001)
SIZE = 16


every_reader = pytest.mark.parametrize("reader", READERS)


def stuck_storage(num_stuck: dict[int, int]) -> Storage:
    """Return one of which the first few reads of some locations are not answered until the end."""
    return Storage(lambda location, number: number < num_stuck.get(location, 0))


def loader_of(reader: Any, **arguments: Any) -> DataLoader[int]:
    arguments = {"num_workers": 2, "num_concurrent_reads": 4, "read": POLICY, **arguments}
    dataset: Any = Numbers(SIZE)
    return DataLoader(dataset, 4, reader=reader, **arguments)


@every_reader
def test_a_read_that_is_not_answered_is_tried_again(reader: MakeReader) -> None:
    with stuck_storage({2: 1, 5: 2}) as storage, loader_of(reader(storage)) as loader:
        assert of_iterator(iter(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        stats = loader.stats()
        assert (stats.read_timeouts, stats.retries, stats.samples) == (3, 3, SIZE)
        assert storage.num_reads == Counter(range(SIZE)) + Counter({2: 1, 5: 2})
        storage.gates.open_all()


@pytest.mark.parametrize("load", EVERY_WAY)
def test_an_async_read_can_be_given_up_anywhere(load: Load) -> None:
    with stuck_storage({2: 1, 5: 2}) as storage:
        got = load(Numbers(SIZE), batch_size=8, read=POLICY, reader=AsyncReader(storage))
        assert got == [list(range(8)), list(range(8, 16))]
        assert storage.num_reads == Counter(range(SIZE)) + Counter({2: 1, 5: 2})


@every_reader
def test_when_no_try_is_left_an_error_comes_in_its_place(reader: MakeReader) -> None:
    with stuck_storage({5: 3}) as storage, loader_of(reader(storage)) as loader:
        first, error, *others = of_iterator(iter(loader))
        assert [first, *others] == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]]
        assert isinstance(error, ReadTimeoutError)
        assert isinstance(error, TimeoutError)
        assert (error.errno, error.filename) == (errno.ETIMEDOUT, 5)
        assert "No answer from the storage within 0.05 s" in str(error)
        assert any("read 3 times" in note for note in error.__notes__)
        context = error_context(error)
        assert context is not None
        assert (context.index, context.location, context.stage) == (5, 5, "read")
        storage.gates.open_all()


@every_reader
def test_what_is_stuck_can_be_skipped(reader: MakeReader) -> None:
    with stuck_storage({5: 3, 6: 3}) as storage, loader_of(reader(storage), on_error="skip") as loader:
        assert of_iterator(iter(loader)) == [[0, 1, 2, 3], [4, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        assert [(error.index, type(error.error)) for error in loader.errors()] == [
            (5, ReadTimeoutError),
            (6, ReadTimeoutError),
        ]
        storage.gates.open_all()


@every_reader
def test_who_says_that_time_outs_last_gets_them_at_once(reader: MakeReader) -> None:
    policy = ReadPolicy(timeout_s=0.05, retry_on=lambda exc: not isinstance(exc, ReadTimeoutError))
    with stuck_storage({5: 1}) as storage, loader_of(reader(storage), read=policy) as loader:
        _, error, *_ = of_iterator(iter(loader))
        assert isinstance(error, ReadTimeoutError)
        assert storage.num_reads[5] == 1
        storage.gates.open_all()


def test_threads_that_are_stuck_are_replaced() -> None:
    stuck = dict.fromkeys(range(4), 1)  # as many as there are threads
    with stuck_storage(stuck) as storage, loader_of(BlockingReader(storage)) as loader:
        assert of_iterator(iter(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        assert storage.gates.in_flight == 4
        storage.gates.open_all()


def test_a_storage_that_answers_nothing_fails_in_the_end() -> None:
    stuck = dict.fromkeys(range(SIZE), 100)
    policy = ReadPolicy(timeout_s=0.05, retries=10, backoff_s=0)
    with stuck_storage(stuck) as storage, loader_of(BlockingReader(storage), read=policy) as loader:
        got = [error for error in of_iterator(iter(loader)) if isinstance(error, ReadTimeoutError)]
        # Each thread that is stuck has been replaced once; what those wait for fails, and what nobody can read too.
        assert storage.gates.max_in_flight == 8
        assert len(got) == SIZE // 4
        assert any(
            "4 reads are stuck already, and no more threads are started" in str(error.__notes__) for error in got
        )
        storage.gates.open_all()


def test_who_answers_late_is_welcome_while_no_one_else_has() -> None:
    policy = ReadPolicy(timeout_s=0.05, retries=1, backoff_s=0)
    with stuck_storage({0: 2}) as storage, loader_of(BlockingReader(storage), read=policy) as loader:
        batches = iter(loader)
        storage.gates.wait_started((0, 1))  # the second try
        storage.gates.open((0, 0))  # the first one answers
        # Sample 0 is there by that, or has timed out for good in the moment before.
        first, *others = of_iterator(batches)
        assert first == [0, 1, 2, 3] or isinstance(first, ReadTimeoutError)
        assert len(others) == 3
        storage.gates.open_all()


def test_time_outs_and_second_reads_go_together() -> None:
    policy = ReadPolicy(timeout_s=0.2, retries=2, backoff_s=0, hedge=True)
    with stuck_storage({9: 2}) as storage, loader_of(BlockingReader(storage), read=policy) as loader:
        assert of_iterator(iter(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        storage.gates.open_all()


class LateCache:
    """Answers, but not in time, what it has and what it has not."""

    def __init__(self) -> None:
        self.kept: dict[Any, bytes] = {}

    def get(self, location: Any) -> bytes | None:
        if location == 3:
            time.sleep(0.15)
        return self.kept.get(location)

    def put(self, location: Any, data: bytes) -> None:
        if location == 5:
            time.sleep(0.15)
        self.kept[location] = data


@every_reader
def test_a_time_out_is_of_the_storage_and_not_of_the_cache(reader: MakeReader) -> None:
    with stuck_storage({}) as storage, loader_of(reader(storage), cache=LateCache()) as loader:
        for _ in range(2):
            assert sum(sum(batch.tolist()) for batch in loader) == sum(range(SIZE))
        assert storage.num_reads == Counter(range(SIZE))
        stats = loader.stats()
        assert (stats.cache_hits, stats.cache_misses, stats.read_timeouts) == (SIZE, SIZE, 0)


@pytest.mark.parametrize("load", FACES)
def test_a_time_out_of_the_readers_own_stays_what_it_is(load: Load) -> None:
    error = TimeoutError("the reader's")

    class Impatient:
        async def read(self, location: int, offset: int = 0, length: int | None = None) -> bytes:
            if location == 3:
                raise error
            return b"%d" % location

    got = load(Numbers(SIZE), batch_size=8, reader=Impatient(), read=ReadPolicy(timeout_s=60, retries=0))
    assert got[0] is error


def test_a_process_ends_though_reads_are_stuck(nursery: Nursery) -> None:
    script = """
    import threading, time
    from aioload import DataLoader, ReadPolicy
    from aioload.errors import ReadTimeoutError

    class Dead:
        def read(self, location, offset=0, length=None):
            threading.Event().wait()

    class Numbers:
        def __len__(self): return 4
        def location(self, index): return index
        def decode(self, data, index): return index

    loader = DataLoader(Numbers(), 2, reader=Dead(), read=ReadPolicy(timeout_s=0.05, retries=1), num_concurrent_reads=2)
    batches = iter(loader)
    for _ in range(2):
        try:
            next(batches)
        except ReadTimeoutError as error:
            print(error.filename)
    """
    assert nursery.run_quietly(script).split() in (["0", "2"], ["0", "None"])


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), True, "1"], ids=str)
def test_what_a_time_out_cannot_be(timeout_s: Any) -> None:
    with pytest.raises(ArgumentError, match=f"timeout_s must be a number of seconds above 0.*got {timeout_s!r}"):
        ReadPolicy(timeout_s=timeout_s)
