"""Threads that pull jobs: as many of them work as is of use, and none of them keeps the others from it."""

import contextlib
import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from interrupting import InterruptedAt

from aioload.engine import pools, threads
from aioload.engine.fetchers import share_out
from aioload.engine.pools import Job, ThreadPool, Worker
from aioload.stats import Ledger
from aioload.testing import Gates


def job(function: Callable[..., object], *arguments: Any) -> Job:
    def work(*_: Any) -> None:
        function(*arguments)

    return work, None, None, None


@contextmanager
def pool_of(size: int, awake: int) -> Iterator[tuple[ThreadPool, list[BaseException]]]:
    """Give a pool, and where its crashes will be."""
    crashes: list[BaseException] = []
    pool = ThreadPool("test", size, Ledger(), awake=awake, on_crash=lambda exc, _: crashes.append(exc))
    try:
        yield pool, crashes
    finally:
        pool.close()
        pool.join(time.monotonic() + 60)


def test_one_thread_does_the_jobs_in_order() -> None:
    done: list[int] = []
    finished = threading.Event()
    with pool_of(1, awake=1) as (pool, crashes):
        pool.submit([job(done.append, number) for number in range(100)], 100)
        pool.submit([job(finished.set)], 1)
        assert finished.wait(60)
    assert done == list(range(100))
    assert crashes == []


@pytest.mark.parametrize(("size", "awake"), [(4, 4), (4, 2), (8, 1)])
def test_as_many_work_as_may_be_awake(size: int, awake: int) -> None:
    gates = Gates()
    with pool_of(size, awake) as (pool, _):
        pool.submit([job(gates.pass_through, key) for key in range(size)], size)
        gates.wait_num_started(awake)
        assert gates.in_flight == awake
        assert repr(pool) == f"<ThreadPool test of {size}, {awake}/{awake} awake, {size - awake} jobs queued>"
        gates.open_all()
        gates.wait_finished(*range(size))
        assert gates.max_in_flight <= size


@pytest.mark.parametrize("brings_more", [False, True], ids=["looks", "brings more, and so looks too"])
def test_all_work_when_those_awake_are_stuck_and_somebody_looks(
    brings_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)
    gates = Gates()
    with pool_of(3, awake=1) as (pool, _):
        pool.submit([job(gates.pass_through, "stuck")], 1)
        gates.wait_started("stuck")
        pool.submit([job(gates.pass_through, "behind")], 1)
        deadline = time.monotonic() + 60
        while "behind" not in gates.started:  # who has just come to the gate still runs for a moment
            assert time.monotonic() < deadline
            if brings_more:
                pool.submit([job(gates.pass_through, "more")], 1)
            else:
                pool.widen_if_stuck()
            time.sleep(0)
        gates.open_all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not say what a thread does")
@pytest.mark.parametrize("surely_after_s", [60.0, 0.0])
def test_who_computes_is_not_stuck_before_long(surely_after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor who would if it had a processor: more threads would only contend with it."""
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)
    monkeypatch.setattr(pools, "SURELY_STUCK_AFTER_S", surely_after_s)
    begun = threading.Event()

    def compute() -> None:
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"salt", 3_000_000)  # without the interpreter, for a second

    with pool_of(3, awake=1) as (pool, _):
        pool.submit([job(compute), job(time.perf_counter)], 2)
        assert begun.wait(60)
        time.sleep(0.01)  # until it computes
        pool.widen_if_stuck()
        assert pool.limit == (1 if surely_after_s else 3)


def test_a_thread_that_is_stuck_does_not_count_among_those_that_may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are tiny are for one thread; but that must not be one that waits for a dead mount."""
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)
    gates = Gates()
    with pool_of(2, awake=2) as (pool, _):
        pool.submit([job(gates.pass_through, "stuck")], 1)
        gates.wait_started("stuck")
        for _ in range(300):  # for long enough that the pool is narrowed
            done = threading.Event()
            pool.submit([*[job(time.perf_counter) for _ in range(200)], job(done.set)], 201)
            assert done.wait(20)
        assert pool.limit == 2
        gates.open_all()


def visit(worker: Worker, gates: Any, start: int, stop: int) -> None:
    """Come to some gates, one after the other, unless another thread takes the later ones over."""
    rest = share_out(worker, visit, gates, start, stop)
    for position in iter(rest.pop, None):
        gates.pass_through(position)


@pytest.mark.parametrize("others_work", [False, True])
def test_what_is_left_of_a_job_that_is_stuck_is_taken_over(others_work: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)
    gates = Gates()
    gates.open(*range(1, 5))
    with pool_of(2, awake=2) as (pool, _):
        pool.submit([(visit, gates, 0, 5)], 1)
        gates.wait_started(0)
        deadline = time.monotonic() + 60
        while len(gates.finished) < 4:
            assert time.monotonic() < deadline
            if others_work:
                done = threading.Event()
                pool.submit([*[job(time.perf_counter) for _ in range(200)], job(done.set)], 201)
                assert done.wait(20)
            else:
                pool.widen_if_stuck()
                time.sleep(0)
        assert sorted(gates.started) == [0, 1, 2, 3, 4]
        gates.open_all()
        gates.wait_finished(0)
        assert len(gates.finished) == 5


