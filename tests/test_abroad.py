"""Errors that come from another process are the errors that were raised there."""

import pickle
import threading
from typing import Any

import pytest
from abroad import FieldsError

from aioload.engine.abroad import pack_error, unpack_error
from aioload.errors import ErrorContext, StoppedIterationError, annotate, error_context, safe_to_raise


def sent(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as raised:
        return unpack_error(pack_error(raised))


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("no number", 3),
        KeyError("name"),
        FileNotFoundError(2, "No such file", "/a/b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        FieldsError(7, where="there"),
        ExceptionGroup("two", [ValueError(1), OSError(2, "no")]),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_class_arguments_and_fields(exc: BaseException) -> None:
    got = sent(exc)
    assert type(got) is type(exc)
    assert repr(got) == repr(exc)
    assert str(got) == str(exc)
    names = [name for name in vars(exc) if name not in ("lock", "__notes__")]
    assert {name: vars(got)[name] for name in names} == {name: vars(exc)[name] for name in names}
    if isinstance(exc, OSError):
        assert (got.errno, got.filename) == (exc.errno, exc.filename)  # type: ignore[attr-defined]


def test_fields_that_cannot_be_pickled_come_as_text() -> None:
    lock = vars(sent(FieldsError(7, where="there")))["lock"]
    assert isinstance(lock, str)
    assert "lock" in lock


def test_a_class_that_cannot_be_found_becomes_one_that_can() -> None:
    class LocalError(LookupError):
        pass

    got = sent(LocalError("not here"))
    assert type(got) is LookupError
    assert str(got).endswith("LocalError: not here")


def test_causes_notes_and_context() -> None:
    def fail() -> None:
        try:
            raise FieldsError(1, where="first")
        except FieldsError as exc:
            exc.add_note("the user's")
            raise RuntimeError("second") from exc

    with pytest.raises(RuntimeError) as caught:
        fail()
    annotate(caught.value, ErrorContext(4, "/a/b", "read"))
    got = unpack_error(pack_error(caught.value))
    assert isinstance(got.__cause__, FieldsError)
    assert got.__cause__.__notes__ == ["the user's"]
    assert got.__context__ is got.__cause__
    assert got.__suppress_context__
    assert error_context(got) == ErrorContext(4, "/a/b", "read")
    assert 'raise RuntimeError("second") from exc' in got.__notes__[-1]
    assert "FieldsError: code 1 at first" in got.__notes__[-1]


def test_a_context_that_cannot_be_pickled_comes_as_text() -> None:
    exc = ValueError()
    annotate(exc, ErrorContext(threading.Lock(), None, "fetch"))
    context = error_context(sent(exc))
    assert context is not None
    assert "lock" in context.index


def test_an_end_that_is_an_error() -> None:
    got = sent(safe_to_raise(StopIteration(3)))
    assert isinstance(got, StoppedIterationError)
    assert isinstance(got.__cause__, StopIteration)


def test_an_exception_whose_own_code_fails() -> None:
    got = sent(HostileError())
    assert type(got) is HostileError


class HostileError(Exception):
    """Refuses whatever pickling asks of it."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError

    def __str__(self) -> str:
        raise ValueError
