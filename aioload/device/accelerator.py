"""Accelerator: any device with streams that ``torch.accelerator`` serves, such as Intel's ``xpu``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aioload.device.backend import Event, Stream
from aioload.device.pinning import pinned_memory


class AcceleratorBackend:
    """A device of torch's current accelerator, by ``torch.Stream`` and ``torch.Event``.

    Whether a thread that waits for an event sleeps is up to the device: torch does not yet tell it to.

    Args:
        device: With a number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<AcceleratorBackend {self.device}>"

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory.

        Raises:
            RuntimeError: torch has none for this accelerator.
        """
        with self._as_current():
            return pinned_memory(num_bytes)

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Raise :class:`RuntimeError`: torch has no such call for other devices than CUDA's."""
        message = f"torch cannot page-lock memory of other processes for {self.device.type}"
        raise RuntimeError(message)

    def new_stream(self) -> Stream:
        """Return a stream of the device's."""
        return torch.Stream(self.device)

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on this device."""
        return torch.accelerator.current_stream(self.device)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the calling thread's current one, until the end of ``with``."""
        # Not ``with stream``, which torch 2.6 does not know and later releases let no two enter at once
        # (https://github.com/pytorch/pytorch/issues/176560).
        before = self.current_stream()
        with self._as_current():
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def copy(self, tensor: torch.Tensor, stream: Stream | None = None) -> torch.Tensor:
        """Return a copy on the device, issued on ``stream``; one from memory that is not page-locked is done."""
        with contextlib.nullcontext() if stream is None else self.stream(stream):
            # From other memory a device may still be reading when an asynchronous copy returns; CUDA would not be.
            return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def record_event(self, stream: Stream) -> Event:
        """Return an event behind all that is on ``stream``."""
        event = torch.Event(self.device, blocking=True)
        event.record(stream)
        return event

    def wait_event(self, stream: Stream, event: Any) -> None:
        """Have all that comes onto ``stream`` from now on wait for ``event``."""
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        tensor.record_stream(stream)

    @contextlib.contextmanager
    def _as_current(self) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.device)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)
