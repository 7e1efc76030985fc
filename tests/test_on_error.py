"""``on_error``: samples that fail are skipped, replaced or made up, and every one of them is told."""

import copy
import json
import pickle
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.utils.data
from failing import AsyncNumbers, IterableNumbers, ManyNumbers, MapNumbers, StagedNumbers
from outcomes import EVERY_WAY, Load, by_for, of_iterator
from PIL import Image
from torch.utils.data import default_collate

from aioload import DataLoader, FileDataset, ImageFolder, error_context
from aioload.engine import plan
from aioload.errors import ArgumentError, SampleError, TooManyErrorsError

MakeNumbers: TypeAlias = Callable[[BaseException, Path], Any]

KINDS: dict[str, MakeNumbers] = {
    "map": lambda error, _: MapNumbers(error),
    "many": lambda error, _: ManyNumbers(error),
    "async": lambda error, _: AsyncNumbers(error),
    "subset": lambda error, _: torch.utils.data.Subset(MapNumbers(error), [0, 1, 2, 3]),  # type: ignore[arg-type]
    "subset of many": lambda error, _: torch.utils.data.Subset(ManyNumbers(error), [0, 1, 2, 3]),  # type: ignore[arg-type]
    "location": lambda error, folder: StagedNumbers(folder, error, "location"),
    "decode": lambda error, folder: StagedNumbers(folder, error, "decode"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
every_way = pytest.mark.parametrize("load", EVERY_WAY)
num_workers_or_none = pytest.mark.parametrize("num_workers", [0, 2])


def minus_one(_: Exception) -> int:
    return -1


@every_way
@every_kind
def test_a_sample_that_fails_is_skipped_replaced_or_made_up(make: MakeNumbers, load: Load, tmp_path: Path) -> None:
    numbers = make(LookupError("of the user's"), tmp_path)
    left = [0, 1, 3]
    assert load(numbers, batch_size=4, on_error="skip") == [left]
    assert load(numbers, batch_size=4, on_error="replace") == [[0, 1, 1, 3]]
    assert load(numbers, batch_size=4, on_error=minus_one) == [[0, 1, -1, 3]]
    for on_error in ("skip", "replace"):  # there is nothing in its batch to replace it by
        assert load(numbers, batch_size=1, on_error=on_error) == [[number] for number in left]
        assert load(numbers, batch_size=None, on_error=on_error) == left
    assert load(numbers, batch_size=1, on_error=minus_one) == [[0], [1], [-1], [3]]
    assert load(numbers, batch_size=None, on_error=minus_one) == [0, 1, -1, 3]


@num_workers_or_none
@every_kind
def test_every_error_is_listed_with_its_place(make: MakeNumbers, num_workers: int, tmp_path: Path) -> None:
    error = LookupError("of the user's")
    loader: DataLoader[Any] = DataLoader(make(error, tmp_path), 2, num_workers=num_workers, on_error="skip")
    assert loader.errors() == []
    for number_of_passes in (1, 2):
        list(loader)
        records = loader.errors()
        assert len(records) == loader.stats().errors == number_of_passes
    record = records[-1]
    assert isinstance(record, SampleError)
    assert record.error is error
    assert record[:3] == error_context(error)
    assert record.index == 2
    assert loader.stats().samples == 2 * 3


@pytest.mark.parametrize(
    ("failed", "expected"), [((0, 1), [2, 2, 2, 3]), ((1, 2, 3), [0, 0, 0, 0]), ((1, 3), [0, 0, 2, 2])]
)
@num_workers_or_none
def test_the_one_before_stands_in_or_else_the_first_behind(
    failed: tuple[int, ...], expected: list[int], num_workers: int
) -> None:
    class Holes:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index in failed:
                raise LookupError(index)
            return index

    assert by_for(Holes(), batch_size=4, on_error="replace", num_workers=num_workers) == [expected]


class Fields:
    """Samples with several fields, of which every fourth fails."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 1:
            raise LookupError(index)
        return self.make(index)

    def make(self, index: int) -> Any:
        return {"a": np.full((2, 3), index, np.float32), "b": (index, str(index)), "c": torch.arange(index, index + 2)}


@num_workers_or_none
@pytest.mark.parametrize("batch_size", [1, 3, 8, 30])
def test_what_is_left_is_collated_as_torch_collates_it(batch_size: int, num_workers: int) -> None:
    fields: Any = Fields()
    got = list(DataLoader(fields, batch_size, num_workers=num_workers, on_error="skip"))
    batches = [range(first, min(first + batch_size, 30)) for first in range(0, 30, batch_size)]
    left = [[fields.make(index) for index in batch if index % 4 != 1] for batch in batches]
    expected = [default_collate(samples) for samples in left if samples]
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine["a"], theirs["a"])
        assert torch.equal(mine["b"][0], theirs["b"][0])
        assert mine["b"][1] == theirs["b"][1]
        assert torch.equal(mine["c"], theirs["c"])


def jpeg(path: Path, share: float = 1.0) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@num_workers_or_none
def test_broken_pictures_are_skipped_and_their_paths_are_told(tmp_path: Path, num_workers: int) -> None:
    folder = tmp_path / "cats"
    folder.mkdir()
    for number in range(8):
        jpeg(folder / f"{number}.jpg", {2: 0.6, 5: 0.0}.get(number, 1.0))
    (folder / "6.jpg").unlink()
    (folder / "6.jpg").symlink_to("nowhere")
    pictures = ImageFolder(tmp_path)
    loader: DataLoader[Any] = DataLoader(pictures, 4, num_workers=num_workers, on_error="skip")
    assert [len(labels) for _, labels in loader] == [3, 2]
    found = {Path(record.location).name: record for record in loader.errors()}
    assert list(found) == ["2.jpg", "5.jpg", "6.jpg"]
    assert [record.stage for record in found.values()] == ["decode", "decode", "read"]
    assert isinstance(found["6.jpg"].error, FileNotFoundError)
    assert "0 bytes" in str(found["5.jpg"].error)


class Jittery:
    """Samples that take their time; those of ``failed`` fail."""

    def __init__(self, num_samples: int, failed: set[int], seed: int = 0) -> None:
        self.num_samples, self.failed = num_samples, failed
        self._delays = random.Random(seed)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        time.sleep(self._delays.choice((0, 0, 0, 1e-3)))
        if index in self.failed:
            raise LookupError(index)
        return index


@num_workers_or_none
@pytest.mark.parametrize("max_errors", [2, 0.1])
def test_one_error_too_many_is_raised_whatever_the_timing(max_errors: float, num_workers: int) -> None:
    for seed in range(5):
        jittery: Any = Jittery(20, {3, 4, 9, 16}, seed)
        workers = 4 if num_workers else 0
        loader: DataLoader[Any] = DataLoader(jittery, 2, num_workers=workers, on_error="skip", max_errors=max_errors)
        got = of_iterator(iter(loader))
        expected = [[0, 1], [2], [5], [6, 7], "9", [10, 11], [12, 13], [14, 15], "16", [18, 19]]
        assert [each if isinstance(each, list) else str(each.__cause__) for each in got] == expected
        first, second = (each for each in got if isinstance(each, Exception))
        for error, number in ((first, 3), (second, 4)):
            assert isinstance(error, TooManyErrorsError)
            assert f"{number} samples of this pass could not be loaded; max_errors allows 2" in str(error)
            assert isinstance(error.__cause__, LookupError)
        assert [record.index for record in loader.errors()] == [3, 4, 9, 16]


@every_way
def test_a_pass_of_which_nothing_is_left_is_an_error(load: Load) -> None:
    for on_error in ("skip", "replace"):
        (error,) = load(Jittery(6, set(range(6))), batch_size=2, on_error=on_error)
        assert isinstance(error, TooManyErrorsError)
        assert "None of this pass's samples could be loaded: 6 errors" in str(error)
    assert load([], batch_size=2, on_error="skip") == []


@every_way
def test_one_is_counted_as_one(load: Load) -> None:
    (error,) = load(Jittery(1, {0}), batch_size=2, on_error="skip")
    assert str(error).startswith("None of this pass's samples could be loaded: 1 error and no batch. ")
    _, error, _ = load(Jittery(6, {3}), batch_size=2, on_error="skip", max_errors=0)
    assert str(error).startswith("1 sample of this pass could not be loaded; max_errors allows 0. ")


@every_way
@every_kind
def test_what_the_function_raises_counts_as_the_samples_error(make: MakeNumbers, load: Load, tmp_path: Path) -> None:
    seen = []

    def refuse(exc: Exception) -> Any:
        seen.append(exc)
        raise ZeroDivisionError

    error = LookupError("of the user's")
    got = load(make(error, tmp_path), batch_size=1, on_error=refuse)
    assert got[:2] + got[3:] == [[0], [1], [3]]
    assert type(got[2]) is ZeroDivisionError
    context = error_context(got[2])
    assert context is not None
    assert context.index == 2
    assert seen == [error]


@every_way
@every_kind
def test_the_function_is_told_where_and_may_raise_again(make: MakeNumbers, load: Load, tmp_path: Path) -> None:
    contexts = []

    def raise_again(exc: Exception) -> Any:
        contexts.append(error_context(exc))
        raise exc

    error = LookupError("of the user's")
    got = load(make(error, tmp_path), batch_size=1, on_error=raise_again)
    assert got == [[0], [1], error, [3]]
    assert [context.index for context in contexts if context is not None] == [2]


@every_way
def test_what_is_no_sample_of_its_own_fails_as_ever(load: Load) -> None:
    def collate(samples: list[int]) -> Any:
        if 2 in samples:
            raise LookupError
        return samples

    got = load(range(4), batch_size=2, collate_fn=collate, on_error="skip")
    assert got[0] == [0, 1]
    assert isinstance(got[1], LookupError)
    got = load(MapNumbers(SystemExit()), batch_size=1, on_error="skip")
    assert isinstance(got[2], SystemExit)
    got = load(range(4), batch_sampler=iter([[0], [1, 2]]), on_error="skip", collate_fn=lambda samples: samples)
    assert got == [[0], [1, 2]]


@num_workers_or_none
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_pass_that_is_cut_off_goes_on_behind_what_was_skipped(
    num_workers: int, in_order: bool, on_error: Any
) -> None:
    jittery: Any = Jittery(30, {0, 1, 2, 10, 12, 13, 14, 29})

    def loader() -> "DataLoader[Any]":
        return DataLoader(
            jittery, 3, shuffle=True, seed=4, num_workers=num_workers, in_order=in_order, on_error=on_error
        )

    uncut = sorted(batch.tolist() for batch in loader())
    for cut in range(len(uncut)):
        first, second = loader(), loader()
        batches = iter(first)
        got = [next(batches).tolist() for _ in range(cut)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        got += [batch.tolist() for batch in second]
        assert sorted(got) == uncut


def test_a_batch_of_which_nothing_is_left_lets_others_in_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda: 1)

    class Large(Jittery):
        def __getitem__(self, index: int) -> Any:
            return np.full(1000, super().__getitem__(index))

    large: Any = Large(60, {number for number in range(60) if number // 3 % 2})
    with DataLoader(large, 3, num_workers=3, on_error="skip") as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 60, 6))


def test_errors_keep_nothing_alive_that_code_worked_with(tmp_path: Path) -> None:
    seen = []

    class Buffer:
        pass

    def decode(_: bytes, index: int) -> int:
        buffer = Buffer()
        seen.append(weakref.ref(buffer))
        if index % 2:
            try:
                raise LookupError(index)
            except LookupError as exc:
                raise ValueError(index) from exc
        return index

    for number in range(6):
        (tmp_path / str(number)).write_text("")
    for num_workers in (0, 2):
        loader: DataLoader[Any] = DataLoader(
            FileDataset([tmp_path / str(number) for number in range(6)], decode),
            num_workers=num_workers,
            on_error="skip",
        )
        list(loader)
        loader.close()
        assert len(loader.errors()) == 3
        assert [each for each in seen if each() is not None] == []


def test_passes_of_persistent_workers_count_what_they_hand_out() -> None:
    jittery: Any = Jittery(8, {5})
    with DataLoader(jittery, 2, num_workers=2, persistent_workers=True, on_error="skip", max_errors=1) as loader:
        for number in (1, 2, 3):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4], [6, 7]]
            assert loader.stats().errors == number
        loader.on_error, loader.max_errors = "raise", None
        assert isinstance(of_iterator(iter(loader))[2], LookupError)


def test_the_first_error_of_a_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    list(DataLoader(Jittery(8, {2, 5}), 2, num_workers=2, on_error="skip"))
    (message,) = (record.getMessage() for record in caplog.records if record.name == "aioload")
    assert message == ("A sample could not be loaded: index 2, stage 'fetch': LookupError(2); see loader.errors().")


class Mute(Exception):
    """An error of the user's that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


def test_an_error_without_text_is_an_error_like_others(caplog: pytest.LogCaptureFixture) -> None:
    numbers: Any = MapNumbers(Mute())
    with DataLoader(numbers, 4, num_workers=2, on_error="skip") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 3]]
        assert [type(record.error) for record in loader.errors()] == [Mute]
    assert "Mute, which has no text" in caplog.text
    loader = DataLoader(numbers, 4, on_error="skip", max_errors=0)
    with loader, pytest.raises(TooManyErrorsError, match="The last one: Mute, which has no text"):
        list(loader)


