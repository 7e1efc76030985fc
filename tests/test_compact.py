"""Long lists of a dataset reach engine processes as arrays, which have the same items."""

import contextlib
import operator
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from abroad import files_in, sent
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same, outcomes, torch_outcomes
from PIL import Image

from aioload import DataLoader, FileDataset, ImageFolder, error_context
from aioload.datasets import compact
from aioload.datasets.compact import Labelled, Texts, compact_of

pytestmark = pytest.mark.usefixtures("forks_are_served", "no_process_is_left")

TEXTS = st.lists(st.text(st.characters(codec=None)), min_size=1, max_size=20)  # with what is no UTF-8


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_LEAST", 2)


def assert_reads_as(got: Any, expected: list[Any]) -> None:
    size = len(expected)
    assert len(got) == size
    assert list(got) == expected
    assert got == expected
    assert expected == got
    assert got != [*expected, expected[0]]
    assert [got[index] for index in range(-size, size)] == expected * 2
    assert got[np.int64(size - 1)] == expected[-1]
    assert got[1:] == expected[1:]
    assert got[::-2] == expected[::-2]
    assert expected[0] in got
    assert got.index(expected[-1]) == expected.index(expected[-1])
    for index in (size, -size - 1):
        with pytest.raises(IndexError):
            got[index]
    with pytest.raises(TypeError):
        got["0"]
    with pytest.raises(TypeError):
        hash(got)


@contextlib.contextmanager
def limits(least: int, least_shared: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # within an example: a fixture would be there once for all
        patch.setattr(compact, "_LEAST", least)
        patch.setattr(compact, "_LEAST_SHARED", least_shared)
        yield


@pytest.mark.parametrize("least_shared", [1, 10, 1000])  # never a list again, some of them, or all after an eighth
@given(TEXTS)
def test_texts_read_as_the_list_did(least_shared: int, texts: list[str]) -> None:
    with limits(1, least_shared):
        got = Texts.of(texts)
        assert_reads_as(got, texts)
        assert_reads_as(pickle.loads(pickle.dumps(got)), texts)


@pytest.mark.parametrize("least_shared", [1, 10, 1000])
@given(TEXTS, st.randoms())
def test_texts_with_numbers_read_as_the_list_did(least_shared: int, texts: list[str], random: Any) -> None:
    pairs = [(text, random.randrange(-(1 << 63) + 1, 1 << 63)) for text in texts]
    with limits(1, least_shared):
        got = compact_of(pairs)
        assert type(got) is Labelled
        assert_reads_as(got, pairs)
        assert_reads_as(pickle.loads(pickle.dumps(got)), pairs)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an item": lambda items: operator.setitem(items, 1, items[2]),
    "a slice": lambda items: operator.setitem(items, slice(1, 3), [items[0]]),
    "deleted": lambda items: operator.delitem(items, -1),
    "deleted slice": lambda items: operator.delitem(items, slice(None, None, 2)),
    "insert": lambda items: items.insert(2, items[0]),
    "append": lambda items: items.append(items[0]),
    "extend": lambda items: items.extend(items[:2]),
    "in place +": lambda items: items.__iadd__(items[:2])[0],
    "pop": lambda items: items.pop(),
    "remove": lambda items: items.remove(items[1]),
    "clear": lambda items: items.clear(),
    "reverse": lambda items: items.reverse(),
    "sort": lambda items: items.sort(key=repr, reverse=True),
    "shuffle": lambda items: random.Random(0).shuffle(items),
    "copy": lambda items: items.copy(),
    "+": lambda items: items + items[:1],
    "+ itself": lambda items: items + items,
    "to a list": lambda items: items[:1] + items,
    "*": lambda items: (items * 2, 2 * items),
}


