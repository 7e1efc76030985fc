"""Resuming where others draw from a generator too, and what a pass has met before it is cut off."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from resuming import AsItGoes, numbers_in
from sampling import SIZE
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler

from aioload import DataLoader
from aioload.errors import StateError, TooManyErrorsError

RANGE = range(SIZE)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


class Recipe:
    """A training loader and another that draws from the same generator every other batch.

    Args:
        num_workers: Of the training loader.
        make: Returns the training loader's sampler, given the generator.
        validates: Whether the other is a loader; or else the generator is drawn from as it is.
    """

    def __init__(self, num_workers: int, make: Callable[[torch.Generator], Any], *, validates: bool) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.train: DataLoader[Any] = DataLoader(
            RANGE, 2, sampler=make(self.generator), generator=self.generator, num_workers=num_workers
        )
        self.other: DataLoader[Any] = DataLoader(RANGE, 8, generator=self.generator, num_workers=0)
        self.validates = validates

    def epochs(self, num_epochs: int, num_before: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield the number within the epoch, and the batch."""
        for _ in range(num_epochs):
            for number, batch in enumerate(self.train, num_before):
                if number % 2:
                    self.draw()
                yield number, numbers_in(batch)
            num_before = 0

    def draw(self) -> None:
        if self.validates:
            list(self.other)
        else:
            torch.rand(3, generator=self.generator)


