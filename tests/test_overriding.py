"""Datasets with several methods that could give a sample: it is the one that torch's loader would get."""

import abc
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from oracle import assert_parity
from outcomes import EVERY_WAY, Load

from aioload import DataLoader, Dataset, ErrorContext, FileDataset, LocalReader, error_context
from aioload.errors import ArgumentError
from aioload.types import StagedDataset

SIZE = 6


class Numbers(FileDataset[Any]):
    def __init__(self, folder: Path) -> None:
        super().__init__([folder / str(index) for index in range(SIZE)], lambda data, _: int(data))


class WithIndex(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), index


class WithIndexNegated(WithIndex):
    def decode(self, data: bytes, index: int) -> Any:
        return -int(data)


class Reversed(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(SIZE - 1 - index)


class Doubling:
    def __getitem__(self, index: int) -> Any:
        return 2 * super().__getitem__(index)  # type: ignore[misc]


class Doubled(Doubling, Numbers):
    pass


class NotDoubled(Numbers, Doubling):
    pass


class NegatedAndDoubled(Numbers):
    def decode(self, data: bytes, index: int) -> Any:
        return -int(data)

    def __getitem__(self, index: int) -> Any:
        return 2 * super().__getitem__(index)


class Negated(Numbers):
    def decode(self, data: bytes, index: int) -> Any:
        return -int(data)


class Elsewhere(Numbers):
    def location(self, index: int) -> Any:
        return self.paths[SIZE - 1 - index]


class Partial(Numbers):
    def scaled(self, data: bytes, index: int, factor: int) -> int:
        return factor * int(data)

    decode = functools.partialmethod(scaled, factor=3)


class Restated(Numbers):
    def location(self, index: int) -> Any:
        return self.paths[index]

    def decode(self, data: bytes, index: int) -> Any:
        return 5 * int(data)

    def __getitem__(self, index: int) -> Any:
        return self.decode(Path(self.location(index)).read_bytes(), index)


class Many(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self[index], len(indices)) for index in indices]


class ManyBeside(Restated):
    location, decode = Restated.location, Restated.decode

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Located(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SIZE

    def location(self, index: int) -> Any:
        return self.folder / str(index)

    @abc.abstractmethod
    def decode(self, data: bytes, index: int) -> Any: ...


class Completed(Located):
    def decode(self, data: bytes, index: int) -> Any:
        return int(data)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.location(index).read_bytes(), index)


class Declared(Completed, StagedDataset[Any]):
    pass


class Template(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        with open(self.location(index), "rb") as file:
            return self.decode(file.read(), index)

    def location(self, index: int) -> Any:
        raise NotImplementedError

    def decode(self, data: bytes, index: int) -> Any:
        raise NotImplementedError


class Filled(Template):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SIZE

    def location(self, index: int) -> Any:
        return self.folder / str(index)

    def decode(self, data: bytes, index: int) -> Any:
        return int(data)


class InAttributes:
    def __init__(self, folder: Path) -> None:
        self.location: Callable[[int], Any] = lambda index: os.path.join(folder, str(index))
        self.decode: Callable[[bytes, int], Any] = lambda data, _: int(data)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.decode(Path(self.location(index)).read_bytes(), index)


class Passing:
    """Passes on what it does not have."""

    def __init__(self, folder: Path) -> None:
        self.inner = Numbers(folder)

    def __len__(self) -> int:
        return SIZE

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Wrapping(Passing):
    def __getitem__(self, index: int) -> Any:
        return self.inner[index], "wrapped"


class WrappingDecode(Wrapping):
    def decode(self, data: bytes, index: int) -> Any:
        return -int(data)


class PassingSubset(torch.utils.data.Subset[Any]):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class OtherSubset(torch.utils.data.Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]], "other"

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


