"""``sample_rng()`` by kind of index, and where the running code works for no sample at all."""

import threading
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from outcomes import EVERY_WAY, Load, by_for
from sampling import Drawing, Files, Items, ManyDrawing, draw, plain

from aioload import DataLoader, error_context, sample_rng
from aioload.errors import NoSampleError


class Keyed(Drawing):
    """Takes any index."""

    def __getitem__(self, index: Any) -> int:
        return draw()


def drawn_for(*indices: Any, seed: int = 0) -> list[int]:
    with DataLoader(Keyed(), None, sampler=list(indices), seed=seed, num_workers=1) as loader:
        return list(loader)


def test_equal_indices_of_any_type_draw_the_same() -> None:
    class Colour(StrEnum):
        RED = "red"

    for equal in (
        [3, np.int64(3), np.uint8(3), torch.tensor(3), True + 2],
        [-1, np.int32(-1), torch.tensor(-1)],
        ["red", np.str_("red"), Colour.RED],
        [b"red", np.bytes_(b"red")],
        [("a", 1), ("a", np.int64(1)), ["a", 1], (np.str_("a"), torch.tensor(1))],
        [2**70, 2**70],
        [np.uint64(2**63), 2**63],
    ):
        assert len(set(drawn_for(*equal))) == 1, equal


def test_other_indices_draw_others() -> None:
    indices: list[Any] = [0, 1, -1, 2**32, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 2**64 - 1, -(2**64), 2**128]
    indices += ["", "0", "1", b"0", "a", "('a')", "'a'", "(1, 2)", "é", "\ud800"]
    indices += [(), ("a",), (("a",),), ("a", "b"), ("a, b",), ("ab",), ("a", ("b",))]
    indices += [(1, 2), ((1, 2),), (12,), (1, "2"), ("1", 2)]
    numbers = drawn_for(*indices)
    assert len(set(numbers)) == len(indices)
    assert drawn_for(*reversed(indices)) == numbers[::-1]


@pytest.mark.parametrize(
    "index",
    [1.5, None, {}, {1}, slice(3), object(), (1, 2.0), np.zeros(2), Path("a")],
    ids=lambda index: type(index).__name__,
)
def test_other_kinds_of_index_are_refused_clearly_and_another_can_be_given(index: Any) -> None:
    with DataLoader(Keyed(), None, sampler=[index, 3], seed=0, num_workers=1) as loader:
        batches = iter(loader)
        with pytest.raises(NoSampleError, match=r"a whole number, a string, bytes or a tuple of these.*sample_rng\("):
            next(batches)
        assert list(batches) == drawn_for(3)

    class Numbered(Drawing):
        def __getitem__(self, _: Any) -> int:
            return int(sample_rng(3).integers(1 << 62))

    with DataLoader(Numbered(), None, sampler=[index], seed=0, num_workers=1) as loader:
        assert list(loader) == drawn_for(3)


class DrawingForBatches(ManyDrawing):
    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [draw() for _ in indices]


def drawing_collate(samples: list[Any]) -> int:
    return draw()


@pytest.mark.parametrize("load", EVERY_WAY)
@pytest.mark.parametrize(
    ("make", "arguments", "stage"),
    [
        (lambda _: DrawingForBatches(), {}, "fetch"),
        (lambda _: Drawing(), {"collate_fn": drawing_collate}, "collate"),
        (lambda _: ManyDrawing(), {"collate_fn": drawing_collate}, "collate"),
        (lambda _: Items(), {"collate_fn": drawing_collate}, "collate"),
        (Files, {"collate_fn": drawing_collate}, "collate"),
        (lambda _: Drawing(), {"collate_fn": drawing_collate, "batch_size": None}, "collate"),
    ],
    ids=["getitems", "map", "many", "items", "files", "samples"],
)
def test_code_that_works_for_a_batch_has_no_numbers(
    load: Load, make: Any, arguments: dict[str, Any], stage: str, tmp_path: Path
) -> None:
    got = load(make(tmp_path), **arguments)
    assert len(got) == 12
    for each in got:
        assert isinstance(each, NoSampleError)
        assert "sample_rng(index)" in str(each)
        context = error_context(each)
        assert context is not None
        assert context.stage == stage


