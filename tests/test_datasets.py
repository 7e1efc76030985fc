import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from aioload.datasets import Dataset, FileDataset, ImageFolder, TensorDataset
from aioload.errors import AioloadError, ArgumentError, error_context
from aioload.types import MapDataset, StagedDataset


def _decode(data: bytes, index: int) -> tuple[int, int]:
    return int(data), index


def _refuse(data: bytes, index: int) -> int:
    raise ValueError("bad sample")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{i}.txt" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_text(str(i * 10))
    return paths


class TestDataset:
    def test_frameworks_accept_it(self) -> None:
        for kind in (Dataset, TensorDataset, FileDataset, ImageFolder):
            assert issubclass(kind, torch.utils.data.Dataset)

    def test_both_methods_are_needed(self) -> None:
        class Half(Dataset[int]):
            def __len__(self) -> int:
                return 0

        with pytest.raises(TypeError, match="__getitem__"):
            Half()  # type: ignore[abstract]


class TestTensorDataset:
    def test_equals_torch(self) -> None:
        tensors = torch.arange(12.0).reshape(6, 2), torch.arange(6), torch.zeros(6, 3, 2, dtype=torch.bool)
        ours, theirs = TensorDataset(*tensors), torch.utils.data.TensorDataset(*tensors)
        assert len(ours) == len(theirs) == 6
        for i in (*range(-6, 6), slice(1, 3), [0, 4]):
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours[i], theirs[i], strict=True))
        with pytest.raises(IndexError):
            ours[6]

    def test_follows_the_protocol(self) -> None:
        assert isinstance(TensorDataset(torch.zeros(2)), MapDataset)

    def test_arrays_and_tensors_share_memory(self) -> None:
        array, tensor = np.arange(4.0), torch.arange(4)
        dataset = TensorDataset(array, tensor)
        array[1] = 7
        tensor[1] = 8
        assert [t.item() for t in dataset[1]] == [7, 8]
        assert dataset.tensors[1] is tensor
        dataset[2][0].add_(1)
        assert array[2] == 3

    def test_strided_arrays_share_memory(self) -> None:
        array = np.arange(24).reshape(4, 6)[::2, 1:5:2]
        tensor = TensorDataset(array).tensors[0]
        assert tensor.tolist() == array.tolist()
        assert tensor.data_ptr() == array.ctypes.data

    def test_a_read_only_array_is_never_written(self) -> None:
        array = np.arange(4.0)
        array.setflags(write=False)
        dataset = TensorDataset(array)  # a warning would be an error
        dataset[1][0].add_(5)
        dataset.tensors[0].add_(5)
        assert array.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "array",
        [
            np.arange(4, dtype=">i4"),
            np.arange(4)[::-1],
            np.frombuffer(bytes(range(4)), np.uint8),
            np.array([(1, 2), (3, 4)], dtype=[("a", "i1"), ("b", "i4")])["b"],
        ],
        ids=["byte order", "reversed", "of bytes", "packed field"],
    )
    def test_memory_that_no_tensor_can_share_is_copied(self, array: np.ndarray[Any, Any]) -> None:
        dataset = TensorDataset(array)
        assert dataset.tensors[0].tolist() == array.tolist()
        assert [row[0].item() for row in (dataset[i] for i in range(len(dataset)))] == array.tolist()

    def test_a_memory_map_is_shared_unless_it_is_read_only(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.npy"
        np.save(path, np.arange(6.0).reshape(3, 2))
        content = path.read_bytes()
        mapped = np.load(path, mmap_mode="c")
        dataset = TensorDataset(mapped)
        assert dataset.tensors[0].data_ptr() == mapped.ctypes.data
        dataset[0][0].add_(1)
        assert path.read_bytes() == content
        read_only = np.load(path, mmap_mode="r")
        for array in (read_only, read_only[1:], np.asarray(read_only)):
            with pytest.raises(ArgumentError, match=r"read-only memory map .*position 1.*mode 'c'"):
                TensorDataset(np.zeros(3), array)

    def test_nothing_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="at least one"):
            TensorDataset()

    def test_different_lengths_are_named(self) -> None:
        with pytest.raises(ArgumentError, match="3 at position 0, 4 at position 1, 3 at position 2") as caught:
            TensorDataset(torch.zeros(3), np.zeros((4, 2)), torch.zeros(3))
        assert isinstance(caught.value, ValueError | AioloadError)

    @pytest.mark.parametrize("scalar", [torch.tensor(1), np.array(1.0)])
    def test_scalars_are_refused(self, scalar: Any) -> None:
        with pytest.raises(ArgumentError, match="scalar at position 1"):
            TensorDataset(torch.zeros(1), scalar)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([1, 2], "got list at position 0"),
            (np.array(["a", "b"]), "dtype <U1"),
            (np.array([None, {}]), "dtype object"),
        ],
    )
    def test_what_cannot_be_a_tensor_is_refused(self, value: Any, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            TensorDataset(value)

    def test_empty_tensors_make_an_empty_dataset(self) -> None:
        assert len(TensorDataset(torch.zeros(0, 3), np.zeros(0))) == 0

    def test_pickles(self) -> None:
        dataset = pickle.loads(pickle.dumps(TensorDataset(np.arange(3), torch.arange(3))))
        assert [t.item() for t in dataset[2]] == [2, 2]


class TestFileDataset:
    def test_reads_and_decodes(self, paths: list[Path]) -> None:
        dataset = FileDataset(paths, _decode)
        assert len(dataset) == 5
        assert [dataset[i] for i in range(5)] == [(0, 0), (10, 1), (20, 2), (30, 3), (40, 4)]

    def test_is_staged(self, paths: list[Path]) -> None:
        dataset = FileDataset(paths, _decode)
        assert isinstance(dataset, StagedDataset)
        assert dataset.location(3) == paths[3]
        assert dataset.decode(b"7", 3) == (7, 3)

    def test_negative_indices_count_from_the_end(self, paths: list[Path]) -> None:
        dataset = FileDataset(paths, _decode)
        assert dataset.location(-1) == paths[-1]
        assert dataset[-1] == (40, -1)
        for index in (5, -6):
            with pytest.raises(IndexError):
                dataset[index]

    @pytest.mark.parametrize("kind", [tuple, np.array])
    def test_any_sequence_of_paths(self, paths: list[Path], kind: Any) -> None:
        names: Sequence[str] = kind([os.fspath(path) for path in paths])
        assert FileDataset(names, _decode)[2] == (20, 2)

    @pytest.mark.parametrize("single", ["/data/a.npy", Path("/data/a.npy"), b"/data/a.npy"])
    def test_a_single_path_is_refused(self, single: Any) -> None:
        with pytest.raises(ArgumentError, match=r"sequence of paths, got one path.*/data/a\.npy"):
            FileDataset(single, _decode)

    @pytest.mark.parametrize("paths", [iter(["a"]), {"a"}, {0: "a"}, None])
    def test_what_is_no_sequence_is_refused(self, paths: Any) -> None:
        with pytest.raises(ArgumentError, match="make it a list"):
            FileDataset(paths, _decode)

    def test_decode_must_be_callable(self) -> None:
        with pytest.raises(ArgumentError, match="decode must be a function"):
            FileDataset(["a"], None)  # type: ignore[arg-type]

    def test_an_error_says_which_file_it_was(self, paths: list[Path]) -> None:
        with pytest.raises(ValueError, match="bad sample") as failed:
            FileDataset(paths, _refuse)[1]
        assert error_context(failed.value) == (1, paths[1], "decode")
        assert str(paths[1]) in failed.value.__notes__[0]
        paths[2].unlink()
        with pytest.raises(FileNotFoundError) as missing:
            FileDataset(paths, _decode)[2]
        assert error_context(missing.value) == (2, paths[2], "read")
        assert missing.value.filename == str(paths[2])

    def test_pickles(self, paths: list[Path]) -> None:
        assert pickle.loads(pickle.dumps(FileDataset(paths, _decode)))[1] == (10, 1)

    def test_works_in_the_loader_of_torch(self, paths: list[Path]) -> None:
        loader = torch.utils.data.DataLoader(FileDataset(paths, _decode), batch_size=2)
        assert [batch[0].tolist() for batch in loader] == [[0, 10], [20, 30], [40]]
