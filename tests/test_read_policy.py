"""Reads that fail for a passing reason are tried again, those that fail for good are not."""

import asyncio
import errno
import gc
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outcomes import EVERY_WAY, Load, by_for

from aioload import DataLoader, FileDataset, ReadPolicy, error_context
from aioload.engine import source
from aioload.errors import ArgumentError
from aioload.readers import read_file
from aioload.readers.policy import asked_for_s, passes

PASSING = ["EAGAIN", "EIO", "EMFILE", "ENFILE", "ESTALE", "ETIMEDOUT", "ECONNRESET", "EHOSTUNREACH", "EPIPE"]
LASTING = ["ENOENT", "EACCES", "EPERM", "EISDIR", "ENOTDIR", "ENAMETOOLONG", "ELOOP", "EINVAL"]


class Storage:
    """Reads files, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.num_failures: dict[str, int] = {}
        self.error: Callable[[str], Exception] = lambda path: OSError(errno.EIO, os.strerror(errno.EIO), path)
        self.num_reads: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, path: Any, admit: Any = None) -> bytes:
        name = Path(path).name
        with self._lock:
            self.num_reads[name] += 1
            fails = self.num_reads[name] <= self.num_failures.get(name, 0)
        if fails:
            raise self.error(str(path))
        return read_file(path, admit)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    storage = Storage()
    monkeypatch.setattr(source, "read_file", storage)
    return storage


@pytest.fixture
def numbers(tmp_path: Path) -> FileDataset[int]:
    for index in range(8):
        (tmp_path / str(index)).write_text(str(index))
    return FileDataset([tmp_path / str(index) for index in range(8)], lambda data, _: int(data))


quick: dict[str, Any] = {"backoff_s": 1e-4, "max_backoff_s": 1e-3}
every_way = pytest.mark.parametrize("load", EVERY_WAY)


@every_way
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_tried_again(storage: Storage, numbers: Any, load: Load, name: str) -> None:
    number = getattr(errno, name)
    storage.error = lambda path: OSError(number, os.strerror(number), path)
    storage.num_failures = {"2": 1, "5": 2, "6": 3}
    assert load(numbers, batch_size=4, read=ReadPolicy(**quick)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert storage.num_reads == Counter({str(index): 1 for index in range(8)}) + Counter({"2": 1, "5": 2, "6": 3})


@every_way
@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_is_raised_at_once(storage: Storage, numbers: Any, load: Load, name: str) -> None:
    number = getattr(errno, name)
    storage.error = lambda path: OSError(number, os.strerror(number), path)
    storage.num_failures = {"2": 1}
    got = load(numbers, batch_size=4)
    assert got[1:] == [[4, 5, 6, 7]]
    assert isinstance(got[0], OSError)
    assert got[0].errno == number
    assert storage.num_reads["2"] == 1


@every_way
def test_when_no_try_is_left_the_last_error_is_the_samples(storage: Storage, numbers: Any, load: Load) -> None:
    storage.num_failures = {"2": 10}
    for retries in (0, 1, 4):
        storage.num_reads.clear()
        got = load(numbers, batch_size=4, read=ReadPolicy(retries=retries, **quick))
        assert got[1:] == [[4, 5, 6, 7]]
        error = got[0]
        assert isinstance(error, OSError)
        assert (error.errno, Path(error.filename).name) == (errno.EIO, "2")
        context = error_context(error)
        assert context is not None
        assert context[:1] + context[2:] == (2, "read")
        assert storage.num_reads["2"] == retries + 1
        told = [note for note in error.__notes__ if note.startswith(f"It was read {retries + 1} times")]
        assert len(told) == (retries > 0)


@every_way
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reader_of_the_users_is_asked_again_too(numbers: Any, load: Load, is_async: bool) -> None:
    storage = Storage()

    class Blocking:
        def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return storage(location)

    class Awaited:
        async def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return storage(location)

    reader = Awaited() if is_async else Blocking()
    storage.num_failures = {"2": 2, "5": 3}
    got = load(numbers, batch_size=4, reader=reader, read=ReadPolicy(retries=2, **quick))
    assert got[0] == [0, 1, 2, 3]
    assert isinstance(got[1], OSError)
    assert any(note.startswith("It was read 3 times") for note in got[1].__notes__)
    assert (storage.num_reads["2"], storage.num_reads["5"]) == (3, 3)


def test_by_default_reads_are_tried_three_times_more(storage: Storage, numbers: Any) -> None:
    storage.num_failures = {"2": 3}
    loader: DataLoader[Any] = DataLoader(numbers, 8, num_workers=2)
    assert [batch.tolist() for batch in loader] == [list(range(8))]
    assert loader.stats().retries == 3
    assert loader.read == ReadPolicy()


def test_what_is_worth_a_try_can_be_chosen(storage: Storage, numbers: Any) -> None:
    storage.error = lambda _: LookupError("of a library")
    storage.num_failures = {"2": 1}
    assert isinstance(by_for(numbers, batch_size=8)[0], LookupError)
    storage.num_reads.clear()
    policy = ReadPolicy(retry_on=lambda exc: isinstance(exc, LookupError), **quick)
    assert by_for(numbers, batch_size=8, read=policy) == [list(range(8))]


@every_way
def test_code_of_the_users_is_not_called_again(tmp_path: Path, load: Load) -> None:
    calls: Counter[str] = Counter()

    class Failing:
        def __len__(self) -> int:
            return 1

        def location(self, _: int) -> str:
            calls["location"] += 1
            if where == "location":
                raise OSError(errno.EIO, "of the user's")
            return str(tmp_path / "file")

        def decode(self, _: bytes, __: int) -> int:
            calls["decode"] += 1
            raise OSError(errno.EIO, "of the user's")

    (tmp_path / "file").write_text("")
    for where in ("location", "decode"):
        calls.clear()
        (error,) = load(Failing(), read=ReadPolicy(**quick))
        assert isinstance(error, OSError)
        assert calls["decode"] == (where == "decode")
        # A failed sample's location is asked for once more, for the message.
        assert calls["location"] <= 2


@pytest.mark.parametrize("num_workers", [0, 3])
def test_an_epoch_with_faults_is_the_same_as_one_without(storage: Storage, tmp_path: Path, num_workers: int) -> None:
    generator = np.random.default_rng(0)
    paths = [tmp_path / str(index) for index in range(500)]
    for path in paths:
        path.write_bytes(generator.bytes(64))
    files: Any = FileDataset(paths, lambda data, _: np.frombuffer(data, np.uint8).copy())

    def epoch() -> list[Any]:
        with DataLoader(files, 16, shuffle=True, seed=1, num_workers=num_workers, read=ReadPolicy(**quick)) as loader:
            return list(loader)

    without = epoch()
    storage.num_reads.clear()
    storage.num_failures = dict.fromkeys(random.Random(0).sample([path.name for path in paths], 10), 1)
    faulty = epoch()
    assert all(torch.equal(mine, other) for mine, other in zip(without, faulty, strict=True))
    assert sum(storage.num_reads.values()) == 510


def test_what_fails_for_good_is_skipped_after_all_tries(storage: Storage, numbers: Any) -> None:
    storage.num_failures = {"2": 99, "3": 2}
    loader: DataLoader[Any] = DataLoader(
        numbers, 4, num_workers=2, on_error="skip", read=ReadPolicy(retries=2, **quick)
    )
    assert [batch.tolist() for batch in loader] == [[0, 1, 3], [4, 5, 6, 7]]
    assert [record.index for record in loader.errors()] == [2]
    assert (loader.stats().errors, loader.stats().retries) == (1, 4)


def test_a_pause_does_not_keep_a_closed_loaders_thread(storage: Storage, numbers: Any) -> None:
    storage.num_failures = {"0": 99}
    policy = ReadPolicy(backoff_s=1e6, max_backoff_s=1e6)
    loader: DataLoader[Any] = DataLoader(numbers, 1, num_workers=2, num_concurrent_reads=2, read=policy, in_order=False)
    batches = iter(loader)
    assert int(next(batches)) > 0  # others go on
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 60
    assert not [each for each in threading.enumerate() if each.name.startswith("aioload-read")]


def test_a_coroutine_that_pauses_is_cancelled_with_the_loader(numbers: Any) -> None:
    storage = Storage()

    class Awaited:
        async def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return storage(location)

    storage.num_failures = {"0": 99}
    policy = ReadPolicy(backoff_s=1e6, max_backoff_s=1e6)
    loader: DataLoader[Any] = DataLoader(numbers, num_workers=2, read=policy, reader=Awaited(), in_order=False)
    assert int(next(iter(loader))) > 0
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 60


class Failing(OSError):
    """Its own, so that it can be referred to weakly."""


def met_by_for(loader: DataLoader[Any]) -> bool:
    try:
        list(loader)
    except Failing:
        return True
    return False


def met_by_async_for(loader: DataLoader[Any]) -> bool:
    async def drain() -> bool:
        try:
            async for _ in loader:
                pass
        except Failing:
            return True
        return False

    return asyncio.run(drain())


@pytest.mark.parametrize("meet", [met_by_for, met_by_async_for])
@pytest.mark.parametrize(("is_async", "num_workers"), [(False, 0), (False, 2), (True, 2)])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_an_error_that_is_let_go_of_is_gone_at_once(
    numbers: Any, meet: Callable[[DataLoader[Any]], bool], is_async: bool, number: int, num_workers: int
) -> None:
    """It has the iterator in its traceback: threads would go on until a garbage collection."""
    errors = []

    def fail(location: Any) -> bytes:
        error = Failing(number, "of the reader's", str(location))
        errors.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    class Blocking:
        def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return fail(location)

    class Awaited:
        async def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return fail(location)

    reader = Awaited() if is_async else Blocking()
    arguments: dict[str, Any] = {"num_workers": num_workers, "reader": reader, "read": ReadPolicy(**quick)}
    with DataLoader(numbers, sampler=[0], **arguments) as loader:
        gc.collect()
        gc.disable()
        try:
            assert meet(loader)
            deadline = time.monotonic() + 10
            while any(each() is not None for each in errors) and time.monotonic() < deadline:
                time.sleep(0.001)  # the thread that met it may be about to forget it
            assert [each() for each in errors if each() is not None] == []
        finally:
            gc.enable()


def test_pauses_are_drawn_from_ever_longer_spans() -> None:
    policy = ReadPolicy(backoff_s=0.1, max_backoff_s=1.0)
    for number, longest in ((0, 0.1), (1, 0.2), (3, 0.8), (4, 1.0), (10**6, 1.0)):
        pauses = [policy.pause_s(number) for _ in range(2000)]
        assert 0 <= min(pauses) < 0.1 * longest
        assert 0.9 * longest < max(pauses) <= longest
    assert ReadPolicy(backoff_s=0).pause_s(3) == 0


def test_an_error_can_ask_for_a_longer_pause() -> None:
    error = OSError(errno.EBUSY, "busy")
    assert asked_for_s(error) == 0
    for seconds, expected in ((3, 3.0), (0.5, 0.5), (0, 0.0)):
        error.retry_after_s = seconds  # type: ignore[attr-defined]
        assert asked_for_s(error) == expected
    for nonsense in (-1, float("inf"), float("nan"), "3", None, True):
        error.retry_after_s = nonsense  # type: ignore[attr-defined]
        assert asked_for_s(error) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_read_pauses_for_as_long_as_its_error_asks(numbers: Any, is_async: bool) -> None:
    begun: list[float] = []

    def fetch(location: Any) -> bytes:
        begun.append(time.monotonic())
        if len(begun) > 1:
            return read_file(location)
        error = OSError(errno.EBUSY, "busy")
        error.retry_after_s = 0.1  # type: ignore[attr-defined]
        raise error

    class Blocking:
        def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return fetch(location)

    class Awaited:
        async def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            return fetch(location)

    reader = Awaited() if is_async else Blocking()
    policy = ReadPolicy(backoff_s=0, max_backoff_s=0)
    assert by_for(numbers, sampler=[0], reader=reader, read=policy) == [[0]]
    assert begun[1] - begun[0] >= 0.1


def test_who_asks_for_too_long_is_not_waited_for(numbers: Any) -> None:
    asked = OSError(errno.EBUSY, "busy")
    asked.retry_after_s = 601  # type: ignore[attr-defined]

    class Refused:
        def read(self, location: Any, offset: int = 0, length: int | None = None) -> bytes:
            raise asked

    with DataLoader(numbers, reader=Refused()) as loader:
        with pytest.raises(OSError, match="busy"):
            next(iter(loader))
        assert loader.stats().retries == 0


def test_pauses_do_not_draw_from_pythons_generator() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    ReadPolicy().pause_s(0)
    assert random.random() == expected


def test_time_outs_and_lost_connections_pass_and_other_exceptions_do_not() -> None:
    assert passes(TimeoutError())
    assert passes(ConnectionResetError())
    assert not passes(ValueError())
    assert not passes(OSError("without a number"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retries": -1}, "retries must be a whole number of at least 0, got -1"),
        ({"retries": 1.5}, "retries must be a whole number"),
        ({"backoff_s": -1}, "backoff_s must be a number of seconds from 0 up; got -1"),
        ({"backoff_s": "1"}, "backoff_s must be a number of seconds"),
        ({"max_backoff_s": float("nan")}, "max_backoff_s must be a number of seconds from 0 up; got nan"),
        ({"max_backoff_s": True}, "max_backoff_s must be a number of seconds from 0 up; got True"),
        ({"retry_on": (OSError,)}, "retry_on must be a function that is given the exception .*; got"),
        ({"retry_on": OSError}, "retry_on must be a function that is given the exception .*; got <class 'OSError'>"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ReadPolicy(**arguments)


def test_a_policy_must_be_one() -> None:
    with pytest.raises(ArgumentError, match="read must be a ReadPolicy; got 3"):
        DataLoader(range(3), read=3)  # type: ignore[arg-type]