CALLED: dict[str, Callable[[Path], Any]] = {
    "overridden": WithIndex,
    "overridden, and decode below": WithIndexNegated,
    "overridden, for another index": Reversed,
    "by a mixin": Doubled,
    "overridden with decode": NegatedAndDoubled,
    "wrapped": Wrapping,
    "wrapped with decode": WrappingDecode,
    "many": Many,
    "subset of overridden": lambda folder: torch.utils.data.Subset(WithIndex(folder), [4, 0, 1]),
    "subset of wrapped": lambda folder: torch.utils.data.Subset(Wrapping(folder), [4, 0, 1]),  # type: ignore[arg-type]
    "subset of many": lambda folder: torch.utils.data.Subset(Many(folder), [4, 0, 1]),
    "another subset": lambda folder: OtherSubset(Numbers(folder), [4, 0, 1]),
    "subset of another": lambda folder: torch.utils.data.Subset(OtherSubset(Numbers(folder), [4, 0, 1]), [2, 0]),
    "concatenated": lambda folder: torch.utils.data.ConcatDataset([WithIndex(folder), WithIndex(folder)]),
    "stacked": lambda folder: torch.utils.data.StackDataset(Numbers(folder), WithIndex(folder)),
}
STAGED: dict[str, Callable[[Path], Any]] = {
    "as it is": Numbers,
    "mixin behind": NotDoubled,
    "decode overridden": Negated,
    "location overridden": Elsewhere,
    "partial method": Partial,
    "all stated anew": Restated,
    "many beside the stages": ManyBeside,
    "completed": Completed,
    "declared": Declared,
    "filled": Filled,
    "attributes": InAttributes,
    "subset": lambda folder: torch.utils.data.Subset(Negated(folder), [4, 0, 1]),
    "subset that passes on": lambda folder: PassingSubset(Numbers(folder), [4, 0, 1]),
    "subset of one that passes on": lambda folder: torch.utils.data.Subset(
        PassingSubset(Numbers(folder), [4, 0, 1]), [2, 0]
    ),
    "subset of many beside the stages": lambda folder: torch.utils.data.Subset(ManyBeside(folder), [4, 0, 1]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(SIZE):
        (tmp_path / str(index)).write_text(str(10 + index))
    return tmp_path


def bytes_read(dataset: Any, **arguments: Any) -> int:
    """Return how much the loader itself has read of a dataset."""
    with DataLoader(dataset, num_workers=1, **arguments) as loader:
        list(loader)
        return loader.stats().bytes_read


@pytest.mark.parametrize("name", [*CALLED, *STAGED])
def test_samples_are_those_of_torch(name: str, folder: Path) -> None:
    dataset = {**CALLED, **STAGED}[name](folder)
    for batch_size in (4, None):
        assert_parity(dataset, batch_size=batch_size)
    assert bytes_read(dataset, batch_size=4) == (2 * len(dataset) if name in STAGED else 0)


def test_many_are_asked_for_only_in_batches(folder: Path) -> None:
    assert bytes_read(Many(folder), batch_size=None) == 2 * SIZE


def test_what_has_no_getitem_may_pass_on_the_stages(folder: Path) -> None:
    class Torchs(Passing, torch.utils.data.Dataset[Any]):
        pass

    for kind in (Passing, Torchs):
        with DataLoader(kind(folder), 3, num_workers=1) as loader:
            assert [batch.tolist() for batch in loader] == [[10, 11, 12], [13, 14, 15]]


@pytest.mark.parametrize("load", EVERY_WAY)
def test_an_async_getitem_below_the_stages(load: Load, folder: Path) -> None:
    class Async(Numbers):
        async def __getitem__(self, index: int) -> Any:
            return 100 + index

    assert load(Async(folder), batch_size=3) == [[100, 101, 102], [103, 104, 105]]
    assert load(torch.utils.data.Subset(Async(folder), [4, 1]), batch_size=3) == [[104, 101]]


READERLESS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "overridden": (WithIndex, "__getitem__ is called instead: WithIndex overrides it without defining"),
    "below": (WithIndexNegated, "__getitem__ is called instead: WithIndex overrides it without defining"),
    "mixin": (Doubled, "__getitem__ is called instead: Doubling overrides it without defining location and decode"),
    "subset": (CALLED["subset of overridden"], "got Subset, whose __getitem__ is called instead: WithIndex overrides"),
    "many": (Many, "whose __getitems__ is called instead: Many overrides it without defining"),
    "wrapped": (Wrapping, "Wrapping has one of its own, and finds location or decode by __getattr__ alone"),
}


@pytest.mark.parametrize(("make", "what"), READERLESS.values(), ids=READERLESS.keys())
def test_a_reader_is_refused_where_it_would_not_be_asked(make: Any, what: str, folder: Path) -> None:
    with pytest.raises(ArgumentError, match="is for a dataset with location") as caught:
        DataLoader(make(folder), 2, reader=LocalReader())
    assert what in str(caught.value)
    batches: Any = [[0, 1]]
    with pytest.raises(ArgumentError):
        DataLoader(make(folder), batch_sampler=batches, reader=LocalReader())


def test_a_reader_reads_single_samples_of_what_gives_many(folder: Path) -> None:
    for dataset in (Many(folder), torch.utils.data.Subset(Many(folder), range(SIZE))):
        with DataLoader(dataset, None, num_workers=1, reader=LocalReader()) as loader:
            assert list(loader) == list(range(10, 10 + SIZE))
            assert loader.stats().bytes_read == 2 * SIZE


ERRORS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "overridden": (WithIndex, 4),
    "another index": (Reversed, 1),
    "wrapped": (Wrapping, 4),
    "concatenated": (lambda folder: torch.utils.data.ConcatDataset([range(5), Numbers(folder)]), 9),  # type: ignore[list-item]
}


@pytest.mark.parametrize("load", EVERY_WAY)
@pytest.mark.parametrize(("make", "index"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_names_the_file_that_was_read(make: Any, index: int, load: Load, folder: Path) -> None:
    (folder / "4").write_text("four")
    (error,) = [each for each in load(make(folder), batch_size=None) if isinstance(each, ValueError)]
    assert error_context(error) == ErrorContext(index, folder / "4", "fetch")


def test_items_of_an_iterable_dataset_name_their_file(folder: Path) -> None:
    (folder / "4").write_text("four")

    class Items(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return map(Numbers(folder).__getitem__, range(SIZE))

    for load in EVERY_WAY:
        (error,) = [each for each in load(Items(), batch_size=None) if isinstance(each, ValueError)]
        assert error_context(error) == ErrorContext(4, folder / "4", "fetch")
