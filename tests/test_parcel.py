"""What engine processes are given: as it was, with arrays and tensors that are there once for all of them."""

import gc
import os
import pickle
import resource
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from abroad import Holding, sent

from aioload import DataLoader
from aioload.engine.parcel import Parcel

pytestmark = pytest.mark.usefixtures("forks_are_served", "no_process_is_left")


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: np.arange(1000.0),
    "few bytes": lambda: np.arange(3),
    "none": lambda: np.empty((0, 3)),
    "columns first": lambda: np.asfortranarray(np.arange(600).reshape(20, 30)),
    "every other": lambda: np.arange(2000)[::2],
    "part": lambda: np.arange(2000)[7:],
    "read only": lambda: read_only(np.arange(1000)),
    "records": lambda: np.zeros(1000, [("x", np.int8), ("y", np.float64, 3)]),
    "texts": lambda: np.array(["one", "three"] * 500),
    "objects": lambda: np.array([None, "a", 3] * 500, object),
    "times": lambda: np.arange(1000).astype("M8[s]"),
    "big endian": lambda: np.arange(1000, dtype=">i4"),
    "not whole pages": lambda: np.arange(12345, dtype=np.uint8),
}

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(1000.0),
    "few bytes": lambda: torch.arange(3),
    "one number": lambda: torch.tensor(3.0),
    "none": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(600.0).view(20, 30).T,
    "channels last": lambda: torch.randn(2, 30, 4, 5).to(memory_format=torch.channels_last),
    "every other": lambda: torch.arange(2000)[::2],
    "part": lambda: torch.arange(2000)[7:],
    "expanded": lambda: torch.ones(1).expand(1 << 40),
    "bfloat16": lambda: torch.randn(1000).bfloat16(),
    "complex": lambda: torch.randn(1000, dtype=torch.complex64),
    "bool": lambda: torch.arange(1000) % 3 == 0,
    "with a gradient": lambda: torch.ones(1000, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(1000)),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_arrive_as_pickle_has_them(make: Callable[[], Any]) -> None:
    array = make()
    expected, ((got,),) = pickle.loads(pickle.dumps(array, 5)), sent(array)
    assert (got.dtype, got.shape, got.strides) == (expected.dtype, expected.shape, expected.strides)
    assert got.flags.writeable == expected.flags.writeable
    assert (got == array).all()


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_arrive_as_pickle_has_them(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    ((got,),) = sent(tensor)
    assert (type(got), got.dtype, got.shape, got.stride()) == (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert got.requires_grad == tensor.requires_grad
    if tensor.numel() < 1 << 20:
        assert torch.equal(got, tensor)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_arrive(layout: torch.layout) -> None:
    tensor = torch.eye(40).to_sparse(layout=layout)
    ((got,),) = sent(tensor)
    assert got.layout is layout
    assert torch.equal(got.to_dense(), torch.eye(40))


def test_where_they_lie_fits_any_instruction() -> None:
    arrays = [np.full(600 + number, number, np.uint8) for number in range(50)]
    (got,) = sent(*arrays)
    for array, expected in zip(got, arrays, strict=True):
        assert array.ctypes.data % 64 == 0
        assert (array == expected).all()


def test_what_is_the_same_object_stays_so() -> None:
    array, tensor = np.arange(1000), torch.arange(1000)
    ((one, other, third, fourth),) = sent(array, array, tensor, tensor)
    assert one is other
    assert third is fourth


def test_nobody_sees_what_another_writes() -> None:
    array, tensor = np.zeros(5000), torch.zeros(5000)
    first, second = sent(array, tensor, times=2)
    for each in first:
        each[:] = 1
    for each in (*second, array, tensor):
        assert not each.any()


def test_an_array_may_be_kept_when_all_else_is_gone() -> None:
    made = sent(np.arange(5000), np.arange(5000) + 1, torch.arange(5000.0))
    kept = made[0][1][10:20]
    del made
    gc.collect()
    assert kept.tolist() == list(range(11, 21))


def test_pickling_needs_no_memory_for_another_copy() -> None:
    arrays = [np.ones(1 << 21) for _ in range(2)] + [torch.ones(1 << 22)]
    tracemalloc.start()
    try:
        parcel = Parcel({"arrays": arrays, "texts": ["text"] * 100_000}, is_for_forks=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(os.fstat(file).st_size for file in parcel.files) > 48 << 20
    parcel.close()
    assert peak < 4 << 20


@pytest.mark.parametrize("contents", [np.zeros(1 << 20), b"x" * (4 << 20)], ids=["beside", "in it"])
def test_no_room_is_an_error_that_says_so(contents: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Parcel({"dataset": contents}, is_for_forks=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_array_of_a_dataset_is_there_once_for_all_processes() -> None:
    dataset = Holding(1 << 20)
    with DataLoader(dataset, 1, processes=2, num_workers=2) as loader:
        for index, sample in enumerate(loader):
            assert sample["number"].tolist() == [index]
            assert sample["path"] == ["/memfd:aioload (deleted)"]
            assert sample["own_kb"].item() <= 8  # the pages with what was scribbled
            assert sample["there_kb"].item() >= 1 << 10
            assert sample["scribbled"].tolist() == [index // 2 + 1]  # by this process, not by the other one
    assert dataset.scribbles[0] == 0
