"""What goes wrong with the indices comes after the batches before it, and ends the pass."""

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from outcomes import EVERY_WAY, of_iterator

from aioload import DataLoader, ErrorContext, error_context
from aioload.errors import StoppedIterationError

SAMPLER = ErrorContext(None, None, "sampler")


def user_code(error: BaseException) -> None:
    raise error


class FailingSampler(torch.utils.data.Sampler[Any]):
    """Gives ``entries`` and then fails."""

    def __init__(self, entries: list[Any], error: BaseException) -> None:
        self.entries, self.error = entries, error

    def __iter__(self) -> Iterator[Any]:
        yield from self.entries
        user_code(self.error)


class FailingIteration:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        raise self.error


@pytest.mark.parametrize("num_before", [0, 1, 4, 20])
def test_a_sampler_that_fails_at_a_draw(num_before: int) -> None:
    indices = list(range(num_before))
    pairs = [[index, index] for index in indices]
    for kind in (LookupError, SystemExit, StopAsyncIteration):
        for load in EVERY_WAY:
            for arguments, before in (
                ({"sampler": indices}, [[index] for index in indices]),
                ({"sampler": indices, "batch_size": None}, indices),
                ({"batch_sampler": pairs}, pairs),
            ):
                error = kind("no more")
                (name,) = arguments.keys() & {"sampler", "batch_sampler"}
                entries: Any = arguments[name]
                sampler = FailingSampler(entries, error)
                *got, last = load(range(20), **{**arguments, name: sampler})
                assert got == before
                if kind is StopAsyncIteration:
                    assert isinstance(last, StoppedIterationError)
                    assert last.__cause__ is error
                else:
                    assert last is error
                assert error_context(last) == SAMPLER
                assert last.__notes__ == ["aioload: failed at stage 'sampler'"]
                assert "user_code" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_sampler_that_fails_in_the_middle_of_a_batch() -> None:
    for load in EVERY_WAY:
        error = LookupError()
        assert load(range(20), batch_size=2, sampler=FailingSampler([0, 1, 2], error)) == [[0, 1], error]


def test_an_error_of_the_sampler_comes_last_whatever_the_order() -> None:
    error = LookupError()
    with DataLoader(range(20), num_workers=2, in_order=False, sampler=FailingSampler([*range(9)], error)) as loader:
        *batches, last = of_iterator(iter(loader))
    assert sorted(batches) == [[index] for index in range(9)]
    assert last is error


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_sampler_that_fails_at_once(name: str) -> None:
    for load in EVERY_WAY:
        for error in (LookupError(), SystemExit(3)):
            sampler = FailingIteration(error)
            arguments: dict[str, Any] = {name: sampler}
            if name == "sampler":
                arguments["batch_size"] = None
            with pytest.raises(type(error)) as caught:
                load(range(4), **arguments)
            assert caught.value is error
            assert error_context(error) == SAMPLER


def test_a_batch_of_indices_that_is_none() -> None:
    for load in EVERY_WAY:
        first, error = load(range(4), batch_sampler=[[0, 1], 2])
        assert first == [0, 1]
        assert isinstance(error, TypeError)
        assert error_context(error) == SAMPLER


def test_a_batch_of_indices_that_stops_does_not_end_the_loop_in_silence() -> None:
    stop = StopIteration()
    for load in EVERY_WAY:
        first, error = load(range(4), batch_sampler=[[0, 1], FailingIteration(stop), [2, 3]])
        assert first == [0, 1]
        assert isinstance(error, StoppedIterationError)
        assert error.__cause__ is stop


def test_an_empty_batch_of_indices_is_the_error_it_is_for_torch() -> None:
    def torch_error() -> Exception:
        with pytest.raises(IndexError) as caught:
            next(iter(torch.utils.data.DataLoader(dataset, batch_sampler=[[]])))
        return caught.value

    dataset: Any
    for dataset in (range(4), torch.utils.data.TensorDataset(torch.arange(4))):
        for load in EVERY_WAY:
            error, *_ = load(dataset, batch_sampler=[[], [1]])
            assert (type(error), str(error)) == (IndexError, str(torch_error()))
            assert error_context(error) == ErrorContext([], None, "collate")


def test_a_dataset_that_does_not_know_its_length() -> None:
    class Endless:
        def __len__(self) -> int:
            raise error

        def __getitem__(self, index: int) -> int:
            return index

    error = LookupError()
    for load in EVERY_WAY:
        assert load(Endless()) == [error]
        assert error_context(error) == SAMPLER
        assert load(Endless(), sampler=[5, 6]) == [[5], [6]]
