"""What user code raises reaches the caller as the very object, with a note of where in the data it came from."""

import asyncio
import dataclasses
import traceback
from pathlib import Path
from typing import Any

import failing
import pytest
from failing import CASES, MakeCase
from outcomes import EVERY_WAY, FACES, of_iterator

from aioload import DataLoader, ErrorContext, error_context
from aioload.errors import StoppedIterationError, annotate


class BrokenSample(Exception):
    """Cannot be made from its ``args``, as a process pool would try to."""

    def __init__(self, *, number: int, reason: str) -> None:
        super().__init__(f"sample {number} is broken: {reason}")
        self.number, self.reason = number, reason


every_case = pytest.mark.parametrize("make_case", CASES)


@every_case
def test_the_very_exception_comes_with_its_fields_traceback_and_place(make_case: MakeCase, tmp_path: Path) -> None:
    for load in EVERY_WAY:
        error = BrokenSample(number=2, reason="bits flipped")
        case = make_case(error, tmp_path)
        assert load(case.dataset, **case.arguments) == [*case.before, error, *case.after]
        assert (error.number, error.reason) == (2, "bits flipped")
        assert "user_code" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert error_context(error) == case.context
        assert error.__notes__ == [case.context.describe()]


@every_case
def test_what_is_no_exception_comes_too(make_case: MakeCase, tmp_path: Path) -> None:
    kinds: list[type[BaseException]] = [SystemExit, GeneratorExit, asyncio.CancelledError, BaseException]
    # Where there are no threads, Ctrl-C and a KeyboardInterrupt of the dataset's own are one.
    runs = [(load, kind) for load in EVERY_WAY for kind in kinds] + [(load, KeyboardInterrupt) for load in FACES]
    for load, kind in runs:
        error = kind(3)
        case = make_case(error, tmp_path)
        assert load(case.dataset, **case.arguments) == [*case.before, error, *case.after]
        assert error.args == (3,)
        assert error_context(error) == case.context


@pytest.mark.parametrize("make_case", [case for case in CASES if case not in (failing.awaited, failing.iterable)])
def test_stop_iteration_never_ends_the_loop_in_silence(make_case: MakeCase, tmp_path: Path) -> None:
    for load in EVERY_WAY:
        for stop in (StopIteration("no more"), StopAsyncIteration("no more")):
            case = make_case(stop, tmp_path)
            before, error, after = around_the_error(load(case.dataset, **case.arguments))
            assert (before, after) == (case.before, case.after)
            assert isinstance(error, StoppedIterationError)
            assert error.__cause__ is stop
            assert error_context(error) == case.context


def test_stop_iteration_in_a_coroutine_is_an_error_already() -> None:
    for load in EVERY_WAY:
        stop = StopIteration()
        before, error, after = around_the_error(load(failing.AsyncNumbers(stop)))
        assert (before, type(error), error.__cause__, after) == ([[0], [1]], RuntimeError, stop, [[3]])
        assert error_context(error) == ErrorContext(2, None, "fetch")


def around_the_error(got: list[Any]) -> tuple[list[Any], BaseException, list[Any]]:
    (position,) = (position for position, each in enumerate(got) if isinstance(each, BaseException))
    return got[:position], got[position], got[position + 1 :]


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen(Exception):
    """Refuses every attribute, a traceback set by assignment included."""

    number: int


class WithSlots(Exception):
    __slots__ = ("number",)


class Noteless(Exception):
    def add_note(self, note: str) -> None:
        raise NotImplementedError(note)


class Strange(Exception):
    __notes__ = ("of its class",)  # type: ignore[assignment]  # strange as it is

    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__

    def __setattr__(self, name: str, value: object) -> None:
        raise SystemExit(name)


@every_case
def test_an_exception_may_refuse_attributes_and_notes(make_case: MakeCase, tmp_path: Path) -> None:
    kinds: list[type[Exception]] = [Frozen, WithSlots, Noteless, Strange]
    for load in EVERY_WAY:
        for kind in kinds:
            error = kind(7)
            case = make_case(error, tmp_path)
            before, caught, after = around_the_error(load(case.dataset, **case.arguments))
            assert caught is error
            assert (before, after) == (case.before, case.after)
            assert error_context(error) == case.context
            assert case.context.describe() in error.__notes__


def test_an_index_that_cannot_be_shown_keeps_no_error_back() -> None:
    class Index:
        def __repr__(self) -> str:
            raise ValueError

    class Anything:
        def __getitem__(self, index: Any) -> Any:
            raise error

    index, error = Index(), LookupError()
    for load in EVERY_WAY:
        assert load(Anything(), sampler=[index]) == [error]
        assert error_context(error) == ErrorContext(index, None, "fetch")


class Cached:
    """Raises one and the same object for each odd index."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index % 2:
            raise self.error
        return index


def test_an_exception_that_is_raised_again_tells_where_it_came_from_last() -> None:
    error = BrokenSample(number=0, reason="cached")
    error.add_note("a note of the user's")
    for load in EVERY_WAY:
        assert load(Cached(error)) == [[0], error, [2], error]
    with DataLoader(Cached(error), num_workers=2) as loader:
        batches = iter(loader)
        for index in (1, 3):
            assert next(batches).tolist() == [index - 1]
            with pytest.raises(BrokenSample) as caught:
                next(batches)
            assert caught.value is error
            assert error_context(error) == ErrorContext(index, None, "fetch")
            assert error.__notes__ == ["a note of the user's", ErrorContext(index, None, "fetch").describe()]


def test_an_exception_group_of_the_users_stays_one() -> None:
    for load in EVERY_WAY:
        error = ExceptionGroup("two", [ValueError(1), ValueError(2)])
        assert load(failing.AsyncNumbers(error)) == [[0], [1], error, [3]]


@pytest.mark.parametrize("make_case", [failing.map_style, failing.awaited, failing.decode, failing.getitems])
def test_after_an_error_the_loader_can_be_iterated_anew(make_case: MakeCase, tmp_path: Path) -> None:
    for persistent in (False, True):
        error = BrokenSample(number=2, reason="each time")
        case = make_case(error, tmp_path)
        with DataLoader(case.dataset, num_workers=2, persistent_workers=persistent, **case.arguments) as loader:
            for _ in range(3):
                assert of_iterator(iter(loader)) == [*case.before, error, *case.after]
            batches = iter(loader)
            for expected in case.before:
                assert next(batches).tolist() == expected
            with pytest.raises(BrokenSample):
                next(batches)
            case.dataset.error = None
            whole = [value for batch in of_iterator(iter(loader)) for value in batch]
            assert whole == [0, 1, 2, 3]


def test_a_note_of_an_earlier_place_is_replaced() -> None:
    error = ValueError()
    annotate(error, ErrorContext(1, "a.png", "read"))
    error.add_note("mine")
    annotate(error, ErrorContext(list(range(10)), None, "collate"))
    assert error.__notes__ == ["mine", "aioload: failed at stage 'collate', indices [0, 1, 2, 3, 4, 5, ... 4 more]"]


def test_an_exception_that_came_through_no_loader_has_no_context() -> None:
    assert error_context(ValueError()) is None
