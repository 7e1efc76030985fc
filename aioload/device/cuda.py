"""CUDA: a device by ``torch.cuda``. The only file that knows CUDA's streams.

It is not :class:`~aioload.device.AcceleratorBackend`, which would do: up to torch 2.14 a thread that waits for a
``torch.Event`` keeps a core busy, as its ``blocking`` is ignored (https://github.com/pytorch/pytorch/pull/189017).
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aioload.device.backend import Stream
from aioload.device.numa import cpus_near, on_cpus, pci_address
from aioload.device.pinning import pinned_memory


class CudaEvent:
    """An event of torch's, asked with its own device as the current one.

    A thread that has chosen no device has the first one, on which CUDA would set up its context, half a gigabyte, for
    whatever is asked of it: once for each process of a machine with several.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def query(self) -> bool:
        """Return whether it has passed."""
        with torch.cuda.device(self._device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Return when it has passed."""
        with torch.cuda.device(self._device):
            self.event.synchronize()


class CudaBackend:
    """A CUDA device. Each method has it as the current one meanwhile; see :class:`CudaEvent`."""

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

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Register memory of the host with CUDA, so that tensors over it are pinned ones; return what undoes it.

        Raises:
            RuntimeError: The system, or its limits, do not allow that.
        """
        address = memory.data_ptr()
        with torch.cuda.device(self.device):
            # A failure also stays behind in CUDA as the latest error of this thread, for torch to raise when the thread
            # launches a kernel next, and torch has no call that takes it from there. The gang's thread launches none.
            code = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)  # type: ignore[no-untyped-call]
            torch.cuda.check_error(code)
        return functools.partial(_unlock, address, self.device, os.getpid())

    @functools.cached_property
    def _cpus_near(self) -> frozenset[int]:
        return cpus_near(pci_address(torch.cuda.get_device_properties(self.device)))

    def new_stream(self) -> Stream:
        """Return a stream from torch's pool of them, which are few: others may have the same."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on this device."""
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the calling thread's current one, until the end of ``with``."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def copy(self, tensor: torch.Tensor, stream: Stream | None = None) -> torch.Tensor:
        """Return a copy on the device, issued on ``stream``; one from memory that is not page-locked is done."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):  # the second does nothing for None
            # From other memory a device may be reading when an asynchronous copy returns, or not: CUDA leaves it open.
            return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def record_event(self, stream: Stream) -> "CudaEvent":
        """Return an event behind all that is on ``stream``; waiting for it does not keep a core busy."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaEvent(event, self.device)

    def wait_event(self, stream: Stream, event: Any) -> None:
        """Have all that comes onto ``stream`` from now on wait for ``event``."""
        with torch.cuda.device(self.device):
            stream.wait_event(event.event)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        tensor.record_stream(stream)


def _unlock(address: int, device: torch.device, pid: int) -> bool:
    """Undo :meth:`CudaBackend.page_lock`; return whether the memory may be unmapped.

    What stays registered must stay mapped as well: CUDA would take what is mapped there next for the same memory.
    """
    if os.getpid() != pid:
        return True  # of a fork CUDA knows nothing
    try:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():  # a graph, which this call would spoil
                return False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    except Exception:  # the device is broken, as the next copy will say
        return False
    return True
