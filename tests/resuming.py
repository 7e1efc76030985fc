"""Resuming: trainings that are cut off and go on in a new loader, and the datasets and samplers they go over."""

import asyncio
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.data
from sampling import SIZE, Drawing, draw
from torch.utils.data import IterableDataset, get_worker_info

from aioload import DataLoader

OVER = "over"


class Way(NamedTuple):
    """How a loader is set up and asked; it may be another after each cut."""

    num_workers: int = 0
    is_async: bool = False

    def __str__(self) -> str:
        return f"{self.num_workers}{' async' if self.is_async else ''}"


class Training:
    """Passes over loaders, one step at a time: beginning a pass is one, and so is asking for a batch, or for the end.

    Args:
        make: Returns a new loader with that many workers; all are made of the same things.
    """

    def __init__(self, make: Callable[[int], DataLoader[Any]]) -> None:
        self._make = make
        self._runner = asyncio.Runner()
        self._way = Way()
        self._batches: Any = None
        self.loader = make(0)
        self.passes: list[list[Any]] = []

    def go_on_elsewhere(self, way: Way) -> None:
        """Take the state, and have a new loader go on, in what could be a new process."""
        text, generator = json.dumps(self.loader.state_dict()), torch.get_rng_state()
        is_within = self._batches is not None
        self.loader.close()
        torch.manual_seed(99)
        self._way, self.loader, self._batches = way, self._make(way.num_workers), None
        self.loader.load_state_dict(json.loads(text))
        assert self.loader.state_dict() == json.loads(text)
        torch.set_rng_state(generator)
        if is_within:
            self._begin()

    def step(self) -> None:
        """Begin a pass, or ask for the next batch."""
        if self._batches is None:
            self._begin()
            self.passes.append([])
            return
        got = self._runner.run(self._anext()) if self._way.is_async else next(self._batches, OVER)
        if got is OVER:
            self._batches = None
        self.passes[-1].append(got if got is OVER else numbers_in(got))

    def close(self) -> None:
        self._batches = None
        self.loader.close()
        self._runner.close()

    def _begin(self) -> None:
        with again_is_no_surprise():
            self._batches = aiter(self.loader) if self._way.is_async else iter(self.loader)

    async def _anext(self) -> Any:
        return await anext(self._batches, OVER)


def train(
    make: Callable[[int], DataLoader[Any]], num_steps: int, cuts: Mapping[int, Way] | None = None
) -> list[list[Any]]:
    """Return what so many steps give, of a training that goes on elsewhere before each of the steps ``cuts``."""
    torch.manual_seed(1)
    training = Training(make)
    cuts = cuts or {}
    for step in range(num_steps):
        if step in cuts:
            training.go_on_elsewhere(cuts[step])
        training.step()
    training.close()
    return training.passes


@contextmanager
def again_is_no_surprise() -> Iterator[None]:
    """Expect that items may have to be loaded again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*are loaded again and dropped", UserWarning)
        warnings.filterwarnings("ignore", "This pass has the same order", UserWarning)
        yield


def numbers_in(batch: Any) -> Any:
    """Return a batch with its tensors made lists."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [numbers_in(part) for part in batch] if isinstance(batch, list | tuple) else batch


class Turning(Drawing, IterableDataset[Any]):
    """Keeps its place, and the number of passes, in itself. Each pass begins elsewhere."""

    def __init__(self) -> None:
        self.place, self.num_passes = 0, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.place < SIZE:
            place, self.place = self.place, self.place + 1
            if place % num_workers == number:
                yield (place + self.num_passes) % SIZE, draw()
        self.place, self.num_passes = 0, self.num_passes + 1

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # alive

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Iterating(Drawing, IterableDataset[Any]):
    """Its iterators keep their place."""

    def __iter__(self) -> "Place":
        return Place()


class Place:
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> "Place":
        return self

    def __next__(self) -> Any:
        if self.place == SIZE:
            raise StopIteration
        self.place += 1
        return self.place - 1, draw()

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # alive

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Backwards(torch.utils.data.Sampler[int]):
    """A sampler of the user's, with neither a state nor an epoch."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return reversed(range(SIZE))


class AsItGoes(Backwards):
    """Draws an index when it is asked for one, from its generator or torch's."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, (), generator=self.generator))


class Stateful(Backwards):
    """Keeps its place and the number of passes."""

    def __init__(self) -> None:
        self.place, self.num_passes = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < SIZE:
            self.place += 1
            yield (self.place + self.num_passes) % SIZE
        self.place, self.num_passes = 0, self.num_passes + 1

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # alive

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class StatefulIterators(Backwards):
    def __iter__(self) -> Iterator[int]:
        return Indices()


class Indices(Place):
    def __next__(self) -> int:
        if self.place == SIZE:
            raise StopIteration
        self.place += 1
        return SIZE - self.place


class TwoByTwo:
    """A batch sampler of the user's over another sampler. It looks an index ahead."""

    def __init__(self, sampler: Any, *, shuffle: bool = False) -> None:
        self.sampler, self.shuffle = sampler, shuffle

    def __len__(self) -> int:
        return SIZE // 2

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        order = torch.randperm(2).tolist() if self.shuffle else [0, 1]
        first = next(indices)
        for index in indices:
            second, after = index, next(indices, None)
            pair = [first, second]
            yield [pair[place] for place in order]
            if after is None:
                return
            first = after