@pytest.mark.parametrize("least_shared", [1, 1000])
@pytest.mark.parametrize("has_labels", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_they_change_as_the_list_does(change: Callable[[Any], Any], has_labels: bool, least_shared: int) -> None:
    expected: list[Any] = [f"text {number * 7 % 10}" for number in range(10)]
    if has_labels:
        expected = [(text, number) for number, text in enumerate(expected)]
    with limits(1, least_shared):
        got = compact_of(expected)
        assert type(got) is (Labelled if has_labels else Texts)
        assert change(got) == change(expected)
    assert len(got) == len(expected)
    assert list(got) == expected
    assert got == expected
    assert pickle.loads(pickle.dumps(got)) == expected


def test_what_one_thread_has_changed_no_other_undoes(monkeypatch: pytest.MonkeyPatch) -> None:
    got, made = Texts.of(["a", "b"]), Texts._all

    def all_and_late(self: Texts) -> list[str]:
        items = made(self)
        monkeypatch.setattr(Texts, "_all", made)
        self[0] = "changed"  # while the other one is making its list
        return items

    monkeypatch.setattr(Texts, "_all", all_and_late)
    assert got[0] == "changed"
    assert list(got) == ["changed", "b"]


class Reordered(FileDataset[bytes]):
    """One that changes its paths with each epoch."""

    def set_epoch(self, epoch: int) -> None:
        random.Random(epoch).shuffle(self.paths)  # type: ignore[arg-type]


@pytest.mark.usefixtures("short_is_long")
def test_a_dataset_may_change_its_paths_in_a_process(tmp_path: Path) -> None:
    paths = []
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(bytes([number]))
        paths.append(str(tmp_path / f"{number}"))

    def epochs(processes: int) -> list[Any]:
        arguments: dict[str, Any] = {"num_workers": 2, "processes": processes, "persistent_workers": True}
        with DataLoader(Reordered(paths.copy(), decode), 4, **arguments) as loader:
            batches = []
            for epoch in range(3):
                loader.set_epoch(epoch)
                batches.append(list(loader))
        return batches

    got = epochs(2)
    assert got == epochs(0)
    assert got[0] != got[1]


def test_items_are_made_when_they_are_asked_for_until_it_pays_to_make_all_of_them() -> None:
    texts = [f"text {number}" for number in range(80)]
    short, long = Texts.of(texts), Texts.of(texts * 1250)
    assert [short[3] is short[3] for _ in range(5)] == [False] * 5  # ten items
    assert short[3] is short[3]
    assert list(short) == texts
    for index in range(50_000):
        long[index]
    assert long[3] is not long[3]


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize(
    "items",
    [
        ["only one"],
        ("in a", "tuple"),
        np.array(["in an", "array"]),
        ["one", Path("other")],
        [b"one", b"other"],
        [np.str_("one"), "other"],
        [("one", 1), ("other", 2, 3)],
        [("one", 1), ["other", 2]],
        [("one", 1), ("other", True)],
        [("one", 1), ("other", 1 << 63)],
        [("one", 1), ("other", np.int64(3))],
        [1, 2],
        None,
    ],
)
def test_other_lists_stay_as_they_are(items: Any) -> None:
    assert compact_of(items) is None


def test_short_lists_stay_lists() -> None:
    assert compact_of(["text"] * 9_999) is None
    assert type(compact_of(["text"] * 10_000)) is Texts


def decode(data: bytes, index: Any) -> bytes:
    return data


class OwnFiles(FileDataset[bytes]):
    """One that says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return OwnFiles, (self.paths, decode)


class Marked(FileDataset[bytes]):
    """One with more about it."""

    def __init__(self, paths: list[str], mark: str) -> None:
        super().__init__(paths, decode)
        self.mark = mark


@pytest.mark.usefixtures("short_is_long")
def test_only_those_in_engine_processes_have_it() -> None:
    paths = ["a", "b", "c"]
    plain, own, marked = FileDataset(paths, decode), OwnFiles(paths, decode), Marked(paths, "mark")
    ((got_plain, got_own, got_marked),) = sent(plain, own, marked)
    assert type(got_plain.paths) is type(got_marked.paths) is Texts
    assert type(got_own) is OwnFiles
    assert got_plain.paths == got_own.paths == got_marked.paths == paths
    assert type(got_own.paths) is list
    assert (type(got_marked), got_marked.mark) == (Marked, "mark")
    assert plain.paths is paths
    assert type(pickle.loads(pickle.dumps(plain)).paths) is list


@pytest.mark.usefixtures("short_is_long")
def test_files_are_loaded_by_it_and_errors_name_them(tmp_path: Path) -> None:
    dataset = files_in(tmp_path, 26, missing=9)
    with DataLoader(dataset, 4, processes=2, num_workers=2) as loader:
        got = outcomes(iter(loader))
    assert_same(got, torch_outcomes(dataset, batch_size=4))
    context = error_context(got[2])
    assert context is not None
    assert context.location == dataset.paths[9]


@pytest.mark.usefixtures("short_is_long")
def test_images_are_loaded_by_it(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / f"class {number % 3}"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (3, 2), (number, 0, 0)).save(folder / f"{number}.png")
    dataset = ImageFolder(tmp_path)
    ((got,),) = sent(dataset)
    assert type(got.samples) is Labelled
    assert got.samples == dataset.samples
    with DataLoader(dataset, 4, processes=2, num_workers=2) as loader:
        got = outcomes(iter(loader))
    assert_same(got, torch_outcomes(dataset, batch_size=4))