def test_a_copy_of_a_loader_has_met_no_errors() -> None:
    error = LookupError(lambda: None)  # cannot be pickled
    loader: DataLoader[Any] = DataLoader(MapNumbers(), num_workers=0, on_error="skip", max_errors=7)
    loader.dataset.error = error  # type: ignore[attr-defined]
    list(loader)
    loader.dataset.error = None  # type: ignore[attr-defined]
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert (other.errors(), other.stats().errors) == ([], 0)
        assert (other.on_error, other.max_errors) == ("skip", 7)
    assert len(loader.errors()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise', 'skip', 'replace' or a function.*got 'ignore'"),
        ({"on_error": None}, "on_error must be .* got None"),
        ({"max_errors": 3}, "max_errors=3 needs on_error"),
        ({"on_error": "skip", "max_errors": -1}, "max_errors must be a whole number of at least 0, got -1"),
        ({"on_error": "skip", "max_errors": True}, "max_errors must be a whole number of at least 0, got True"),
        (
            {"on_error": "skip", "max_errors": 1.0},
            "max_errors must be a whole number, or a float from 0 to below 1.*1.0",
        ),
        ({"on_error": "skip", "max_errors": "1"}, "max_errors must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DataLoader(range(4), **arguments)


def test_an_iterator_cannot_go_on_behind_an_error() -> None:
    for on_error in ("skip", "replace", minus_one):
        with pytest.raises(ArgumentError, match=r"is for datasets that are asked by index.*IterableNumbers's may"):
            DataLoader(IterableNumbers(), on_error=on_error)