def test_a_collate_fn_may_draw_for_a_sample() -> None:
    def collate(samples: list[Any]) -> list[bool]:
        generators = [sample_rng(index) for index, _, _ in samples]
        return [
            [int(generator.integers(1 << 62)) for _ in range(2)] == list(numbers)
            for generator, (_, *numbers) in zip(generators, samples, strict=True)
        ]

    for dataset in (Drawing(), ManyDrawing()):
        for num_workers in (0, 2):
            got = by_for(dataset, batch_size=4, collate_fn=collate, num_workers=num_workers)
            assert got == [[True] * 4] * 3


@pytest.mark.parametrize("kind", [Drawing, Items])
def test_worker_init_fn_has_no_numbers(kind: Any) -> None:
    def begin(_: int) -> None:
        draw()

    with DataLoader(kind(), num_workers=2, worker_init_fn=begin) as loader, pytest.raises(NoSampleError):
        next(iter(loader))


def test_a_thread_of_the_users_has_no_numbers() -> None:
    class Elsewhere(Drawing):
        def __getitem__(self, index: int) -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(draw).result()

    got = by_for(Elsewhere())
    assert len(got) == 12
    for each in got:
        assert isinstance(each, NoSampleError)
        assert "a thread that no loader has started" in str(each)

    errors: list[BaseException] = []

    def try_it() -> None:
        for index in (None, 3):
            try:
                sample_rng(index)
            except NoSampleError as exc:
                errors.append(exc)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert len(errors) == 2


def test_in_the_main_thread_numbers_follow_manual_seed() -> None:
    def some() -> list[Any]:
        return [Drawing()[0], draw(), int(sample_rng(3).integers(1 << 62)), int(sample_rng("a").integers(1 << 62))]

    torch.manual_seed(1)
    first = some()
    assert some() != first
    torch.manual_seed(1)
    assert some() == first
    assert len({first[0][1], first[0][2], *first[1:]}) == 5


def test_outside_the_default_device_does_not_matter() -> None:
    torch.manual_seed(1)
    first = draw()
    torch.manual_seed(1)
    with torch.device("meta"):
        assert draw() == first


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_torchs_own_loader_can_load_the_same_dataset() -> None:
    def load(num_workers: int) -> list[Any]:
        torch.manual_seed(1)
        loader = torch.utils.data.DataLoader(Drawing(), 3, num_workers=num_workers, collate_fn=plain)  # type: ignore[arg-type,var-annotated]
        return [sample for batch in loader for sample in batch]

    for num_workers in (0, 2):
        first = load(num_workers)
        assert load(num_workers) == first
        assert len({number for _, *numbers in first for number in numbers}) == 24


def test_nothing_is_left_of_a_pass_in_the_main_thread() -> None:
    torch.manual_seed(1)
    expected = draw()
    with DataLoader(Drawing(), 3, num_workers=0, collate_fn=plain) as loader:
        batches = iter(loader)
        next(batches)
        torch.manual_seed(1)
        assert draw() == expected


class Nested(Drawing):
    """Has a loader of its own inside each sample."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def __getitem__(self, index: int) -> Any:
        first = draw()
        with DataLoader(Drawing(), 5, seed=1, num_workers=self.num_workers, collate_fn=plain) as loader:
            inner = [sample for batch in loader for sample in batch]
        return (index, first, draw()), inner


@pytest.mark.parametrize("inner_workers", [0, 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_inside_a_sample_has_numbers_of_its_own(num_workers: int, inner_workers: int) -> None:
    def load(dataset: Any, seed: int) -> list[Any]:
        with DataLoader(dataset, None, seed=seed, num_workers=num_workers) as loader:
            return list(loader)

    inner = load(Drawing(), 1)
    assert load(Nested(inner_workers), 0) == [[outer, inner] for outer in load(Drawing(), 0)]


class RandomFiles(Files):
    """Draws which file to read; that of a sample is always the same, also in an error's words."""

    def location(self, index: int) -> str:
        return f"{super().location(index)}-{sample_rng().integers(1000)}"


def test_an_error_names_the_path_that_was_drawn(tmp_path: Path) -> None:
    for num_workers in (0, 2):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        for error in by_for(RandomFiles(tmp_path), seed=1, num_workers=num_workers):
            assert isinstance(error, FileNotFoundError)
            context = error_context(error)
            assert context is not None
            assert str(context.location) == error.filename
        torch.empty((), dtype=torch.int64).random_()  # the base seed
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.empty((), dtype=torch.int64).random_(), torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(torch.get_rng_state(), after)
