"""Paths that were given to another process are those of the list."""

import pickle
from collections.abc import Iterator
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import pytest
from abroad import decode_numbers
from hypothesis import given
from hypothesis import strategies as st

from aioload import FileDataset
from aioload.datasets.paths import Paths, packed

NAMES = st.text(st.characters(exclude_characters="\0"), max_size=3)  # surrogates are among them, as in names of files
INDICES = st.integers(-200, 200)


@given(st.lists(NAMES, min_size=1, max_size=150), st.lists(INDICES), st.slices(150))
def test_they_are_those_of_the_list(names: list[str], indices: list[int], part: slice) -> None:
    paths = pickle.loads(pickle.dumps(packed(names)))
    assert isinstance(paths, Paths)
    for index in indices:
        if -len(names) <= index < len(names):
            assert paths[index] == names[index]
        else:
            with pytest.raises(IndexError):
                paths[index]
    assert paths[part] == names[part]
    assert list(paths) == names
    assert len(paths) == len(names)


@pytest.mark.parametrize("paths", [[], ["a", Path("b")], ["a\0", "b"], ("a", "b"), range(3)], ids=repr)
def test_what_is_no_list_of_names_stays_as_it_is(paths: Any) -> None:
    assert packed(paths) is paths


@pytest.fixture
def as_for_a_process() -> Iterator[None]:
    set_spawning_popen(object())  # type: ignore[arg-type]
    yield
    set_spawning_popen(None)


def test_copies_within_a_process_have_the_list() -> None:
    assert pickle.loads(pickle.dumps(FileDataset(["a", "b"], decode_numbers))).paths == ["a", "b"]


@pytest.mark.usefixtures("as_for_a_process")
def test_datasets_are_given_to_processes_with_one_text() -> None:
    class Sorted(FileDataset[Any]):
        """Its own methods may count on a list."""

    dataset = pickle.loads(pickle.dumps(FileDataset(["a", "b"], decode_numbers)))
    assert isinstance(dataset.paths, Paths)
    assert [dataset.location(index) for index in (0, 1, -1)] == ["a", "b", "b"]
    assert Sorted(["a"], decode_numbers).__getstate__()["paths"] == ["a"]
