"""How far ahead of the consumer loading may be: in batches, in bytes, and into the next pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from outcomes import of_iterator

from aioload import DataLoader
from aioload.engine import plan, window
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems, Gates

positive = st.integers(1, 1000)


@given(factor=positive, workers=positive, size=positive, concurrent=st.integers(0, 1000))
def test_batches_ahead_are_as_many_as_torch_has_or_as_many_as_keep_the_reads_going(
    factor: int, workers: int, size: int, concurrent: int
) -> None:
    ahead = window.max_batches(prefetch_factor=factor, num_workers=workers, batch_size=size, num_concurrent=concurrent)
    assert ahead >= factor * workers
    assert ahead * size >= concurrent
    assert ahead == factor * workers or (ahead - 1) * size < concurrent


def test_some_batch_is_ahead_whatever_the_arguments() -> None:
    assert window.max_batches(prefetch_factor=0, num_workers=0, batch_size=0, num_concurrent=0) == 1


@given(most=st.integers(0, 100), size=st.integers(1, 100), limit=st.integers(0, 1000))
def test_batches_ahead_fill_no_more_than_the_bytes_allowed_save_one(most: int, size: int, limit: int) -> None:
    ahead = window.batches_ahead(max_batches=most, batch_bytes=size, max_bytes=limit)
    assert ahead >= 1
    assert ahead == 1 or (ahead <= most and ahead * size <= limit)
    assert ahead >= most or (ahead + 1) * size > limit


@given(most=st.integers(1, 100), limit=st.integers(0, 1000))
def test_bytes_do_not_count_before_they_are_known(most: int, limit: int) -> None:
    assert window.batches_ahead(max_batches=most, batch_bytes=0, max_bytes=limit) == most


class Rows(GatedDataset):
    """Rows of 800 bytes."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return torch.full((100,), index)


class AwaitedRows(AsyncGatedDataset):
    async def __getitem__(self, index: int) -> Any:
        await super().__getitem__(index)
        return torch.full((100,), index)


class FileRows(GatedFiles):
    def decode(self, data: bytes, index: int) -> Any:
        return torch.full((100,), super().decode(data, index))


class BatchedRows(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class RowItems(GatedItems):
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((100,), index) for index in super().__iter__())


def make_rows(kind: str, folder: Path, size: int) -> Any:
    if kind == "files":
        return FileRows(folder, size)
    return {"map": Rows, "async": AwaitedRows, "getitems": BatchedRows, "iterable": RowItems}[kind](size)


KINDS = ["map", "async", "files", "getitems", "iterable"]
by_rows = pytest.mark.parametrize("arguments", [{}, {"collate_fn": torch.stack}], ids=["rows", "collate_fn"])


@pytest.fixture
def one_batch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders find so little memory that not even two batches of two rows may be ahead."""
    monkeypatch.setattr(plan, "available_bytes", lambda: 4 * 2 * 1600 - 1)


@by_rows
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_batch_fits")
def test_one_batch_is_ahead_when_batches_turn_out_to_be_large(
    kind: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    with (
        make_rows(kind, tmp_path, 40) as dataset,
        DataLoader(
            dataset, batch_size=2, num_workers=2, num_concurrent_reads=2, prefetch_factor=4, **arguments
        ) as loader,
    ):
        batches = iter(loader)
        dataset.gates.open(0, 1)
        assert next(batches)[:, 0].tolist() == [0, 1]
        dataset.gates.open_all()  # now that it is known how large batches are
        for number in range(1, 20):
            dataset.gates.wait_started(2 * number + 1)
            assert max(dataset.gates.started) == 2 * number + 1
            assert next(batches)[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert next(batches, None) is None


@by_rows
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_batch_fits")
def test_nothing_waits_for_ever_where_one_batch_fits(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    for in_order in (True, False):
        for batch_size in (1, 2, 7):
            with (
                make_rows(kind, tmp_path, 40) as dataset,
                DataLoader(
                    dataset,
                    batch_size=batch_size,
                    num_workers=3,
                    num_concurrent_reads=8,
                    in_order=in_order,
                    **arguments,
                ) as loader,
            ):
                dataset.gates.open_all()
                rows = [row for batch in of_iterator(iter(loader)) for row in batch]
            assert (rows if in_order else sorted(rows)) == [[index] * 100 for index in range(40)]


@pytest.mark.usefixtures("one_batch_fits")
def test_batches_of_tensors_are_bounded_before_the_first() -> None:
    tensors = torch.utils.data.TensorDataset(torch.arange(40))
    with DataLoader(tensors, batch_size=2, num_workers=2) as loader:
        assert [batch.tolist() for (batch,) in loader] == [[index, index + 1] for index in range(0, 40, 2)]


def test_the_next_pass_begins_while_this_one_ends() -> None:
    dataset = GatedDataset(8, opened=True)
    with DataLoader(dataset, num_workers=2, prefetch_factor=2, persistent_workers=True) as loader:
        batches = iter(loader)
        for index in range(8):
            # Four batches are ahead, of this pass and the next together.
            dataset.gates.wait_num_started(index + 4)
            assert len(dataset.gates.started) == index + 4
            assert next(batches).tolist() == [index]
        dataset.gates.wait_num_started(12)
        assert sorted(dataset.gates.started[8:]) == [0, 1, 2, 3]
        assert next(batches, None) is None
        assert of_iterator(iter(loader)) == [[index] for index in range(8)]


def test_the_next_pass_does_not_begin_early_without_persistent_workers() -> None:
    with GatedDataset(8, opened=True) as dataset:
        with DataLoader(dataset, num_workers=2) as loader:
            assert of_iterator(iter(loader)) == [[index] for index in range(8)]
        assert sorted(dataset.gates.started) == list(range(8))


def test_a_pass_that_began_early_is_dropped_when_the_dataset_has_changed() -> None:
    dataset = GatedDataset(4, opened=True)
    with DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        assert of_iterator(iter(loader)) == [[0], [1], [2], [3]]
        dataset.gates = Gates(opened=True)
        assert of_iterator(iter(loader)) == [[0], [1], [2], [3]]
        assert {0, 1, 2, 3} == set(dataset.gates.finished)
