"""A layout says where each leaf lies, without overlap, and its batch is the one that torch's default_collate makes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same
from structures import NUMPY_DTYPES, STRUCTURES, TORCH_DTYPES, MakeSample, Pair, grid, nested
from torch.utils.data import default_collate

from aioload.layout import ALIGNMENT, Layout
from aioload.ring import Ring

ROW_TORCH_DTYPES = [dtype for dtype in TORCH_DTYPES if "fnuz" not in str(dtype)]
"""Those that a row can be written of."""

deterministic = settings(deadline=None, derandomize=True, max_examples=150)


class Spec(NamedTuple):
    """What makes samples of one structure: containers of functions of a random generator."""

    make: Callable[[np.random.Generator], Any]
    in_torch: bool = True  # whether torch has an answer


@dataclass(frozen=True)
class Record:
    a: Any
    b: Any = None


def array_of(kind: str, shape: tuple[int, ...]) -> Spec:
    dtype = np.dtype(kind)

    def make(rng: np.random.Generator) -> Any:
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(bool)
        return np.frombuffer(rng.bytes(dtype.itemsize * int(np.prod(shape, dtype=int))), dtype).reshape(shape).copy()

    return Spec(make)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Spec:
    def make(rng: np.random.Generator) -> Any:
        if dtype is torch.bool:
            return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
        flat = torch.empty(int(np.prod(shape, dtype=int)), dtype=dtype)
        flat.view(torch.uint8).numpy()[:] = np.frombuffer(rng.bytes(flat.nbytes), np.uint8)
        return flat.view(shape)

    return Spec(make)


def texts(rng: np.random.Generator) -> str:
    return "".join(map(chr, rng.integers(32, 1000, rng.integers(5))))


def scalars_of(kind: str) -> Callable[[np.random.Generator], Any]:
    return lambda rng: np.dtype(kind).type(rng.integers(0, 100))


NUMBERS = [
    Spec(lambda rng: int(rng.integers(-(2**63), 2**63 - 1))),
    Spec(lambda rng: float(rng.normal())),
    Spec(lambda rng: bool(rng.integers(2))),
    Spec(texts),
    Spec(lambda rng: rng.bytes(3)),
    *[Spec(scalars_of(kind)) for kind in NUMPY_DTYPES if kind not in ("u8", "Q")],
]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaf_specs = st.one_of(
    st.builds(array_of, st.sampled_from([kind for kind in NUMPY_DTYPES if kind != "Q"]), shapes),
    st.builds(tensor_of, st.sampled_from(ROW_TORCH_DTYPES), shapes),
    st.sampled_from(NUMBERS),
)


def containers(children: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    some = st.lists(children, max_size=4)
    two = st.tuples(children, children)
    keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.none())
    return st.one_of(
        some.map(lambda specs: spec_of(specs, tuple)),
        some.map(lambda specs: spec_of(specs, list)),
        two.map(lambda specs: spec_of(specs, lambda parts: Pair(*parts))),
        two.map(lambda specs: spec_of(specs, lambda parts: Record(*parts))._replace(in_torch=False)),
        st.dictionaries(keys, children, max_size=4).map(
            lambda specs: spec_of(list(specs.values()), lambda parts: dict(zip(specs, parts, strict=True)))
        ),
    )


def spec_of(specs: Any, build: Callable[[list[Any]], Any]) -> Spec:
    return Spec(lambda rng: build([spec.make(rng) for spec in specs]), all(spec.in_torch for spec in specs))


specs = st.recursive(leaf_specs, containers, max_leaves=12)
num_rows = st.integers(1, 5)


def samples_of(spec: Spec, count: int) -> list[Any]:
    rng = np.random.default_rng(count)
    return [spec.make(rng) for _ in range(count)]


def arena_of(layout: Layout, rows: int) -> "np.ndarray[Any, Any]":
    return np.full(layout.offsets(rows)[1], 0xDB, np.uint8)


def batch_of(layout: Layout, samples: list[Any]) -> Any:
    """Return the batch, through a slot of a ring."""
    ring = Ring()
    slot = ring.acquire(layout.offsets(len(samples))[1])
    columns = layout.columns(slot.arena, len(samples))
    for row in reversed(range(len(samples))):
        assert layout.write(columns, row, [samples[row]])
    slot.seal()
    return layout.batch(layout.tensors(columns, len(samples), ring.lend(slot)))


@deterministic
@given(specs, num_rows)
def test_leaves_are_aligned_and_lie_one_behind_the_other(spec: Spec, rows: int) -> None:
    layout = Layout.of(spec.make(np.random.default_rng(0)))
    assert layout is not None
    offsets, size = layout.offsets(rows)
    assert len(offsets) == len(layout.leaves)
    assert all(offset % ALIGNMENT == 0 for offset in [*offsets, size])
    for leaf, start, end in zip(layout.leaves, offsets, [*offsets, size][1:], strict=True):
        assert start + leaf.row_bytes * rows <= end < start + leaf.row_bytes * rows + ALIGNMENT
    for column, leaf in zip(layout.columns(arena_of(layout, rows), rows), layout.leaves, strict=True):
        assert len(column) == rows
        assert leaf.dtype is None or isinstance(column, np.ndarray)


@deterministic
@given(specs, num_rows)
def test_what_was_written_is_read_back(spec: Spec, rows: int) -> None:
    samples = samples_of(spec, rows)
    layout = Layout.of(samples[0])
    assert layout is not None
    arena = arena_of(layout, rows)
    columns = layout.columns(arena, rows)
    assert all(layout.write(columns, row, [sample]) for row, sample in enumerate(samples))
    got = [layout.read(columns, row) for row in range(rows)]
    arena.fill(0)  # what was read is a copy
    assert_same(got, samples)


@deterministic
@given(specs, num_rows)
def test_rows_written_together_are_those_written_one_by_one(spec: Spec, rows: int) -> None:
    samples = samples_of(spec, rows)
    layout = Layout.of(samples[0])
    assert layout is not None
    one_by_one, at_once = arena_of(layout, rows + 1), arena_of(layout, rows + 1)
    singly, together = (layout.columns(arena, rows + 1) for arena in (one_by_one, at_once))
    for row, sample in enumerate(samples, 1):
        assert layout.write(singly, row, [sample])
    assert layout.write(together, 1, samples)
    assert np.array_equal(one_by_one, at_once)
    assert_same([layout.read(together, row) for row in range(1, rows + 1)], samples)


@deterministic
@given(specs, specs, num_rows)
def test_one_that_does_not_fit_has_all_refused(spec: Spec, other: Spec, rows: int) -> None:
    samples, odd = samples_of(spec, rows), other.make(np.random.default_rng(1))
    layout = Layout.of(samples[0])
    assert layout is not None
    columns = layout.columns(arena_of(layout, rows + 1), rows + 1)
    assert layout.write(columns, 0, [*samples, odd]) == layout.write(columns, rows, [odd])


@deterministic
@given(specs, num_rows)
def test_the_batch_is_that_of_default_collate(spec: Spec, rows: int) -> None:
    samples = samples_of(spec, rows)
    layout = Layout.of(samples[0])
    assert layout is not None
    batch = batch_of(layout, samples)
    if spec.in_torch:
        assert_same(batch, default_collate(samples))


@deterministic
@given(specs, specs)
def test_a_sample_is_refused_or_read_back(one: Spec, other: Spec) -> None:
    """Never taken for something else."""
    rng = np.random.default_rng(1)
    layout, sample = Layout.of(one.make(rng)), other.make(rng)
    assert layout is not None
    columns = layout.columns(arena_of(layout, 1), 1)
    if layout.write(columns, 0, [sample]):
        assert_same(layout.read(columns, 0), sample)


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_whatever_has_a_layout_is_batched_as_by_torch(make: MakeSample) -> None:
    samples = [make(i) for i in range(3)]
    layout = Layout.of(samples[0])
    if layout is None:
        return
    columns = layout.columns(arena_of(layout, 3), 3)
    if all(layout.write(columns, row, [sample]) for row, sample in enumerate(samples)):
        assert_same(batch_of(layout, samples), default_collate([writable(sample) for sample in samples]))


def writable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)([writable(part) for part in value])
    return {key: writable(part) for key, part in value.items()} if type(value) is dict else value


GENERAL: dict[str, Any] = {
    "requires_grad": torch.ones(2, requires_grad=True),
    "subclass": torch.nn.Parameter(torch.ones(2)),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": torch.eye(2).to_sparse(),
    "nested": nested(2),
    "meta": torch.zeros(2, device="meta"),
    "None": None,
    "object": object(),
    "type": Record,
    "objects": np.array([None]),
    "foreign": np.zeros(2, ">f4"),
    "uint64": np.uint64(1),
    "ulonglong": np.ulonglong(1),
    "too large": 2**63,
    "set": {1},
}


@pytest.mark.parametrize("value", GENERAL.values(), ids=GENERAL.keys())
def test_what_takes_the_general_path(value: Any) -> None:
    for sample in (value, (1, value), {"a": [value]}, Record(value)):
        layout = Layout.of(sample)
        if layout is not None:  # an int shows its size only when it is written
            assert not layout.write(layout.columns(arena_of(layout, 1), 1), 0, [sample])


class Picky:
    def __init__(self) -> None:
        raise AssertionError

    def __getattribute__(self, name: str) -> Any:
        if name == "a":
            raise ValueError
        return super().__getattribute__(name)


@dataclass(init=False)
class Unreadable(Picky):
    a: int


def test_a_sample_whose_own_code_fails_has_no_layout_and_fits_none() -> None:
    unreadable = Unreadable.__new__(Unreadable)
    assert Layout.of(unreadable) is None
    layout = Layout.of(Record(grid(0)))
    assert layout is None  # of the None in it
    layout = Layout.of({"a": 1, "b": grid(0)})
    assert layout is not None
    columns = layout.columns(arena_of(layout, 1), 1)
    assert not layout.write(columns, 0, [{"a": 1, "b": unreadable}])


def test_a_layout_shows_its_leaves() -> None:
    layout = Layout.of((np.zeros((2, 3), np.float32), 1, "s"))
    assert layout is not None
    assert [leaf.row_bytes for leaf in layout.leaves] == [24, 8, 0]
    assert repr(layout.leaves[0]) == "<_ArrayLeaf 0 (2, 3) torch.float32>"
