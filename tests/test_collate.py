"""Samples that cannot be batched: the message says which ones, where in them and how they differ."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from oracle import WAYS, Way, assert_same
from structures import FixedMapping, MakeSample, Pair, nested
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from aioload import AioloadError, DataLoader, ErrorContext, FileDataset, error_context
from aioload.collate import collate_samples, visible_bytes
from aioload.errors import CollateError, SampleKeyError, SampleTypeError, SampleValueError


def describe(position: int) -> str:
    return f"index {position}"


class Case(NamedTuple):
    """Samples, and the kind and last line of their error."""

    samples: list[Any]
    kind: type[AioloadError]
    line: str


ADVICE_TYPE = "return tensors, arrays, numbers, strings or containers of them, or pass a collate_fn."
ADVICE_SHAPE = "Give all samples one shape and structure (in the dataset or its transform), or pass a collate_fn."


def differ(other: int, place: str, mine: str, theirs: str) -> str:
    return f"Samples index 0 and index {other} differ at {place}: {mine} against {theirs}. {ADVICE_SHAPE}"


def holds(position: int, place: str, kind: str) -> str:
    return f"Sample index {position} holds {kind} at {place}; {ADVICE_TYPE}"


CASES: dict[str, Case] = {
    "ragged tensors": Case(
        [torch.zeros(2), torch.zeros(2), torch.zeros(3)],
        CollateError,
        differ(2, "the sample itself", "shape (2,)", "shape (3,)"),
    ),
    "ragged arrays": Case(
        [{"image": (np.zeros((3, i)), i)} for i in (4, 4, 5, 6)],
        CollateError,
        differ(2, "['image'][0]", "shape (3, 4)", "shape (3, 5)"),
    ),
    "ragged in a named tuple": Case(
        [Pair([1], np.zeros(i)) for i in (1, 2)], CollateError, differ(1, ".y", "shape (1,)", "shape (2,)")
    ),
    "ragged in a mapping of another kind": Case(
        [FixedMapping({"a": collections.deque([1, np.zeros(i)])}) for i in (1, 2)],
        CollateError,
        differ(1, "['a'][1]", "shape (1,)", "shape (2,)"),
    ),
    "only the second of two fields": Case(
        # The first differ as well, but in what torch puts up with.
        [(1, "a", {"x": 1}, torch.zeros(1)), (2.5, b"a", {"x": 1, "y": 2}, torch.zeros(2))],
        CollateError,
        differ(1, "[3]", "shape (1,)", "shape (2,)"),
    ),
    "unequal lengths": Case(
        [{"boxes": [1, 2]}, {"boxes": [1, 2]}, {"boxes": [1]}],
        CollateError,
        differ(2, "['boxes']", "a list of length 2", "a list of length 1"),
    ),
    "None": Case([{"x": None}] * 2, SampleTypeError, holds(0, "['x']", "a NoneType")),
    "None in one": Case(
        [{"x": np.zeros(2)}, {"x": np.zeros(2)}, {"x": None}], CollateError, holds(2, "['x']", "a NoneType")
    ),
    "None for a sample": Case([1, None], CollateError, holds(1, "the sample itself", "a NoneType")),
    "an object": Case([(1, Path("a"))] * 2, SampleTypeError, holds(0, "[1]", f"a {type(Path()).__name__}")),
    "a set": Case([[{1}]], SampleTypeError, holds(0, "[0]", "a set")),
    "an array of objects": Case(
        [{"a": np.array([None, 1])}], SampleTypeError, holds(0, "['a']", "an array of object and shape (2,)")
    ),
    "sparse": Case(
        [torch.eye(2).to_sparse()],
        CollateError,
        holds(0, "the sample itself", "a Tensor of torch.float32, of shape (2, 2), torch.sparse_coo, on cpu"),
    ),
    "nested": Case(
        [(nested(1, 2),)], CollateError, holds(0, "[0]", "a Tensor of torch.float32, nested, torch.strided, on cpu")
    ),
    "too large an int": Case(
        [{"id": 1}, {"id": 2**63}], SampleValueError, holds(1, "['id']", "a int, 9223372036854775808")
    ),
    "foreign bytes": Case(
        [np.zeros(2, ">f4")],
        SampleValueError,
        holds(0, "the sample itself", "an array of >f4 and shape (2,)"),
    ),
    "a missing key": Case(
        [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}],
        SampleKeyError,
        differ(2, "['b']", "a number", "nothing there"),
    ),
    "another structure": Case(
        [{"a": (1, 2)}, {"a": {"b": 1}}],
        CollateError,
        differ(1, "['a']", "a tuple of length 2", "a dict"),
    ),
    "a number for a list": Case(
        [[1, [2]], [1, 2]], SampleTypeError, differ(1, "[1]", "a list of length 1", "a number")
    ),
    "a number for a dict": Case([{"a": 1}, 7], SampleTypeError, differ(1, "the sample itself", "a dict", "a number")),
    "a string for a number": Case([(1, 1), (1, "b")], SampleTypeError, differ(1, "[1]", "a number", "a str")),
    "a number for a tensor": Case(
        [torch.zeros(()), 1], SampleTypeError, differ(1, "the sample itself", "shape ()", "a number")
    ),
    "an array for a tensor": Case(
        [torch.zeros(2), np.zeros(2)],
        SampleTypeError,
        differ(
            1,
            "the sample itself",
            "a Tensor of torch.float32, of shape (2,), torch.strided, on cpu",
            "an array of float64 and shape (2,)",
        ),
    ),
    "another device": Case(
        [torch.zeros(2), torch.zeros(2, device="meta")],
        CollateError,
        differ(
            1,
            "the sample itself",
            "a Tensor of torch.float32, of shape (2,), torch.strided, on cpu",
            "a Tensor of torch.float32, of shape (2,), torch.strided, on meta",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_message_is_that_of_torch_and_says_where(case: Case) -> None:
    with pytest.raises(AioloadError) as ours:
        collate_samples(default_collate, case.samples, describe)
    with pytest.raises((RuntimeError, TypeError, ValueError, KeyError)) as theirs:
        default_collate(case.samples)
    assert type(ours.value) is case.kind
    assert str(ours.value) == f"{theirs.value}\n{case.line}"
    assert isinstance(ours.value.__cause__, type(theirs.value))
    assert_same(ours.value, theirs.value)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_is_the_same_in_every_way_of_loading(case: Case) -> None:
    messages = set()
    for way in WAYS:
        with DataLoader(case.samples, 8, num_workers=way.num_workers) as loader:
            (error,) = way.face(loader)
        assert type(error) is case.kind, way
        assert error_context(error) == ErrorContext(list(range(len(case.samples))), None, "collate")
        messages.add(str(error))
    assert len(messages) == 1
    assert messages.pop().endswith(case.line)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_samples_are_named_by_index_and_path(way: Way, tmp_path: Path) -> None:
    paths = [tmp_path / f"{size}.bin" for size in (2, 2, 3, 2)]
    for path in paths:
        path.write_bytes(bytes(int(path.stem)))
    dataset = FileDataset(paths, lambda data, index: {"bytes": np.frombuffer(data, np.uint8)})
    with DataLoader(dataset, batch_sampler=[[0, 1], [3, 0, 2]], num_workers=way.num_workers) as loader:
        batch, error = way.face(loader)
    assert batch["bytes"].shape == (2, 2)
    assert f"Samples index 3 ('{paths[3]}') and index 2 ('{paths[2]}') differ at ['bytes']" in str(error)
    assert error_context(error) == ErrorContext([3, 0, 2], None, "collate")


class Ragged(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (np.zeros(1 + i // 4) for i in range(7))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_items_are_named_by_their_place_in_the_stream(way: Way) -> None:
    with DataLoader(Ragged(), 3, num_workers=way.num_workers) as loader:
        _, error, batch = way.face(loader)
    assert "Samples index 3 and index 4 differ at the sample itself: shape (1,) against shape (2,)." in str(error)
    assert error_context(error) == ErrorContext([3, 4, 5], None, "collate")
    assert batch.shape == (1, 2)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_errors_come_in_the_order_of_the_indices(way: Way) -> None:
    samples = [np.zeros(2), np.zeros(i) if (i := 3) else None, None, 1, "a", "b", np.zeros(2), np.zeros(2)]
    with DataLoader(samples, 2, num_workers=way.num_workers) as loader:
        got = way.face(loader)
    assert [type(each) for each in got] == [CollateError, SampleTypeError, list, torch.Tensor]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyError("mine"), ZeroDivisionError()], ids=repr)
def test_what_the_users_collate_fn_raises_comes_as_it_is(way: Way, error: Exception) -> None:
    def collate(samples: Sequence[int]) -> int:
        if 2 in samples:
            raise error
        return sum(samples)

    with DataLoader(range(6), 2, num_workers=way.num_workers, collate_fn=collate) as loader:
        got = way.face(loader)
    assert got == [1, error, 9]
    assert error_context(error) == ErrorContext([2, 3], None, "collate")
    assert not isinstance(error, AioloadError)


class Point(int):
    pass


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyError("mine"), ZeroDivisionError()], ids=repr)
def test_what_a_rule_of_the_users_raises_comes_as_it_is_with_a_note(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collate(points: Sequence[Point], *, collate_fn_map: Any = None) -> Any:
        raise error

    monkeypatch.setitem(default_collate_fn_map, Point, collate)
    with pytest.raises(type(error)) as caught:
        collate_samples(default_collate, [{"p": Point(1)}, {"p": Point(2)}], describe)
    assert caught.value is error
    assert error.__notes__[0] == holds(0, "['p']", "a Point, 1")


class Unreadable(FixedMapping):
    def __getitem__(self, key: str) -> Any:
        raise ZeroDivisionError


LOST: dict[str, MakeSample] = {
    "no samples": lambda i: [],
    "a mapping that fails": lambda i: [Unreadable({"a": 1})],
    "a list of itself": lambda i: [endless()],
}


def endless() -> list[Any]:
    parts: list[Any] = []
    parts.append(parts)
    return parts


@pytest.mark.parametrize("make", LOST.values(), ids=LOST.keys())
def test_where_no_reason_is_found_the_error_stays_as_it_is(make: Callable[[int], Any]) -> None:
    with pytest.raises(Exception) as ours:  # noqa: PT011
        collate_samples(default_collate, make(0), describe)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        default_collate(make(0))
    assert type(ours.value) is type(theirs.value)


def test_the_bytes_of_samples_are_seen_without_a_look_at_the_code_of_their_classes() -> None:
    class Private(dict[str, Any]):
        def values(self) -> Any:
            raise SystemExit

    @dataclasses.dataclass(slots=True)
    class Slotted:
        array: Any
        unset: Any = dataclasses.field(init=False)

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object) -> Any:
            raise SystemExit

    array, tensor = np.zeros(10, np.uint8), torch.zeros(3)
    assert visible_bytes([array, (tensor, b"123"), {"a": array, "b": "text", "c": None}]) == 10 + 12 + 3 + 10 + 4
    assert 2 * 1000 <= visible_bytes("\u03c8" * 1000) < 2 * 1000 + 100
    assert visible_bytes(Private(a=array)) == 10
    assert visible_bytes(Slotted(array)) == 10
    assert visible_bytes(tensor.as_subclass(Subclass)) == 12
    assert visible_bytes([array] * 100_000) == 1_000_000
    assert visible_bytes(torch.eye(2).to_sparse()) == 0
    endless: list[Any] = [array]
    endless.append(endless)
    assert visible_bytes(endless) < 100
