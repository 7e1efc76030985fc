"""Tree memory: what a loader's processes hold together, on a dataset that holds many paths.

Usage: python -m benchmarks.tree_memory aioload|torch NUM_PROCESSES NUM_PATHS [list|files] [forkserver|fork|spawn]

The paths are a list of the dataset's own, or one that our FileDataset has.

It prints the bytes of the process and those below it, what several share counted once, after two epochs.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import aioload


def make_paths(count: int) -> list[str]:
    """Return paths of files that are not there."""
    return [f"/mnt/storage/dataset/train/class-{n % 1000:04d}/image-{n:08d}.jpeg" for n in range(count)]


def decode(data: bytes, index: int) -> int:
    """Never called."""
    raise AssertionError


class Files(aioload.FileDataset[int]):
    """Ours, none of whose files is read."""

    def __init__(self, num_paths: int) -> None:
        super().__init__(make_paths(num_paths), decode)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])  # type: ignore[arg-type]


class Paths(torch.utils.data.Dataset[int]):
    """A dataset that holds paths, and reads none of them."""

    def __init__(self, num_paths: int) -> None:
        self.paths = make_paths(num_paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


def tree_bytes(pid: int | str = "self") -> int:
    """Return the proportional set sizes of a process and all below it, added up."""
    folder = Path(f"/proc/{pid}")
    lines = (folder / "smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    tasks = (folder / "task").iterdir()
    return own + sum(tree_bytes(child) for task in tasks for child in (task / "children").read_text().split())


def main() -> None:
    """Load two epochs and print what is held in the second."""
    name, num_processes, num_paths = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    kind, start_method = [*sys.argv[4:], *["list", None][len(sys.argv) - 4 :]]
    dataset: Any = Files(num_paths) if kind == "files" else Paths(num_paths)
    arguments: dict[str, Any] = {"batch_size": 1024, "shuffle": True, "persistent_workers": True}
    arguments["multiprocessing_context"] = start_method
    if name == "torch":
        loader: Any = torch.utils.data.DataLoader(dataset, num_workers=num_processes, **arguments)
    else:
        loader = aioload.DataLoader(dataset, num_workers=8, processes=num_processes, **arguments)
    for _ in loader:
        pass
    num_last = len(loader) - 1
    for number, _ in enumerate(loader):
        if number == num_last:
            print(tree_bytes(), flush=True)


if __name__ == "__main__":
    main()