SHARED: dict[str, Callable[[torch.Generator], Any]] = {
    "shuffled": lambda generator: RandomSampler(RANGE, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(RANGE, generator=generator),
    "own order": lambda _: list(RANGE),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("validates", [True, False])
def test_a_generator_that_others_draw_from_too_comes_back(name: str, num_workers: int, validates: bool) -> None:
    expected = list(Recipe(num_workers, SHARED[name], validates=validates).epochs(3))
    for cut in range(0, len(expected), 3):
        first = Recipe(num_workers, SHARED[name], validates=validates)
        got = list(itertools.islice(first.epochs(3), cut + 1))
        state = through_json(first.train.state_dict())
        first.train.close()
        for is_set_too in (False, True):
            second = Recipe(num_workers, SHARED[name], validates=validates)
            second.train.load_state_dict(state)
            if is_set_too:  # as a recipe for torch would
                second.generator.set_state(first.generator.get_state())
            rest = list(second.epochs(3 - cut // 6, cut % 6 + 1))
            assert got + rest == expected, cut
            second.train.close()


def test_it_comes_back_after_a_second_cut_as_well() -> None:
    expected = list(Recipe(1, SHARED["shuffled"], validates=True).epochs(3))
    state: Any = None
    got: list[Any] = []
    for _ in range(12):  # one batch each time
        recipe = Recipe(1, SHARED["shuffled"], validates=True)
        if state is not None:
            recipe.train.load_state_dict(state)
        got += itertools.islice(recipe.epochs(3, len(got) % 6), 1)
        state = through_json(recipe.train.state_dict())
        recipe.train.close()
    assert got == expected[:12]


def test_drawing_between_iter_and_the_first_batch() -> None:
    def first_batches(state: Any = None) -> tuple[list[Any], Any]:
        recipe = Recipe(0, SHARED["shuffled"], validates=False)
        if state is not None:
            recipe.train.load_state_dict(state)
        batches = iter(recipe.train)
        recipe.draw()
        return [numbers_in(next(batches))], (recipe, batches)

    head, (recipe, batches) = first_batches()
    state = through_json(recipe.train.state_dict())
    rest = numbers_in(list(batches)), numbers_in(list(recipe.train))
    again = Recipe(0, SHARED["shuffled"], validates=False)
    again.train.load_state_dict(state)
    assert (numbers_in(list(again.train)), numbers_in(list(again.train))) == rest
    assert head[0] not in rest[0]


def test_a_state_is_small_where_nobody_else_draws() -> None:
    loader: Any = DataLoader(RANGE, 2, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=2)
    for _ in loader:
        assert len(json.dumps(loader.state_dict())) < 1000


@pytest.mark.parametrize(
    "make",
    [
        lambda generator: RandomSampler(range(SIZE), True, 90, generator),
        lambda generator: RandomSampler(range(SIZE), False, 90, generator),
        AsItGoes,
    ],
    ids=["replacement", "several rounds", "user's"],
)
def test_drawing_in_the_middle_of_a_sampler_that_draws_as_it_goes_is_found_out(make: Any) -> None:
    for draws, is_found in ((True, True), (False, False)):
        recipe = Recipe(0, make, validates=False)
        batches = iter(recipe.train)
        for _ in range(5):
            next(batches)
            if draws:
                recipe.draw()
        for _ in range(18 if make is not AsItGoes else 1):
            next(batches)
        state = through_json(recipe.train.state_dict())
        rest = numbers_in(list(batches))
        other = Recipe(0, make, validates=False)
        other.train.load_state_dict(state)
        if is_found:
            with pytest.raises(StateError, match="from which nobody else draws during the pass"):
                iter(other.train)
        else:
            assert numbers_in(list(other.train)) == rest


@pytest.mark.parametrize("sampler", ["shuffle", "sequential"])
def test_a_start_loaded_back_beside_workers_that_live(sampler: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(
            RANGE,
            4,
            shuffle=sampler == "shuffle",
            num_workers=2,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(0),
        )

    with make() as loader, make() as fresh:
        start = loader.state_dict()
        expected = [numbers_in(list(loader)) for _ in range(3)]
        for one in (loader, fresh, loader):
            one.load_state_dict(start)
            assert [numbers_in(list(one)) for _ in range(3)] == expected


class Failing:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if index % 3 == 2:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_a_pass_are_counted_over_a_cut(on_error: Any, num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Failing(), 3, on_error=on_error, max_errors=3, num_workers=num_workers)

    for cut in range(1, 4):
        with make() as loader:
            batches = iter(loader)
            for _ in range(cut):
                next(batches)
            state = through_json(loader.state_dict())
        for _ in range(2):  # cut off twice
            with make() as loader:
                loader.load_state_dict(state)
                state = through_json(loader.state_dict())
                batches = iter(loader)
                for _ in range(3 - cut):
                    next(batches)
                with pytest.raises(TooManyErrorsError, match=r"^4 samples of this pass .* max_errors allows 3"):
                    next(batches)
                assert loader.stats().errors == 4 - cut
                assert list(itertools.islice(loader, 3))  # the next pass has met none yet


class Told:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.parametrize("more", [{}, {"shuffle": True, "seed": 1}], ids=["sequential", "seed"])
def test_an_epoch_that_was_set_once_is_told_once(more: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Told(), 2, num_workers=2, **more)

    with make() as loader:
        loader.set_epoch(5)
        expected = [numbers_in(list(loader)) for _ in range(3)]
    assert {number // 100 for epoch in expected for batch in epoch for number in batch} == {5}
    for cut in (0, 2, 5):
        with make() as loader:
            loader.set_epoch(5)
            list(loader)
            batches = iter(loader)
            for _ in range(cut):
                next(batches)
            state = through_json(loader.state_dict())
        with make() as loader:
            loader.load_state_dict(state)
            assert [numbers_in(list(loader)) for _ in range(2)] == [expected[1][cut:], expected[2]]


class Raising(IterableDataset[int]):
    """Its iterators raise, and go on; they keep their place, or the dataset does."""

    def __init__(self, *, keeps_place: bool) -> None:
        self.place, self.raised = -1, False
        if keeps_place:
            self.state_dict, self.load_state_dict = self.kept, self.go_to

    def __iter__(self) -> Any:
        if not hasattr(self, "load_state_dict"):
            return Iterating()
        self.step = Iterating(self)
        return map(next, itertools.repeat(self.step))

    def kept(self) -> dict[str, Any]:
        return {"place": self.place}

    def go_to(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Iterating:
    def __init__(self, owner: Any = None) -> None:
        self.owner = self if owner is None else owner
        if owner is None:
            self.place = -1

    def __iter__(self) -> "Iterating":
        return self

    def __next__(self) -> int:
        if self.owner.place >= 11:
            self.owner.place = -1
            raise StopIteration
        self.owner.place += 1
        if self.owner.place in (2, 6, 7, 9):
            message = f"no {self.owner.place}"
            raise OSError(message)
        return int(self.owner.place)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def steps(batches: Any, num_steps: int = 99) -> list[Any]:
    got: list[Any] = []
    for _ in range(num_steps):
        try:
            got.append(numbers_in(next(batches)))
        except StopIteration:
            break
        except OSError as exc:
            got.append(str(exc))
    return got


@pytest.mark.parametrize("keeps_place", [False, True], ids=["iterator", "dataset"])
@pytest.mark.parametrize("iterable_workers", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_that_is_still_to_come_comes_after_a_resume(
    keeps_place: bool, iterable_workers: int, num_workers: int
) -> None:
    def make() -> DataLoader[Any]:
        dataset = Raising(keeps_place=keeps_place) if iterable_workers == 1 else Raising(keeps_place=False)
        return DataLoader(dataset, 3, num_workers=num_workers, iterable_workers=iterable_workers)

    with make() as loader:
        expected = steps(iter(loader))
    assert {"no 2", "no 6", "no 7", "no 9"} <= {each for each in expected if isinstance(each, str)}
    for cut in range(len(expected) + 1):
        with make() as loader:
            got = steps(iter(loader), cut)
            state = through_json(loader.state_dict())
        with make() as loader:  # and once more right there
            loader.load_state_dict(state)
            got += steps(iter(loader), 1)
            state = through_json(loader.state_dict())
        with make() as loader:
            loader.load_state_dict(state)
            if len(got) < len(expected):
                assert got + steps(iter(loader)) == expected, cut
