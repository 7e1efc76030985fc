"""Samples of every structure come out as torch's DataLoader makes them, bit for bit, or fail as there."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import NUM_WORKERS, WAYS, assert_parity, assert_same, torch_outcomes
from structures import STRUCTURES, MakeSample, MyList, OpenSequence, Pair, grid
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from aioload import DataLoader


class Made:
    """Five samples."""

    def __init__(self, make: MakeSample) -> None:
        self.make = make

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < 5:
            raise IndexError(index)
        return self.make(index)


every_structure = pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())


@every_structure
def test_a_batch_is_the_same(make: MakeSample) -> None:
    assert_parity(Made(make), batch_size=2)


@every_structure
def test_a_batch_of_all_is_the_same(make: MakeSample) -> None:
    assert_parity(Made(make), batch_size=8)


@every_structure
def test_a_sample_by_itself_is_the_same(make: MakeSample) -> None:
    assert_parity(Made(make), batch_size=None)


ROWS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "array": lambda rows: rows,
    "in another order": np.asfortranarray,
    "with gaps": lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
    "masked": lambda rows: np.ma.masked_less(rows, 3),  # torch takes what is under the mask
    "tensor": torch.tensor,
    "tensor in another order": lambda rows: torch.tensor(rows.T.copy()).T,
    "bfloat16": lambda rows: torch.tensor(rows).bfloat16(),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("num_items", [500, 502, 16384, 16386])
def test_rows_of_any_length_are_the_same(num_items: int, kind: str) -> None:
    rng = np.random.default_rng(num_items)
    samples = [ROWS[kind](rng.random((2, num_items // 2), np.float32) * 9) for _ in range(5)]
    assert_parity(samples, batch_size=3)
    if isinstance(samples[0], torch.Tensor):
        assert_parity(torch.utils.data.TensorDataset(torch.stack(samples)), batch_size=3)
    assert_parity([*samples, samples[0][:, :7]], batch_size=4)  # the last does not fit the rows of the others


def test_a_memory_map_is_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(10.0).reshape(5, 2))
    for mode in ("r", "c", "r+"):
        mapped: Any = np.load(tmp_path / "rows.npy", mmap_mode=mode)
        assert_parity(mapped, batch_size=2)
        assert_parity(mapped, batch_size=None)


def test_arrays_that_torch_refuses_for_their_strides_are_copied() -> None:
    def flipped(i: int) -> Any:
        return {"negative": grid(i)[::-1, ::-1], "odd": np.array([(1, i)], [("a", "u1"), ("b", "f4")])["b"]}

    def copied(i: int) -> Any:
        return {key: value.copy() for key, value in flipped(i).items()}

    for batch_size in (2, None):
        expected = list(DataLoader(Made(copied), batch_size, num_workers=0))
        for num_workers in NUM_WORKERS:
            assert_same(list(DataLoader(Made(flipped), batch_size, num_workers=num_workers)), expected)


def test_what_a_read_only_array_becomes_can_be_written_to_and_leaves_the_array_alone() -> None:
    rows = np.arange(10.0).reshape(5, 2)
    rows.flags.writeable = False
    samples = [{"row": row, "rows": OpenSequence([row])} for row in rows]
    for num_workers in NUM_WORKERS:
        for batch_size in (2, None):
            for batch in DataLoader(samples, batch_size, num_workers=num_workers):
                batch["row"] += 1
                batch["rows"][0] += 1
    assert rows.sum() == 45


def test_nothing_but_read_only_arrays_is_copied_where_samples_come_as_they_are() -> None:
    array, text = grid(0), MyList(["a"])
    samples = [{"array": array, "text": text}]
    for num_workers in NUM_WORKERS:
        (sample,) = DataLoader(samples, None, num_workers=num_workers)
        assert sample["array"].numpy().ctypes.data == array.ctypes.data
        assert sample["text"] == text


@dataclass
class Record:
    x: int


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class FarPoint(Point):
    pass


def collate_points(points: Sequence[Point], *, collate_fn_map: Any = None) -> Any:
    return "points", collate([point.x for point in points], collate_fn_map=collate_fn_map)


def collate_arrays(arrays: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    return [array.sum() for array in arrays]


REGISTERED: list[tuple[type, Callable[..., Any], MakeSample]] = [
    (Point, collate_points, Point),
    (Point, collate_points, FarPoint),
    (Point, collate_points, lambda i: {"points": [Point(i), i]}),
    (Point, collate_points, lambda i: i if i % 2 else Point(i)),
    (np.ndarray, collate_arrays, lambda i: (grid(i), torch.tensor(i), {"read-only": np.frombuffer(b"abc", np.uint8)})),
    (torch.Tensor, collate_arrays, lambda i: (grid(i), torch.tensor(grid(i)))),
    (int, collate_arrays, lambda i: i),
    (bool, lambda bools, collate_fn_map: all(bools), lambda i: i > 2),
    (dict, lambda dicts, collate_fn_map: [*dicts], lambda i: {"a": i}),
    (tuple, lambda tuples, collate_fn_map: [*tuples], lambda i: (i, Pair(i, "s"))),
    (Record, lambda records, collate_fn_map: [*records], lambda i: (Record(i), i)),
]


@pytest.mark.parametrize(("kind", "rule", "make"), REGISTERED)
@pytest.mark.parametrize("persistent", [False, True])
def test_rules_that_users_register_with_torch_hold_from_the_next_pass_on(
    kind: type, rule: Callable[..., Any], make: MakeSample, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = Made(make)
    with contextlib.ExitStack() as stack:
        loaders = [
            (way, stack.enter_context(DataLoader(made, 2, num_workers=way.num_workers, persistent_workers=persistent)))
            for way in WAYS
            if way.num_workers > 0 or not persistent
        ]
        for registered in (False, True, False):
            with monkeypatch.context() as patch:
                if registered:
                    patch.setitem(default_collate_fn_map, kind, rule)
                expected = torch_outcomes(made, batch_size=2)
                if not registered and Record in (kind, type(make(0))):
                    expected = []  # torch has no answer
                for way, loader in loaders:
                    got = way.face(loader)
                    if expected:
                        assert_same(got, expected, f"{way}, registered={registered}")
