"""``iterable_workers``: several iterators over an iterable dataset, in the order of torch's worker processes."""

import itertools
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils.data
from outcomes import EVERY_WAY, FACES, Load, by_async_for_inline, by_for, by_for_inline, of_iterator
from sharding import SIZE, Shards, Stateful

from aioload import DataLoader, ErrorContext, error_context
from aioload.errors import DatasetError
from aioload.testing import GatedItems, Gates

SIZES = [(5, 5), (7, 2), (1, 9), (0, 3), (3, 0), (0, 0), (4, 0, 7), (1, 5, 3), (2, 2, 2), (0, 0, 1)]
ARGUMENTS: list[dict[str, Any]] = [{"batch_size": 2}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}]


class Turns(torch.utils.data.IterableDataset[Any]):
    """What torch's worker processes give, without the processes: they take turns, each for a batch, till its end."""

    def __init__(self, sizes: Any, batch_size: int | None, drop_last: bool = False) -> None:
        self.sizes, self.batch_size, self.drop_last = sizes, batch_size, drop_last

    def batches(self, number: int) -> Iterator[Any]:
        items = iter(range(100 * number, 100 * number + self.sizes[number]))
        if self.batch_size is None:
            yield from items
            return
        while batch := list(itertools.islice(items, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __iter__(self) -> Iterator[Any]:
        rounds = itertools.zip_longest(*(self.batches(number) for number in range(len(self.sizes))))
        return (batch for one in rounds for batch in one if batch is not None)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("sizes", "arguments"), [((4, 0, 7), ARGUMENTS[0]), ((1, 5, 3), ARGUMENTS[1]), ((2, 4), ARGUMENTS[2])]
)
def test_the_oracle_takes_turns_as_torchs_workers_do(sizes: Any, arguments: dict[str, Any]) -> None:
    loader = torch.utils.data.DataLoader(Shards(sizes), num_workers=len(sizes), **arguments)
    assert of_iterator(iter(loader)) == list(Turns(sizes, **arguments))


@pytest.mark.parametrize("load", EVERY_WAY)
@pytest.mark.parametrize("kind", [Shards, Stateful])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_batches_come_in_the_order_of_torchs_workers(kind: Any, arguments: dict[str, Any], load: Load) -> None:
    for sizes in SIZES:
        expected = list(Turns(sizes, **arguments))
        assert load(kind(sizes), iterable_workers=len(sizes), **arguments) == expected, sizes
    for num_workers in (1, 5):
        if load in FACES:
            got = load(kind((4, 0, 7)), iterable_workers=3, num_workers=num_workers, **arguments)
            assert got == list(Turns((4, 0, 7), **arguments))


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_is_the_same(persistent: bool) -> None:
    expected = list(Turns((1, 5, 3), 2))
    for kind in (Shards, Stateful):
        with DataLoader(kind((1, 5, 3)), 2, num_workers=2, iterable_workers=3, persistent_workers=persistent) as loader:
            next(iter(loader))
            for _ in range(3):
                assert of_iterator(iter(loader)) == expected


@pytest.mark.parametrize("kind", [Shards, Stateful])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_passes_at_once(kind: Any, num_workers: int) -> None:
    with DataLoader(kind((4, 1)), 2, num_workers=num_workers, iterable_workers=2) as loader:
        pairs = [[one.tolist(), other.tolist()] for one, other in zip(loader, loader, strict=True)]
    assert pairs == [[batch, batch] for batch in Turns((4, 1), 2)]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_without_order_all_come(arguments: dict[str, Any]) -> None:
    for sizes, load in itertools.product(SIZES, FACES):
        got = load(Shards(sizes), iterable_workers=len(sizes), num_workers=3, in_order=False, **arguments)
        assert sorted(got) == sorted(Turns(sizes, **arguments))


class BrokenError(Exception):
    pass


def user_code() -> None:
    raise BrokenError


@pytest.mark.parametrize("load", EVERY_WAY)
def test_one_that_raises_says_where_and_the_others_go_on(load: Load) -> None:
    error = BrokenError()
    got = load(Shards((4, 5), {102: error}), batch_size=2, iterable_workers=2)
    assert got == [[0, 1], [100, 101], [2, 3], error, [103, 104]]
    assert got[3] is error
    assert error_context(error) == ErrorContext(2, None, "fetch")


@pytest.mark.parametrize("load", EVERY_WAY)
def test_an_iterator_that_has_raised_is_asked_on_as_torch_does(load: Load) -> None:
    class Once(Shards):
        """A generator, which is at its end when it has raised."""

        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()

    error = BrokenError()
    got = load(Once((4, 5), {102: error}), batch_size=2, iterable_workers=2)
    assert got == [[0, 1], [100, 101], [2, 3], error]


@pytest.mark.parametrize("load", EVERY_WAY)
def test_one_that_gives_no_iterator(load: Load) -> None:
    class Unready(Shards):
        def __iter__(self) -> Iterator[int]:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            if info.id == 0:
                user_code()
            return super().__iter__()

    got = load(Unready((4, 3)), batch_size=2, iterable_workers=2)
    assert isinstance(got[0], BrokenError)
    assert got[1:] == [[100, 101], [102]]


@pytest.mark.parametrize("load", FACES)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_init_fn_that_fails_for_one(load: Load, persistent: bool) -> None:
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        if number == 1:
            user_code()

    got = load(Shards((4, 3)), batch_size=2, iterable_workers=2, worker_init_fn=begin, persistent_workers=persistent)
    assert [each for each in got if not isinstance(each, BrokenError)] == [[0, 1], [2, 3]]
    error = got[1]
    context = error_context(error)
    assert context is not None
    assert context.stage == "worker_init_fn"
    assert sorted(begun) == [0, 1]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_init_fn_of_a_single_iterator_is_called_until_it_returns(persistent: bool) -> None:
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        if len(begun) < 3:
            user_code()

    with DataLoader(Shards((2,)), num_workers=2, worker_init_fn=begin, persistent_workers=persistent) as loader:
        for _ in range(2):
            (error,) = of_iterator(iter(loader))
            assert isinstance(error, BrokenError)
        for _ in range(3):
            assert of_iterator(iter(loader)) == [[0], [1]]
    assert len(begun) == (3 if persistent else 5)


@pytest.mark.parametrize("load", [by_for_inline, by_async_for_inline])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_interrupt_without_threads_changes_no_order(load: Load, drop_last: bool) -> None:
    class Interrupted(Stateful):
        """Ctrl-C comes once, in the middle of the second iterator's second batch."""

        def __next__(self) -> int:
            numbers.append(super().__next__() if not self.kept else self.kept.pop())
            if numbers[-1] == 103 and numbers.count(103) == 1:
                self.kept.append(103)
                raise KeyboardInterrupt
            return numbers[-1]

        kept: list[int] = []  # noqa: RUF012

    numbers: list[int] = []
    arguments: dict[str, Any] = {"batch_size": 2, "drop_last": drop_last}
    got = load(Interrupted((6, 5, 4)), iterable_workers=3, **arguments)
    (place,) = [place for place, each in enumerate(got) if isinstance(each, KeyboardInterrupt)]
    assert place == 4
    assert got[:place] + got[place + 1 :] == list(Turns((6, 5, 4), **arguments))


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_an_interrupt_while_an_iterator_is_made_loses_nothing(num_lanes: int) -> None:
    interrupts = [KeyboardInterrupt()]

    class Interrupted(Shards):
        def __iter__(self) -> Iterator[int]:
            if interrupts:
                raise interrupts.pop()
            return super().__iter__()

    got = by_for_inline(Interrupted((4, 3)), batch_size=2, iterable_workers=num_lanes)
    assert isinstance(got[0], KeyboardInterrupt)
    assert got[1:] == list(Turns((4, 3)[:num_lanes], 2))


class Holding(Shards):
    def __deepcopy__(self, _: Any) -> Any:
        message = "cannot pickle 'connection' object"
        raise TypeError(message)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_cannot_be_copied_is_refused_clearly(num_workers: int, persistent: bool) -> None:
    arguments: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    with DataLoader(Holding((2, 2)), iterable_workers=2, **arguments) as loader:
        for begin in (iter, aiter):
            with pytest.raises(DatasetError, match=r"Holding cannot be copied: .*connection.*__deepcopy__, or leave"):
                begin(loader)
    assert by_for(Holding((2,)), **arguments) == [[0], [1]]  # a single iterator goes over the dataset itself


def test_they_work_side_by_side() -> None:
    gates = Gates()

    class Waiting(Shards):
        def make(self, number: int) -> int:
            gates.pass_through(number)
            return number

    with DataLoader(Waiting((2, 2, 2)), num_workers=3, iterable_workers=3) as loader:
        batches = iter(loader)
        gates.wait_started(0, 100, 200)
        gates.open(100, 200)
        gates.wait_finished(100, 200)
        gates.open_all()
        assert of_iterator(batches) == list(Turns((2, 2, 2), 1))


def test_a_slow_one_holds_up_nothing_without_order() -> None:
    gates = Gates()

    class Waiting(Shards):
        def make(self, number: int) -> int:
            if number == 0:
                gates.pass_through(number)
            return number

    with DataLoader(Waiting((1, 2)), num_workers=3, iterable_workers=2, in_order=False) as loader:
        batches = iter(loader)
        gates.wait_started(0)
        assert sorted(next(batches).tolist() for _ in range(2)) == [[100], [101]]  # on two threads: either may be first
        gates.open_all()
        assert of_iterator(batches) == [[0]]


def test_a_pass_that_is_broken_off_leaves_nothing() -> None:
    for num_lanes in (1, 3):
        with GatedItems(SIZE) as dataset:
            batches = iter(DataLoader(dataset, num_workers=2))
            dataset.gates.wait_started(0)
            del batches
            dataset.gates.open_all()
        batches = iter(DataLoader(Endless(), num_workers=2, iterable_workers=num_lanes))
        got = [int(batch) for batch in itertools.islice(batches, 9)]
        assert len(got) == 9
        del batches


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_endless_ones_are_drawn_from_no_further_than_the_window() -> None:
    drawn = []

    class Counting(Endless):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                drawn.append(number)
                yield number

    with DataLoader(Counting(), num_workers=2, prefetch_factor=2) as loader:
        batches = iter(loader)
        assert [int(next(batches)) for _ in range(10)] == list(range(10))
        assert len(drawn) <= 10 + 4


def test_who_comes_to_the_end_leaves_another_consumer_the_batch_it_is_at() -> None:
    """Without threads of the loader's own, where the other has its items and makes no batch of them yet."""
    gates, got = Gates(), []
    batches = iter(DataLoader(GatedItems(2, opened=True), num_workers=0))

    def wait_behind_loading(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "_load_items" and event == "return":
            gates.pass_through("loaded")
        return wait_behind_loading

    def consume() -> None:
        sys.settrace(wait_behind_loading)
        got.append(int(next(batches)))

    thread = threading.Thread(target=consume)
    thread.start()
    gates.wait_started("loaded")
    assert [int(batch) for batch in batches] == [1]
    gates.open_all()
    thread.join()
    assert got == [0]
