"""Accelerators: a rig on whatever device with streams torch sees, and a device without any that every machine has."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioload.device import AcceleratorBackend, why_streamless

BUSY_S = 0.05


def seen() -> torch.device | None:
    """Return torch's accelerator, if it has streams."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, 0)
    return device if why_streamless(device) is None else None


class Accelerator:
    """The first device of torch's accelerator, which goes at its own pace; CUDA's too."""

    num_rounds = 1

    def __init__(self, _: random.Random | None = None) -> None:
        device = seen()
        assert device is not None
        self.backend = AcceleratorBackend(device)

    def busy(self, stream: Any) -> None:
        """Give the stream about as much to do as takes it :data:`BUSY_S`."""
        start, end = (torch.Event(self.backend.device, enable_timing=True) for _ in range(2))
        while True:
            start.record(stream)
            self._work(stream)
            end.record(stream)
            end.synchronize()
            if start.elapsed_time(end) >= 1000 * BUSY_S:  # milliseconds
                break
            Accelerator.num_rounds *= 2
        self._work(stream)

    def read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        clone = tensor.clone()
        return clone.cpu

    def finish(self) -> None:
        torch.accelerator.synchronize(self.backend.device)

    def _work(self, stream: Any) -> None:
        with self.backend.stream(stream):
            numbers = torch.ones(1 << 20, device=self.backend.device)
            for _ in range(self.num_rounds):
                numbers.add_(1)


SEEN = seen()
ON_ACCELERATOR = [
    *([pytest.mark.cuda] if SEEN is not None and SEEN.type == "cuda" else []),
    pytest.mark.skipif(SEEN is None, reason="needs an accelerator with streams"),
]
ACCELERATORS = [pytest.param(Accelerator, id="accelerator", marks=ON_ACCELERATOR)]


@functools.cache
def lazy_device() -> torch.device:
    """Return torch's ``lazy`` device, which computes on the CPU and has no streams, but tensors of its own."""
    backend: Any = pytest.importorskip("torch._lazy.ts_backend")
    backend.init()  # a second time would be an error
    return torch.device("lazy", 0)
