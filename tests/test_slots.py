"""Slots through the loader: a batch that is held stays as it is, and memory that nobody holds is used again."""

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from oracle import by_async_for, by_for

from aioload import DataLoader, FileDataset, TensorDataset
from aioload.context import PassContext
from aioload.engine.batch import Batch
from aioload.engine.recipe import Recipe
from aioload.layout import Layout
from aioload.ring import Ring

POISON = 0xDB
SIZE = 60


def sample(index: int) -> Any:
    return {"row": np.full((3, 5), index, np.int32), "index": index, "name": f"s{index}"}


class Single:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Many(Single):
    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [sample(index) for index in indices]


class Awaited:
    def __len__(self) -> int:
        return SIZE

    async def __getitem__(self, index: int) -> Any:
        return sample(index)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(SIZE))


def files(folder: Path) -> Any:
    paths = [folder / str(index) for index in range(SIZE)]
    for index, path in enumerate(paths):
        path.write_bytes(bytes([index]))
    return FileDataset(paths, lambda data, _: sample(data[0]))


DATASETS: dict[str, Callable[[Path], Any]] = {
    "single": lambda _: Single(),
    "many": lambda _: Many(),
    "awaited": lambda _: Awaited(),
    "iterable": lambda _: Stream(),
    "files": files,
}
every_dataset = pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
every_face = pytest.mark.parametrize("face", [by_for, by_async_for])


def poisoned(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    """Return a loader whose free slots hold nothing but a byte that no sample has."""
    loader: DataLoader[Any] = DataLoader(dataset, 4, **{"num_workers": 3, **arguments})
    loader._runtime().ring.poison = POISON
    return loader


def check(batch: Any, number: int) -> None:
    indices = range(number * 4, number * 4 + 4)
    assert batch["index"].tolist() == list(indices)
    assert batch["name"] == [f"s{index}" for index in indices]
    assert (batch["row"].numpy() == np.array(indices)[:, None, None]).all()


@pytest.mark.parametrize("persistent", [False, True])
@every_face
@every_dataset
def test_batches_that_are_held_never_change(
    make: Callable[[Path], Any], face: Callable[..., Any], persistent: bool, tmp_path: Path
) -> None:
    with poisoned(make(tmp_path), persistent_workers=persistent) as loader:
        held = [batch for _ in range(4) for batch in face(loader)]
        assert len(held) == 60
        for number, batch in enumerate(held):
            check(batch, number % 15)


@pytest.mark.parametrize("persistent", [False, True])
@every_dataset
def test_a_view_of_one_leaf_is_enough(make: Callable[[Path], Any], persistent: bool, tmp_path: Path) -> None:
    with poisoned(make(tmp_path), persistent_workers=persistent) as loader:
        # Of some batches only, so that the slots of others are used again in between.
        held = [
            (number, batch["row"].numpy()[1:, 0].T)
            for _ in range(4)
            for number, batch in enumerate(loader)
            if number % 3 == 1
        ]
        for number, view in held:
            assert view.tolist() == [[number * 4 + 1, number * 4 + 2, number * 4 + 3]] * 5


@pytest.mark.parametrize("persistent", [False, True])
@every_dataset
def test_memory_that_nobody_holds_is_used_again(make: Callable[[Path], Any], persistent: bool, tmp_path: Path) -> None:
    with poisoned(make(tmp_path), num_workers=2, num_concurrent_reads=4, persistent_workers=persistent) as loader:
        addresses = set()
        for _ in range(6):
            for number, batch in enumerate(loader):
                check(batch, number)
                addresses.add(batch["row"].data_ptr())
            del batch
        ring = loader._runtime().ring
        # 4 ahead, twice where a pass begins while another ends, and one each that is consumed and put together.
        assert len(addresses) <= 10
        assert ring.max_held_seen <= 8  # those ahead count: they are the consumer's as soon as they are made
        assert len(ring._free) <= ring.max_free


def test_gathered_rows_are_held_and_used_again_too() -> None:
    rows = torch.arange(SIZE * 2).reshape(SIZE, 2)
    with poisoned(TensorDataset(rows, rows.numpy() * 10)) as loader:
        held = list(loader)
        addresses = {batch[0].data_ptr() for _ in range(4) for batch in loader}
    assert torch.equal(torch.cat([batch[0] for batch in held]), rows)
    assert torch.equal(torch.cat([batch[1] for batch in held]), rows * 10)
    assert len(addresses) <= 10


@every_face
def test_batches_of_two_layouts_in_turn(face: Callable[..., Any]) -> None:
    samples = [np.full(8 if index // 4 % 2 else 9, index) for index in range(400)]
    with poisoned(samples) as loader:
        held = face(loader)
        del held[::3]  # makes slots free that the next pass takes
        held += face(loader)
    numbers = [number for number in range(100) if number % 3] + list(range(100))
    for number, batch in zip(numbers, held, strict=True):
        assert batch.tolist() == [[index] * (8 if number % 2 else 9) for index in range(number * 4, number * 4 + 4)]


def test_a_consumer_may_write_to_its_batch() -> None:
    with poisoned(Single()) as loader:
        held = []
        for batch in loader:
            batch["row"] += 1000
            held.append(batch)
        for number, batch in enumerate(loader):
            check(batch, number)
    assert [int(batch["row"].min()) for batch in held] == [1000 + number * 4 for number in range(15)]


def test_passes_that_are_broken_off_leave_every_slot_to_others() -> None:
    with poisoned(Single()) as loader:
        for num_batches in range(8):
            for number, batch in enumerate(itertools.islice(loader, num_batches)):
                check(batch, number)
        for number, batch in enumerate(loader):
            check(batch, number)


def test_the_warning_of_held_batches_points_to_the_loop() -> None:
    loader: DataLoader[Any] = DataLoader(Single(), 4, num_workers=2)
    loader._runtime().ring.warn_held, loader._runtime().ring.warn_held_bytes = 5, 0
    for face in (by_for, by_async_for):
        with loader, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader._runtime().ring._warned = False
            assert len(face(loader)) == 15
        assert [each.category for each in caught] == [RuntimeWarning]
        assert "batches (0 MB) are still referenced" in str(caught[0].message)
        assert Path(caught[0].filename).name == "oracle.py"


@dataclass
class Spied:
    """Calls back when its second field is read."""

    a: int
    b: Any

    def __getattribute__(self, name: str) -> Any:
        if name == "b":
            SEEN()
        return super().__getattribute__(name)


SEEN: Callable[[], object] = lambda: None  # noqa: E731


def test_other_threads_do_not_see_a_layout_before_a_sample_has_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would write to a slot that may be given back at that moment."""
    ring = Ring(poison=POISON)
    recipe = Recipe(
        context=PassContext(None, 1, 0, None, 0),
        collate_fn=torch.utils.data.default_collate,
        batched=True,
        by_rows=True,
        on_device=False,
        pin=False,
        ring=ring,
        locate=lambda _: None,
        on_size=lambda _: None,
        tolerance=None,
    )
    recipe.layout = Layout.of(Spied(1, np.zeros(2)))
    batch = Batch(0, [0, 1], recipe, lambda _: None)
    layouts: list[Layout | None] = []
    monkeypatch.setattr(f"{__name__}.SEEN", lambda: layouts.append(batch.layout))
    assert not batch.add(0, Spied(7, np.zeros(3)))
    assert len(layouts) == 3  # written by the old layout, looked at, written by its own
    assert layouts == [None] * 3
    assert batch.add(1, Spied(8, np.ones(3)))
    gc.collect()
    ring.release(ring.acquire(0))
