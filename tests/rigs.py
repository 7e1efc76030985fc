"""Rigs: a real device and the simulated one, as tests that both must pass see them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioload.device import CudaBackend
from aioload.testing import SimulatedDevice


class Simulated:
    """A simulated device, which does nothing before :meth:`finish` unless it has a pace."""

    def __init__(self, pace: random.Random | None = None) -> None:
        self.backend = SimulatedDevice(pace=pace)

    def busy(self, stream: Any) -> None:
        """Nothing is done there, nor elsewhere, before the test waits for it."""

    def read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        reading = self.backend.read(tensor)
        return lambda: reading.value

    def finish(self) -> None:
        self.backend.run()


class Cuda:
    """The first CUDA device, which goes at its own pace."""

    def __init__(self, _: random.Random | None = None) -> None:
        self.backend = CudaBackend(torch.device("cuda", 0))

    def busy(self, stream: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # about a tenth of a second

    def read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        clone = tensor.clone()
        return clone.cpu

    def finish(self) -> None:
        torch.cuda.synchronize(self.backend.device)


ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RIGS = [pytest.param(Simulated, id="simulated"), pytest.param(Cuda, id="cuda", marks=ON_CUDA)]
