"""Streamless: a device that does one thing after another, as it is asked, such as Apple's GPU for torch."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from aioload.device.backend import Event, Stream


class Passed:
    """An event behind nothing, which has passed."""

    def query(self) -> bool:
        """Return ``True``."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


PASSED = Passed()


class StreamlessBackend:
    """A device without streams: copies are done when they return. Batches are moved in the consumer's thread.

    Whatever torch can copy to will do. A thread of the loader's does not copy to it, as such a device need not stand
    two threads at once: on ``mps`` that ends the process (https://github.com/pytorch/pytorch/issues/197805).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<StreamlessBackend {self.device}>"

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the usual kind."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Do nothing."""
        return lambda: True

    def new_stream(self) -> Stream | None:
        """Return ``None``: there are no streams."""
        return None

    def current_stream(self) -> Stream:
        """Return ``None``."""
        return None

    def stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Do nothing."""
        return contextlib.nullcontext()

    def copy(self, tensor: torch.Tensor, stream: Stream | None = None) -> torch.Tensor:
        """Return a copy on the device, which is done."""
        return tensor.to(self.device)

    def record_event(self, stream: Stream) -> Event:
        """Return one that has passed."""
        return PASSED

    def wait_event(self, stream: Stream, event: Any) -> None:
        """Do nothing."""

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing."""
