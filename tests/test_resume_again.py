"""Resuming within a program: after errors, without order, with epochs that are set, and in the same loader."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from resuming import Stateful, Turning, TwoByTwo, numbers_in
from sampling import SIZE, Drawing, Items, Shards, plain
from torch.utils.data import DistributedSampler, IterableDataset

from aioload import DataLoader, ShuffleSampler
from aioload.errors import StateError
from aioload.testing import GatedDataset, Gates


def drawing(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(**{"dataset": Drawing(), "batch_size": 2, "collate_fn": plain, "num_workers": 2, **arguments})


def outcomes(batches: Any) -> list[Any]:
    """Return what is still to come, errors by what they say."""
    got: list[Any] = []
    while True:
        try:
            got.append(numbers_in(next(batches)))
        except StopIteration:
            return got
        except ArithmeticError as exc:
            got.append(str(exc))


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        return failing(index)


class FailingItems(Drawing, IterableDataset[Any]):
    """Ends with its error, as generators do."""

    def __iter__(self) -> Iterator[Any]:
        return map(failing, range(SIZE)) if self.goes_on else (failing(index) for index in range(SIZE))

    def __init__(self, *, goes_on: bool) -> None:
        self.goes_on = goes_on


def failing(index: int) -> int:
    if index in (5, 7):
        message = f"no {index}"
        raise ArithmeticError(message)
    return index


@pytest.mark.filterwarnings("ignore:.*loaded again and dropped:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "dataset", [Failing(), FailingItems(goes_on=False), FailingItems(goes_on=True)], ids=["map", "items", "going on"]
)
def test_an_error_is_given_once(dataset: Any, drop_last: bool, num_workers: int) -> None:
    arguments = {"dataset": dataset, "num_workers": num_workers, "batch_size": 2, "drop_last": drop_last}
    with drawing(**arguments) as loader:
        expected = outcomes(iter(loader))
    assert "no 5" in expected
    for cut in range(len(expected)):
        with drawing(**arguments) as loader:
            batches = iter(loader)
            got = [_one(batches) for _ in range(cut)]
            assert loader.num_yielded == cut
            state = loader.state_dict()
        with drawing(**arguments) as loader:
            loader.load_state_dict(state)
            assert got + outcomes(iter(loader)) == expected


def _one(batches: Iterator[Any]) -> Any:
    try:
        return numbers_in(next(batches))
    except ArithmeticError as exc:
        return str(exc)


def test_an_error_that_does_not_come_again_costs_no_item() -> None:
    class Recovering(IterableDataset[int]):
        is_well = False

        def __iter__(self) -> Iterator[int]:
            return map(self.item, range(8))

        def item(self, index: int) -> int:
            return index if self.is_well else failing(index)

    dataset = Recovering()
    with drawing(dataset=dataset, num_workers=0) as loader:
        batches = iter(loader)
        assert [_one(batches) for _ in range(4)] == [[0, 1], [2, 3], [4], "no 5"]
        dataset.is_well = True
        loader.load_state_dict(loader.state_dict())
        with pytest.warns(UserWarning, match="Recovering has no state_dict .* the 5 items before"):
            assert list(loader) == [[5, 6], [7]]


def test_items_that_are_loaded_again_are_announced_at_the_loop() -> None:
    with drawing(dataset=Items()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with drawing(dataset=Items()) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="Items has no state_dict .* so the 2 items before .* dropped") as caught:
            assert len(list(loader)) == 5
        assert [each.filename for each in caught] == [__file__]
        assert len(list(loader)) == 6


@pytest.mark.filterwarnings("ignore:.*loaded again and dropped:UserWarning")
def test_a_dataset_that_has_lost_items_is_found_out() -> None:
    class Shrinking(IterableDataset[int]):
        size = 12

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.size))

    dataset = Shrinking()
    with drawing(dataset=dataset) as loader:
        next(iter(loader))
        dataset.size = 1
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(StateError, match="saved after 2 items, and the dataset has only 1 now"):
            next(iter(loader))


class TestWithoutOrder:
    """Batches are given as they are ready; what one slow sample holds up is given after the resume, and only that."""

    @pytest.mark.parametrize(
        "sampler", [None, Stateful, lambda: ShuffleSampler(SIZE, 1)], ids=["none", "state", "ours"]
    )
    def test_samples(self, sampler: Any) -> None:
        def loader_over(dataset: Any) -> Any:
            more = {} if sampler is None else {"sampler": sampler()}
            return drawing(dataset=dataset, num_workers=4, in_order=False, **more)

        with loader_over(range(SIZE)) as loader:
            batches = sorted(loader, key=order(sampler))
        state, got = None, []
        for numbers in ([1, 2], [3, 4], [0]):
            with GatedDataset(SIZE) as dataset, loader_over(dataset) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                passing = iter(loader)
                for number in numbers:
                    dataset.gates.open(*batches[number])
                    assert next(passing) == batches[number]
                got += numbers
                state = loader.state_dict()
                dataset.gates.open_all()
        with GatedDataset(SIZE, opened=True) as dataset, loader_over(dataset) as loader:
            loader.load_state_dict(state)
            assert list(loader) == [batches[5]]
            assert set(dataset.gates.started) == set(batches[5])
            assert len(list(loader)) == 6

    @pytest.mark.filterwarnings("ignore:.*loaded again and dropped:UserWarning")
    @pytest.mark.parametrize(
        "dataset", [Items, Turning, lambda: FailingItems(goes_on=True)], ids=["items", "state", "errors"]
    )
    def test_items(self, dataset: Any) -> None:
        def number_of(samples: list[Any]) -> int:
            return (samples[0] if isinstance(samples[0], int) else samples[0][0]) // 2

        def run(state: Any, numbers: list[int]) -> tuple[list[Any], Any]:
            gates = Gates()

            def collate(samples: list[Any]) -> Any:
                gates.pass_through(number_of(samples))
                return numbers_in(samples)

            with drawing(dataset=dataset(), seed=1, num_workers=3, in_order=False, collate_fn=collate) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                batches, got = iter(loader), []
                for number in numbers:
                    gates.open(number)
                    got.append(_one(batches))
                state = loader.state_dict()
                gates.open_all()
                return got, (state, outcomes(batches))

        with drawing(dataset=dataset(), seed=1, num_workers=0, collate_fn=plain) as loader:
            expected = outcomes(iter(loader))
        state, all_got = None, list[Any]()
        for numbers in ([1, 2], [3], [0]):
            got, (state, rest) = run(state, numbers)
            all_got += got
            assert sorted(map(str, all_got + rest)) == sorted(map(str, expected))


def order(sampler: Any) -> Any:
    """Return what sorts batches as they are without concurrency."""
    indices = list(range(SIZE)) if sampler is None else list(sampler())
    return lambda batch: indices.index(batch[0])


class TestEpochs:
    def test_the_loaded_pass_goes_on_if_its_own_epoch_is_set(self) -> None:
        for setter in ("loader", "sampler"):
            with drawing(sampler=ShuffleSampler(SIZE, 1), seed=1) as loader:
                passes = [list(loader) for _ in range(3)]
            with drawing(sampler=ShuffleSampler(SIZE, 1), seed=1) as loader:
                loader.set_epoch(1)
                next(iter(loader))
                state = loader.state_dict()
            for epoch, expected in ((1, passes[1][1:]), (2, passes[2]), (0, passes[0])):
                with drawing(sampler=ShuffleSampler(SIZE, 1), seed=1) as loader:
                    loader.load_state_dict(state)
                    (loader if setter == "loader" else loader.sampler).set_epoch(epoch)  # type: ignore[attr-defined]
                    assert list(loader) == expected, (setter, epoch)

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("on_loader", [False, True])
    def test_a_training_that_sets_each_epoch(self, on_loader: bool, persistent: bool) -> None:
        def training(state: Any = None, first_epoch: int = 0) -> Iterator[tuple[Any, int, Any]]:
            """Yield batches, and None after each epoch, with the epoch to begin with from there, and the loader."""
            sampler: Any = DistributedSampler(Drawing(), 2, 1)  # type: ignore[arg-type]
            generator = torch.Generator().manual_seed(2)
            with drawing(sampler=sampler, generator=generator, persistent_workers=persistent) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for epoch in range(first_epoch, 3):
                    (loader if on_loader else sampler).set_epoch(epoch)
                    for batch in loader:
                        yield batch, epoch, loader
                    yield None, epoch + 1, loader

        expected = [batch for batch, _, _ in training()]
        assert len(expected) == 12
        for cut in range(1, 12):
            before = training()
            got = list(itertools.islice(before, cut))
            _, epoch, loader = got[-1]
            state = loader.state_dict()
            before.close()  # type: ignore[attr-defined]
            after = training(state, epoch)
            assert [batch for batch, _, _ in itertools.chain(got, after)] == expected, cut

    @pytest.mark.parametrize("was_persistent", [False, True])
    @pytest.mark.parametrize("persistent", [False, True])
    def test_the_next_epochs_are_those_of_torch_with_the_workers_of_the_loader_that_goes_on(
        self, was_persistent: bool, persistent: bool
    ) -> None:
        """Workers that persist draw no seed from the generator in the later epochs, which others do."""
        generator = torch.Generator().manual_seed(2)
        arguments: dict[str, Any] = {"dataset": range(SIZE), "shuffle": True, "persistent_workers": persistent}
        theirs: Any = torch.utils.data.DataLoader(**arguments, batch_size=2, generator=generator, num_workers=1)
        expected = [numbers_in(list(theirs)) for _ in range(3)]
        generator = torch.Generator().manual_seed(2)
        before = {**arguments, "collate_fn": None, "persistent_workers": was_persistent}
        with drawing(**before, generator=generator) as loader:
            head = numbers_in([next(iter(loader))])
            state = loader.state_dict()
        with drawing(**arguments, collate_fn=None, generator=torch.Generator()) as loader:
            loader.load_state_dict(state)
            got = [numbers_in(list(loader)) for _ in range(3)]
        assert [head + got[0], *got[1:]] == expected

    def test_the_dataset_is_told_the_epoch_that_was_set(self) -> None:
        class Told(Drawing):
            epoch = 0

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __getitem__(self, index: int) -> int:
                return index + 100 * self.epoch

        with drawing(dataset=Told()) as loader:
            loader.set_epoch(7)
            next(iter(loader))
            state = loader.state_dict()
        with drawing(dataset=Told()) as loader:
            loader.load_state_dict(state)
            assert next(iter(loader)) == [702, 703]

    def test_a_batch_sampler_over_one_of_ours_has_the_epochs_that_it_has_for_torch(self) -> None:
        theirs: Any = torch.utils.data.DataLoader(range(SIZE), batch_sampler=TwoByTwo(ShuffleSampler(SIZE)))  # type: ignore[arg-type]
        expected = [numbers_in(list(theirs)) for _ in range(3)]
        for num_workers in (0, 2):
            loader: Any = DataLoader(range(SIZE), batch_sampler=TwoByTwo(ShuffleSampler(SIZE)), num_workers=num_workers)
            assert [numbers_in(list(loader)) for _ in range(3)] == expected


def test_going_back_in_the_same_loader() -> None:
    arguments: list[dict[str, Any]] = [
        {"shuffle": True, "seed": 1},
        {"sampler": DistributedSampler(Drawing(), 2, 1)},  # type: ignore[arg-type]
    ]
    for more in arguments:
        for persistent in (False, True):
            with drawing(**more, persistent_workers=persistent) as loader, warnings.catch_warnings():
                warnings.simplefilter("error")
                batches = iter(loader)
                head = next(batches)
                state = loader.state_dict()
                tail = list(batches)
                for _ in range(2):
                    loader.load_state_dict(state)
                    assert list(loader) == tail
                loader.load_state_dict(state)
                next(iter(loader))  # and away again
                loader.load_state_dict(state)
                assert list(loader) == tail
                assert head not in tail


def test_going_on_after_break_is_a_new_pass_unless_the_state_is_loaded() -> None:
    with drawing(dataset=Shards(), iterable_workers=3, seed=1) as loader:
        first, second = list(loader), list(loader)
    with drawing(dataset=Shards(), iterable_workers=3, seed=1) as loader:
        head = list(itertools.islice(loader, 2))
        state = loader.state_dict()
        assert list(loader) == second
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="loaded again"):
            assert head + list(loader) == first
        assert list(loader) == second
