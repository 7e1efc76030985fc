"""Pinning: page-locked memory of the host, which the current accelerator copies from beside the host's work."""

import torch

from aioload.layout import ALIGNMENT


def can_pin() -> bool:
    """Whether torch has page-locked memory here, as its own DataLoader decides that."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"  # https://github.com/pytorch/pytorch/issues/86060


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Return page-locked uint8 memory, aligned to :data:`~aioload.layout.ALIGNMENT`.

    Raises:
        RuntimeError: There is none.
    """
    memory = _pinned(num_bytes)
    start = -memory.data_ptr() % ALIGNMENT
    if start == 0:
        return memory
    memory = _pinned(num_bytes + ALIGNMENT)  # CUDA's starts on a page, but another accelerator's need not
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + num_bytes]


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
