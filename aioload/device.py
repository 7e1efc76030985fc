"""Device: what a copier needs of one, and how CUDA gives it. The only file that knows CUDA's streams.

A device works on its own: what is asked of it is put on a *stream* and done later, in the order of that stream, beside
the host and the other streams. An *event* marks a place on a stream; it has passed when all before it is done.
"""

import os
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from aioload.errors import ArgumentError

Stream: TypeAlias = Any
"""A stream of the device's, whatever that is to it."""


class Event(Protocol):
    """A place on a stream. Any thread may call any method."""

    def query(self) -> bool:
        """Return whether it has passed. Never waits."""
        ...

    def synchronize(self) -> None:
        """Return when it has passed, sleeping until then."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A device to which batches are copied; the loader's ``device`` takes one. Any thread may call any method.

    Tensors on the device come from an allocator that goes by streams: memory that nobody refers to any more is given
    out again at once, for use on the stream that it was allocated for, whatever other streams still do with it, unless
    it was told of them (:meth:`record_stream`).
    """

    @property
    def device(self) -> torch.device:
        """What its tensors have as their ``device``."""
        ...

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory of the host, aligned for any dtype, that copies are made from beside the host's work.

        When nobody refers to it any more, it is given out again no sooner than copies from it are done.
        """
        ...

    def new_stream(self) -> Stream:
        """Return a stream beside all others."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream that what the calling thread does with the device's tensors goes to."""
        ...

    def stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` the calling thread's current one, until the end of ``with``."""
        ...

    def copy(self, tensor: torch.Tensor, stream: Stream | None = None) -> torch.Tensor:
        """Return a copy on the device, for which memory is there now, and contents when ``stream`` has come to it.

        What lies in :meth:`host_memory` must stay as it is until then; anything else has been read when this returns.
        A tensor that is on the device already is returned as it is.

        Args:
            tensor: A dense tensor.
            stream: ``None`` for the current one.
        """
        ...

    def record_event(self, stream: Stream) -> Event:
        """Return an event behind all that is on ``stream``."""
        ...

    def wait_event(self, stream: Stream, event: Any) -> None:
        """Have all that comes onto ``stream`` from now on wait for ``event``, one of its own; the host does not."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Have the memory of ``tensor``, once free, wait for what is on ``stream`` by then."""
        ...


class CudaBackend:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<CudaBackend {self.device}>"

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory."""
        with torch.cuda.device(self.device):  # else torch, and so this process, would also make use of the first one
            return pinned_memory(num_bytes)

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


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Return page-locked uint8 memory, which starts on a page."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def resolve_device(device: Any) -> torch.device | DeviceBackend:
    """Return the device that batches are to arrive on.

    Raises:
        ArgumentError: It is no device, or one that this machine does not have.
        NotImplementedError: A kind of device that is not supported.
    """
    if isinstance(device, DeviceBackend):
        return device
    try:
        resolved = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as exc:
        message = f"device needs 'cpu', 'cuda', 'cuda:N' or a torch.device; got {device!r}."
        raise ArgumentError(message) from exc
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        message = f"device={device!r}: only cpu and cuda devices are supported so far."
        raise NotImplementedError(message)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (resolved.index or 0) >= count:
        message = (
            f"device={device!r} needs a CUDA device of that number, but torch {torch.__version__} sees {count}. "
            "Use device='cpu', or a torch build and driver that see the GPU."
        )
        raise ArgumentError(message)
    if resolved != torch.device("cuda"):  # but one with a number
        return resolved
    return torch.device("cuda", cuda_index(torch.cuda.current_device(), count, os.environ.get("LOCAL_RANK")))


def cuda_index(current: int, count: int, local_rank: str | None) -> int:
    """Return the number of the device that ``"cuda"`` is.

    Launchers such as torchrun start a process for each device of a machine and say which it is by ``LOCAL_RANK``. That
    counts for a process that has not chosen a device itself, and that sees them all.

    Args:
        current: The current device; 0 also where none was chosen.
        count: Devices that this process sees.
        local_rank: What the launcher says, if there is one.
    """
    if current == 0 and local_rank is not None and local_rank.isdecimal() and int(local_rank) < count:
        return int(local_rank)
    return current


def backend_for(device: torch.device | DeviceBackend) -> DeviceBackend | None:
    """Return how batches get to a resolved device, ``None`` for the CPU, where they are already."""
    if not isinstance(device, torch.device):
        return device
    return None if device.type == "cpu" else CudaBackend(device)