def test_an_interrupt_while_something_is_taken_over_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits has what is left of a job taken over, in its thread."""
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)
    monkeypatch.setattr(pools, "SURELY_STUCK_AFTER_S", 0.0)
    for number in itertools.count(1):
        gates = Gates()
        gates.open(*range(1, 5))
        with pool_of(2, awake=2) as (pool, _):
            pool.submit([(visit, gates, 0, 5)], 1)
            gates.wait_started(0)
            interrupt = InterruptedAt(number)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                pool.widen_if_stuck()
            deadline = time.monotonic() + 20
            while len(gates.finished) < 4:
                assert time.monotonic() < deadline, number
                pool.widen_if_stuck()
                time.sleep(0)
            gates.open_all()
            gates.wait_finished(*range(5))
            assert sorted(gates.started) == list(range(5))
        if interrupt.num_places < number:
            break
    assert number > 20


def test_what_is_left_of_a_job_stays_where_there_is_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.0)
    gates = Gates()
    with pool_of(1, awake=1) as (pool, _):
        pool.submit([(visit, gates, 0, 5)], 1)
        gates.wait_started(0)
        for _ in range(100):
            pool.widen_if_stuck()
        assert repr(pool) == "<ThreadPool test of 1, 1/1 awake, 0 jobs queued>"
        gates.open_all()
        gates.wait_finished(*range(5))
        assert gates.finished == [0, 1, 2, 3, 4]


def test_a_job_is_shared_by_taking_each_position_once() -> None:
    """By threads that take from both ends at once."""
    taken: list[int] = []
    with pool_of(4, awake=4) as (pool, _):

        def take(worker: Worker, batch: Any, start: int, stop: int) -> None:
            for position in iter(share_out(worker, take, batch, start, stop).pop, None):
                taken.append(position)
                if position % 10 == 0:
                    time.sleep(0)

        for start in range(0, 100_000, 1000):
            pool.submit([(take, None, start, start + 1000)], 1)
            pool.resume([(pool._take_over, pool._shares(pool.workers), None, None)])
        while not pool.is_idle():
            time.sleep(0.001)
    assert sorted(taken) == list(range(100_000))


def test_a_thread_that_is_about_to_begin_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1, awake=1) as (pool, _):
        with monkeypatch.context() as patch:
            patch.setattr(threads, "start", lambda _: None)  # it does not get the processor
            pool.submit([job(int)], 1)
        assert len(pool.workers) == 1
        assert pool._hanging(time.perf_counter()) == []


def test_a_thread_that_is_being_woken_up_is_not_stuck() -> None:
    with pool_of(1, awake=1) as (pool, _):
        pool.submit([job(int)], 1)
        while not pool.is_idle():
            time.sleep(0.001)
        (worker,) = pool.workers
        waits_at, worker.park = worker.park, threading.Lock()
        worker.park.acquire()
        time.sleep(0.01)  # longer than one that works may be at a job
        pool.submit([job(int)], 1)
        assert pool._hanging(time.perf_counter()) == []
        waits_at.release()


def test_a_job_that_breaks_its_promise_is_reported_and_the_thread_goes_on() -> None:
    error, finished = LookupError(), threading.Event()

    def fail() -> None:
        raise error

    with pool_of(1, awake=1) as (pool, crashes):
        pool.submit([job(fail), job(finished.set)], 2)
        assert finished.wait(60)
    assert crashes == [error]


def test_closing_drops_what_is_queued_and_lets_what_runs_end() -> None:
    gates = Gates()
    with pool_of(2, awake=2) as (pool, _):
        pool.submit([job(gates.pass_through, key) for key in range(10)], 10)
        gates.wait_num_started(2)
        pool.close()
        pool.submit([job(gates.pass_through, "late")], 1)
        gates.open_all()
        pool.join(time.monotonic() + 60)
    assert sorted(gates.finished) == [0, 1]
    assert not any(thread.name.startswith("aioload-test") for thread in threading.enumerate())


class ClosedMeanwhile:
    """What a thread sleeps on, of a pool that is closed when somebody is about to wake the thread up."""

    def __init__(self, pool: ThreadPool, lock: Any) -> None:
        self.locked, self._pool, self._lock = lock.locked, pool, lock
        self._is_closing = False

    def release(self) -> None:
        if self._is_closing:
            self._lock.release()
        else:
            self._is_closing = True
            self._pool.close()
            raise RuntimeError("release unlocked lock")  # as of one that has been released already


def test_a_pool_may_be_closed_while_a_thread_is_woken_up() -> None:
    with pool_of(1, awake=1) as (pool, crashes):
        done = threading.Event()
        pool.submit([job(done.set)], 1)
        assert done.wait(60)
        while not pool.is_idle():
            time.sleep(0.001)
        (worker,) = pool.workers
        worker.park = ClosedMeanwhile(pool, worker.park)  # type: ignore[assignment]
        pool.submit([job(done.clear)], 1)
        pool.join(time.monotonic() + 60)
    assert done.is_set()
    assert crashes == []


def test_a_thread_that_was_chosen_and_never_woken_up_ends_with_the_pool() -> None:
    """As if an interrupt had come in between."""
    with pool_of(2, awake=2) as (pool, _):
        done = threading.Event()
        pool.submit([job(done.set)], 1)
        assert done.wait(60)
        while not any(worker.thread is not None for worker in pool._idle):
            time.sleep(0.001)
        pool._idle.clear()
        pool.close()
        pool.join(time.monotonic() + 60)
    assert not any(thread.name.startswith("aioload-test") for thread in threading.enumerate())
