"""Rigs: a real device and the simulated one, as tests that both must pass see them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioload.device import CudaBackend
from aioload.testing import SimulatedDevice

FASTEST_HZ = 2.5e9
"""Cycles a second that no card does more of: a sleep is as long as it says at least, and longer at a lower clock."""


class Simulated:
    """A simulated device, which does nothing before :meth:`finish` unless it has a pace."""

    def __init__(self, pace: random.Random | None = None) -> None:
        self.backend = SimulatedDevice(pace=pace)
        self._compared: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = []

    def busy(self, stream: Any, seconds: float = 0.0) -> None:
        """Nothing is done there, nor elsewhere, before the test waits for it."""

    def read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        reading = self.backend.read(tensor)
        return lambda: reading.value

    def launch(self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        return self.backend.launch(function, tensor)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is issued on the current stream, as a user does it."""
        return self.backend.copy(tensor)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that lies on the device already."""
        return tensor.clone()

    def compare(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """Have the current stream compare bytes when it comes to that, and count those that are different."""
        self._compared.append((self.read(tensor), expected))

    def num_different(self) -> int:
        """Wait for all that was to be compared, and return how many bytes were different since this was last asked."""
        self.finish()
        compared, self._compared = self._compared, []
        return sum(int((bytes_of(read()) != expected).sum()) for read, expected in compared)

    def finish(self) -> None:
        self.backend.run()


class Cuda:
    """The first CUDA device, which goes at its own pace."""

    def __init__(self, _: random.Random | None = None) -> None:
        self.backend = CudaBackend(torch.device("cuda", 0))
        self._counts: dict[Any, torch.Tensor] = {}  # by stream: each has one of its own
        warm_up(self.backend)

    def busy(self, stream: Any, seconds: float = 0.2) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * FASTEST_HZ))  # type: ignore[no-untyped-call]

    def read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        clone = tensor.clone()
        return clone.cpu

    def launch(self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        return function(tensor)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is issued on the current stream, as a user does it."""
        assert tensor.is_pinned() or tensor.numel() == 0
        return tensor.to(self.backend.device, non_blocking=True)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that lies on the device already, for any stream to read."""
        kept = tensor.to(self.backend.device)
        self.finish()
        return kept

    def compare(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """Have the current stream compare bytes when it comes to that, and count those that are different."""
        stream = self.backend.current_stream()
        if stream not in self._counts:
            self._counts[stream] = torch.zeros((), dtype=torch.int64, device=self.backend.device)
        self._counts[stream].add_((bytes_of(tensor) != expected).sum())

    def num_different(self) -> int:
        """Wait for all that was to be compared, and return how many bytes were different since this was last asked."""
        self.finish()
        counts, self._counts = self._counts, {}
        return sum(int(count) for count in counts.values())

    def finish(self) -> None:
        torch.cuda.synchronize(self.backend.device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view, or copy, of a dense tensor's bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def warm_up(backend: CudaBackend) -> None:
    """Do once what a test does while the device is busy: the first time, CUDA waits for all that is under way."""
    stream = backend.new_stream()
    with backend.stream(stream):
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        copied = backend.copy(backend.host_memory(1 << 16), stream)
        (copied.clone() != copied).sum()
    backend.wait_event(backend.current_stream(), backend.record_event(stream))
    backend.record_event(stream).synchronize()
    torch.cuda.synchronize(backend.device)


ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RIGS = [pytest.param(Simulated, id="simulated"), pytest.param(Cuda, id="cuda", marks=ON_CUDA)]
