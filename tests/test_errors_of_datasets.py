"""Datasets that follow no protocol, or break theirs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from failing import StagedNumbers
from outcomes import EVERY_WAY, of_iterator

from aioload import DataLoader, ErrorContext, error_context
from aioload.errors import DatasetError, StoppedIterationError


def test_a_dataset_without_any_protocol() -> None:
    for dataset in (object(), (index for index in range(3))):
        for load in EVERY_WAY:
            with pytest.raises(TypeError, match=r"needs __getitem__ .* which has none of them") as caught:
                load(dataset, sampler=[0])
            assert isinstance(caught.value, DatasetError)
            assert type(dataset).__name__ in str(caught.value)


async def coroutine() -> int:
    raise AssertionError


class HiddenCoroutine:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return coroutine()


class AsyncBatches(HiddenCoroutine):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError

    async def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError


class AsyncDecoding(StagedNumbers):
    async def decode(self, data: bytes, index: int) -> Any:  # type: ignore[override]  # the mistake
        raise AssertionError


def test_a_coroutine_where_none_is_awaited(tmp_path: Any) -> None:
    inner: Any = HiddenCoroutine()
    for dataset, arguments, name, stage in (
        (HiddenCoroutine(), {}, "HiddenCoroutine.__getitem__", "fetch"),
        (HiddenCoroutine(), {"batch_size": None}, "HiddenCoroutine.__getitem__", "fetch"),
        (torch.utils.data.Subset(inner, [0, 1]), {}, "HiddenCoroutine.__getitem__", "fetch"),
        (AsyncBatches(), {}, "AsyncBatches.__getitems__", "fetch"),
        (AsyncDecoding(tmp_path), {}, "AsyncDecoding.decode", "decode"),
    ):
        for load in EVERY_WAY:
            got = load(dataset, **arguments)
            assert len(got) == len(dataset)
            for error in got:
                assert isinstance(error, DatasetError)
                assert f"{name} returned a coroutine" in str(error)
                context = error_context(error)
                assert context is not None
                assert context.stage == stage


def test_a_worker_init_fn_that_fails() -> None:
    def fail(number: int) -> None:
        raise error

    error = LookupError()
    with DataLoader(range(4), num_workers=1, worker_init_fn=fail) as loader:
        batches = iter(loader)
        for _ in range(2):  # no thread can load any more
            with pytest.raises(LookupError) as caught:
                next(batches)
            assert caught.value is error
        assert error_context(error) == ErrorContext(None, None, "worker_init_fn")


class Items(torch.utils.data.IterableDataset[int]):
    """Five items, then ``error`` if there is one; fails a test that asks on after the end."""

    def __init__(self, error: BaseException | None = None, *, at_once: bool = False) -> None:
        self.error, self.at_once = error, at_once
        self.num_iterators = 0

    def __iter__(self) -> Iterator[int]:
        self.num_iterators += 1
        if self.at_once:
            assert self.error is not None
            raise self.error
        return ItemIterator(self.error)


class ItemIterator:
    def __init__(self, error: BaseException | None) -> None:
        self.error, self.position, self.ended = error, 0, False

    def __iter__(self) -> "ItemIterator":
        return self

    def __next__(self) -> int:
        assert not self.ended, "asked for more after the end"
        self.position += 1
        if self.position <= 5:
            return self.position - 1
        error, self.error = self.error, None
        if error is None:
            self.ended = True
            raise StopIteration
        raise error


EXPECTED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"batch_size": None}, [0, 1, 2, 3, 4]),
    ({"batch_size": 1}, [[0], [1], [2], [3], [4]]),
    ({"batch_size": 2}, [[0, 1], [2, 3], [4]]),
    ({"batch_size": 5}, [[0, 1, 2, 3, 4]]),
    ({"batch_size": 5, "drop_last": True}, [[0, 1, 2, 3, 4]]),
    ({"batch_size": 2, "drop_last": True}, [[0, 1], [2, 3]]),
    ({"batch_size": 8, "drop_last": True}, []),
]


@pytest.mark.parametrize(("arguments", "batches"), EXPECTED)
def test_items_come_until_the_first_error_and_nobody_asks_on_after_the_end(
    arguments: dict[str, Any], batches: list[Any]
) -> None:
    for load in EVERY_WAY:
        assert load(Items(), **arguments) == batches
        for kind in (LookupError, SystemExit, StopAsyncIteration):
            error = kind()
            *before, last = load(Items(error), **arguments)
            assert before == batches
            assert last is error or (isinstance(last, StoppedIterationError) and last.__cause__ is error)
            assert error_context(last) == ErrorContext(5, None, "fetch")


def test_a_generator_that_fails() -> None:
    class Generated(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise error

    for load in EVERY_WAY:
        error = LookupError()
        assert load(Generated()) == [[0], [1], [2], [3], [4], error]
        assert error_context(error) == ErrorContext(5, None, "fetch")


def test_a_dataset_that_gives_no_iterator_is_asked_once() -> None:
    for load in EVERY_WAY:
        for arguments, _ in EXPECTED:
            for kind in (LookupError, SystemExit):
                error = kind()
                dataset = Items(error, at_once=True)
                assert load(dataset, **arguments) == [error]
                assert dataset.num_iterators == 1
                assert error_context(error) == ErrorContext(0, None, "fetch")


def test_an_iterator_that_goes_on_after_an_error() -> None:
    class Stuttering(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return map(self.make, range(4))

        def make(self, index: int) -> int:
            if index == 2:
                raise error
            return index

    error = LookupError()
    for load in EVERY_WAY:
        assert load(Stuttering()) == [[0], [1], error, [3]]
    with DataLoader(Stuttering(), num_workers=2, in_order=False) as loader:
        got = of_iterator(iter(loader))
    assert error in got
    assert sorted(each for each in got if each is not error) == [[0], [1], [3]]


def test_a_dataset_that_returns_more_or_fewer_samples_than_it_was_asked_for() -> None:
    class Generous:
        def __init__(self, num_extra: int) -> None:
            self.num_extra = num_extra

        def __len__(self) -> int:
            return 4

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [*indices, *[9] * self.num_extra][: len(indices) + self.num_extra]

    for load in EVERY_WAY:
        assert load(Generous(1), batch_size=2) == [[0, 1, 9], [2, 3, 9]]
        assert load(Generous(-1), batch_size=2) == [[0], [2]]
        for error in load(Generous(-2), batch_size=2):
            assert isinstance(error, IndexError)
