"""Batches are made up as torch's DataLoader makes them up: which samples, how many, by which functions."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from oracle import NUM_WORKERS, WAYS, assert_parity, assert_same, torch_loader, torch_outcomes
from structures import Pair, grid
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from aioload import DataLoader
from aioload import TensorDataset as OurTensorDataset


class Squares(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return {"i": index, "square": np.array([index**2])}


class ManySquares(Squares):
    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return ((i, f"s{i}") for i in range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Whole(Squares):
    """Makes something for a whole batch."""

    def __init__(self, make: Callable[[Sequence[int]], Any]) -> None:
        super().__init__(5)
        self.make = make

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.make(indices)


MAP_DATASETS: dict[str, Callable[[int], Any]] = {
    "map": Squares,
    "getitems": ManySquares,
    "tensors": lambda size: TensorDataset(torch.arange(2.0 * size).reshape(size, 2), torch.arange(size)),
    "tensors of ours": lambda size: OurTensorDataset(np.arange(2.0 * size).reshape(size, 2), torch.arange(size)),
    "sparse tensor": lambda size: TensorDataset(torch.arange(size).view(-1, 1).expand(-1, 3)),
    "list": lambda size: list(range(size)),
    "array": lambda size: np.arange(2 * size).reshape(size, 2),
    "str": lambda size: "abcdefghijklm"[:size],
}
ITERABLE_DATASETS: dict[str, Callable[[int], Any]] = {"iterable": Stream, "sized iterable": SizedStream}
every_map_dataset = pytest.mark.parametrize("make", MAP_DATASETS.values(), ids=MAP_DATASETS.keys())
every_dataset = pytest.mark.parametrize(
    "make", [*MAP_DATASETS.values(), *ITERABLE_DATASETS.values()], ids=[*MAP_DATASETS, *ITERABLE_DATASETS]
)


@pytest.mark.parametrize("drop_last", [False, True])
@every_dataset
def test_sizes(make: Callable[[int], Any], drop_last: bool) -> None:
    for size in (0, 1, 6, 7):
        dataset = make(size)
        assert_parity(dataset, batch_size=None)
        for batch_size in (1, 3, 9):
            assert_parity(dataset, batch_size=batch_size, drop_last=drop_last)
            ours, theirs = (
                length_of(kind(dataset, batch_size=batch_size, drop_last=drop_last))
                for kind in (DataLoader, torch_loader)
            )
            assert ours == theirs


def length_of(loader: Any) -> int | type[Exception]:
    try:
        return len(loader)
    except TypeError:
        return TypeError


def indices_as(kind: Callable[[list[int]], Any]) -> Any:
    class Sampler:
        def __iter__(self) -> Iterator[Any]:
            return iter([kind([3, 0, 3]), kind([4]), kind([-1, 2])])

        def __len__(self) -> int:
            return 3

    return Sampler()


KINDS_OF_INDICES: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda indices: (index for index in indices),
    "tensor": torch.tensor,
    "array": np.array,
    "numpy numbers": lambda indices: list(map(np.int32, indices)),
    "tensors": lambda indices: [torch.tensor(index) for index in indices],
    "dict": lambda indices: dict.fromkeys(indices),
    "empty": lambda indices: [],
    "some empty": lambda indices: indices[1:],
    "too large": lambda indices: [*indices, 5],
    "strings": lambda indices: ["a"],
    "None": lambda indices: [None],
    "no batch": lambda indices: indices[0],
}


@every_map_dataset
@pytest.mark.parametrize("kind", KINDS_OF_INDICES.values(), ids=KINDS_OF_INDICES.keys())
def test_a_batch_sampler_may_yield_indices_of_any_kind(make: Callable[[int], Any], kind: Any) -> None:
    ends_the_pass = kind is KINDS_OF_INDICES["no batch"]
    expected = torch_outcomes(make(5), batch_sampler=indices_as(kind))
    for way in WAYS:
        with DataLoader(make(5), batch_sampler=indices_as(kind), num_workers=way.num_workers) as loader:
            got = way.face(loader)
            assert_same(got, expected[:1] if ends_the_pass else expected, str(way))


@every_map_dataset
def test_lists_of_indices_as_single_indices(make: Callable[[int], Any]) -> None:
    dataset = make(5)
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    assert_parity(dataset, batch_size=None, sampler=batches)
    assert_parity(dataset, batch_size=2, sampler=batches)
    assert_parity(Subset(dataset, [4, 2, 0, 1, 3]), batch_size=None, sampler=batches)
    slices = [slice(0, 2), slice(3, 5)]
    assert_parity(dataset, batch_size=None, sampler=slices)
    assert_parity(dataset, batch_size=2, sampler=slices)


@every_map_dataset
def test_datasets_made_of_others(make: Callable[[int], Any]) -> None:
    dataset = make(7)
    for batch_size in (3, None):
        assert_parity(Subset(dataset, [5, 0, -1, 2]), batch_size=batch_size)
        assert_parity(Subset(dataset, torch.tensor([5, 0, 2])), batch_size=batch_size)  # type: ignore[arg-type]
        assert_parity(Subset(Subset(dataset, [5, 0, 4, 2]), np.array([3, 1, 0])), batch_size=batch_size)  # type: ignore[arg-type]
        for part in random_split(dataset, [3, 4], torch.Generator().manual_seed(1)):
            assert_parity(part, batch_size=batch_size)
        assert_parity(ConcatDataset([dataset, make(2)]), batch_size=batch_size)
        assert_parity(StackDataset(dataset, Squares(7)), batch_size=batch_size)
        assert_parity(StackDataset(a=dataset, b=Squares(7)), batch_size=batch_size)
        assert_parity(Subset(ConcatDataset([make(2), dataset]), [8, 1]), batch_size=batch_size)
        stacked: Any = StackDataset(Subset(dataset, range(7)), ConcatDataset([make(3), make(4)]), dataset)
        assert_parity(Subset(stacked, [5, 0, -1, 2]), batch_size=batch_size)
        assert_parity(StackDataset(a=StackDataset(dataset), b=stacked), batch_size=batch_size)


def test_members_of_a_stack_are_asked_as_torch_asks_them() -> None:
    class Asked(Squares):
        def __init__(self) -> None:
            super().__init__(4)
            self.asked: list[Any] = []

        def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            return super().__getitem__(index)

    class AskedForMany(Asked):
        def __getitems__(self, indices: Sequence[int]) -> Any:
            self.asked.append(list(indices))
            return [Squares.__getitem__(self, index) for index in indices]

    class OwnStack(StackDataset[Any]):
        def __getitems__(self, indices: Any) -> Any:
            return [(*sample, "own") for sample in super().__getitems__(indices)]

    def asked(load: Callable[..., Any], stack: Callable[..., Any], **arguments: Any) -> Any:
        one, many = Asked(), AskedForMany()
        members = [one, Subset(one, range(4)), many, Subset(StackDataset(many), range(4))]
        batches = [list(load(stack(member), batch_size=2, **arguments)) for member in members]
        return [str(batch) for batch in batches], one.asked, many.asked

    for stack in (StackDataset, OwnStack, lambda member: Subset(OwnStack(member), [3, 1])):
        for num_workers in (0, 1):
            assert asked(DataLoader, stack, num_workers=num_workers) == asked(torch_loader, stack)


def test_samples_of_a_stack_load_side_by_side() -> None:
    class Meeting(Squares):
        """Each sample waits for another."""

        barrier = threading.Barrier(2)

        def __getitem__(self, index: int) -> Any:
            self.barrier.wait(60)
            return index

    with DataLoader(StackDataset(Meeting(2)), 2, num_workers=2) as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 1]]


def test_chained_iterables() -> None:
    for batch_size in (3, None):
        assert_parity(ChainDataset([Stream(4), SizedStream(3), Stream(0)]), batch_size=batch_size)


WHOLE: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": lambda indices: [f"s{i}" for i in indices],
    "tuple": lambda indices: tuple(f"s{i}" for i in indices),
    "tensor": lambda indices: torch.tensor(indices),
    "dict": lambda indices: {"i": torch.tensor(indices), 0: "a"},
    "named tuple": lambda indices: Pair(torch.tensor(indices), "s"),
    "generator": lambda indices: (i for i in indices),
    "None": lambda indices: None,
    "fewer": lambda indices: [grid(i) for i in indices[1:]],
    "more": lambda indices: [grid(i) for i in [*indices, 7, 8]],
    "none at all": lambda indices: [],
    "samples that differ": lambda indices: [np.zeros(i) for i in indices],
    "a tuple of samples that differ": lambda indices: tuple(np.zeros(i) for i in [*indices, 3]),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE.keys())
def test_what_getitems_gives_goes_to_collate_fn_as_it_is(make: Callable[[Sequence[int]], Any]) -> None:
    assert_parity(Whole(make), batch_size=2)
    assert_parity(Whole(make), batch_size=2, collate_fn=lambda batch: (type(batch).__name__, batch_of(batch)))
    assert_parity(Subset(Whole(make), [3, 0, 1]), batch_size=2)


def batch_of(batch: Any) -> Any:
    return list(batch) if hasattr(batch, "__next__") else batch


class Batch:
    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and self.samples == other.samples

    def __hash__(self) -> int:
        raise NotImplementedError


def only_even(samples: Sequence[Any]) -> Any:
    return [sample for sample in samples if sample[0] % 2 == 0]


COLLATE_FNS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda samples: samples,
    "object": Batch,
    "filter": only_even,
    "padding": lambda samples: torch.nn.utils.rnn.pad_sequence([torch.ones(1 + sample[0]) for sample in samples]),
    "packed": lambda samples: torch.nn.utils.rnn.pack_sequence([torch.ones(1)] * len(samples)),
    "default inside": lambda samples: {"all": torch.utils.data.default_collate(samples)},
    "sparse": lambda samples: torch.eye(len(samples)).to_sparse(),
    "sparse csr": lambda samples: [torch.eye(len(samples)).to_sparse_csr()],
    "nested": lambda samples: torch.nested.as_nested_tensor([torch.ones(1 + sample[0]) for sample in samples]),
    "meta": lambda samples: torch.empty(2, device="meta"),
    "requires_grad": lambda samples: torch.ones(2, requires_grad=True),
    "None": lambda samples: None,
    "fails": lambda samples: samples["a"],
}


@pytest.mark.parametrize("collate_fn", COLLATE_FNS.values(), ids=COLLATE_FNS.keys())
def test_the_users_collate_fn_gets_samples_and_its_batch_comes_as_it_is(collate_fn: Callable[[Any], Any]) -> None:
    samples = [(i, f"s{i}", grid(i)) for i in range(5)]
    for dataset in (samples, Stream(5)):
        assert_parity(dataset, batch_size=2, collate_fn=collate_fn)
    assert_parity(Stream(5), batch_size=None, collate_fn=lambda sample: collate_fn([sample]))


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_a_batch_of_ours_can_be_used_like_any_other(num_workers: int) -> None:
    dataset = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    for ours, theirs in zip(
        DataLoader(dataset, 4, num_workers=num_workers), torch_loader(dataset, batch_size=4), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            assert one.is_contiguous() == other.is_contiguous()
            assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
            assert one.storage_offset() == other.storage_offset() == 0
            assert one.data_ptr() % 64 == 0
            one.add_(1).mul_(2)
            assert one.tolist() == ((other + 1) * 2).tolist()
        assert ours[0].requires_grad_().sum().backward() is None
