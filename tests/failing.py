"""Failing: datasets of the numbers 0 to 3 of which number 2 fails, by each protocol and at each stage."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.data

from aioload import ErrorContext


def user_code(error: BaseException) -> None:
    raise error


class Numbers:
    """Without an error, nothing fails."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def make(self, index: int) -> int:
        if index == 2 and self.error is not None:
            user_code(self.error)
        return index


class MapNumbers(Numbers):
    def __getitem__(self, index: int) -> int:
        return self.make(index)


class ManyNumbers(MapNumbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.make(index) for index in indices]


class AsyncNumbers(Numbers):
    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return self.make(index)


class IterableNumbers(Numbers, torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return map(self.make, range(4))


class StagedNumbers(Numbers):
    def __init__(self, folder: Path, error: BaseException | None = None, stage: str = "decode") -> None:
        super().__init__(error)
        self.folder, self.stage = folder, stage
        for index in range(4):
            (folder / str(index)).write_text(str(index))

    def __getitem__(self, index: int) -> int:
        raise AssertionError

    def location(self, index: int) -> str:
        if self.stage == "location":
            self.make(index)
        return str(self.folder / str(index))

    def decode(self, data: bytes, index: int) -> int:
        return self.make(index) if self.stage == "decode" else int(data)


class LocatedNumbers(MapNumbers):
    def location(self, index: int) -> str:
        return f"row {index}"


class Case(NamedTuple):
    """A dataset and arguments for its loader, and what comes ``before`` and ``after`` the error at ``context``."""

    dataset: Any
    arguments: dict[str, Any]
    context: ErrorContext
    before: list[Any] = [[0], [1]]  # noqa: RUF012
    after: list[Any] = [[3]]  # noqa: RUF012


MakeCase: TypeAlias = Callable[[BaseException, Path], Case]


def map_style(error: BaseException, _: Path) -> Case:
    return Case(MapNumbers(error), {}, ErrorContext(2, None, "fetch"))


def map_style_in_a_batch(error: BaseException, _: Path) -> Case:
    return Case(MapNumbers(error), {"batch_size": 4}, ErrorContext(2, None, "fetch"), [], [])


def map_style_as_it_is(error: BaseException, _: Path) -> Case:
    return Case(MapNumbers(error), {"batch_size": None}, ErrorContext(2, None, "fetch"), [0, 1], [3])


def map_style_with_location(error: BaseException, _: Path) -> Case:
    return Case(LocatedNumbers(error), {}, ErrorContext(2, "row 2", "fetch"))


def subset(error: BaseException, _: Path) -> Case:
    numbers: Any = MapNumbers(error)
    dataset = torch.utils.data.Subset(numbers, [3, 2, 1])
    return Case(dataset, {}, ErrorContext(1, None, "fetch"), [[3]], [[1]])


def getitems(error: BaseException, _: Path) -> Case:
    return Case(ManyNumbers(error), {"batch_size": 2}, ErrorContext([2, 3], None, "fetch"), [[0, 1]], [])


def awaited(error: BaseException, _: Path) -> Case:
    return Case(AsyncNumbers(error), {}, ErrorContext(2, None, "fetch"))


def iterable(error: BaseException, _: Path) -> Case:
    return Case(IterableNumbers(error), {}, ErrorContext(2, None, "fetch"))


def location(error: BaseException, folder: Path) -> Case:
    return Case(StagedNumbers(folder, error, "location"), {}, ErrorContext(2, None, "read"))


def decode(error: BaseException, folder: Path) -> Case:
    return Case(StagedNumbers(folder, error, "decode"), {}, ErrorContext(2, str(folder / "2"), "decode"))


def collate(error: BaseException, _: Path) -> Case:
    arguments = {"batch_size": 2, "collate_fn": partial(_collate, error)}
    return Case(range(4), arguments, ErrorContext([2, 3], None, "collate"), [[0, 1]], [])


def collate_of_awaited(error: BaseException, _: Path) -> Case:
    return Case(AsyncNumbers(), {"collate_fn": partial(_collate, error)}, ErrorContext([2], None, "collate"))


def collate_of_items(error: BaseException, _: Path) -> Case:
    return Case(IterableNumbers(), {"collate_fn": partial(_collate, error)}, ErrorContext([2], None, "collate"))


def convert(error: BaseException, folder: Path) -> Case:
    arguments = {"batch_size": None, "collate_fn": lambda sample: _collate(error, [sample])}
    return Case(StagedNumbers(folder), arguments, ErrorContext(2, str(folder / "2"), "collate"))


def _collate(error: BaseException, samples: Sequence[int]) -> torch.Tensor:
    if 2 in samples:
        user_code(error)
    return torch.tensor(samples)


CASES: list[MakeCase] = [
    map_style,
    map_style_in_a_batch,
    map_style_as_it_is,
    map_style_with_location,
    subset,
    getitems,
    awaited,
    iterable,
    location,
    decode,
    collate,
    collate_of_awaited,
    collate_of_items,
    convert,
]
