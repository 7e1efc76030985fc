"""CUDA: a device by ``torch.cuda``. The only file that knows CUDA's streams.

It is not :class:`~aioload.device.AcceleratorBackend`, which would do: up to torch 2.14 a thread that waits for a
``torch.Event`` keeps a core busy, as its ``blocking`` is ignored (https://github.com/pytorch/pytorch/pull/189017).
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from aioload.device.backend import Event, Stream
from aioload.device.numa import cpus_near, on_cpus, pci_address
from aioload.device.pinning import pinned_memory


class CudaBackend:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<CudaBackend {self.device}>"

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory, on the NUMA node of the device where that is known.

        What torch has kept of memory that was freed it gives out again, on whatever node that is.
        """
        # Without the first, torch, and so this process, would also make use of the first device.
        with torch.cuda.device(self.device), on_cpus(self._cpus_near):
            return pinned_memory(num_bytes)

    @functools.cached_property
    def _cpus_near(self) -> frozenset[int]:
        return cpus_near(pci_address(torch.cuda.get_device_properties(self.device)))

    def new_stream(self) -> Stream:
        """Return a stream from torch's pool of them."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on this device."""
        return torch.cuda.current_stream(self.device)

    def stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` the calling thread's current one, until the end of ``with``."""
        return torch.cuda.stream(stream)

    def copy(self, tensor: torch.Tensor, stream: Stream | None = None) -> torch.Tensor:
        """Return a copy on the device, issued on ``stream``."""
        with torch.cuda.stream(stream):  # which does nothing for None
            return tensor.to(self.device, non_blocking=True)

    def record_event(self, stream: Stream) -> Event:
        """Return an event behind all that is on ``stream``; waiting for it does not keep a core busy."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_event(self, stream: Stream, event: Any) -> None:
        """Have all that comes onto ``stream`` from now on wait for ``event``."""
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        tensor.record_stream(stream)
