"""Backend: what a copier needs of a device.

A device works on its own: what is asked of it is put on a *stream* and done later, in the order of that stream, beside
the host and the other streams. An *event* marks a place on a stream; it has passed when all before it is done.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

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

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Have copies from memory of the host that is there run beside the host's work, as from :meth:`host_memory`.

        But nobody keeps it until they are done: that is up to the caller.

        Args:
            memory: uint8, a mapping from its first page to its last.

        Returns:
            What undoes it, to be called before the memory is unmapped, on any thread. It never waits, and returns
            whether the memory may be unmapped. In a forked process it does nothing.

        Raises:
            RuntimeError: It cannot be done.
        """
        ...

    def new_stream(self) -> Stream | None:
        """Return a stream beside all others; ``None`` if the device has none.

        A device without streams is one whose copies are done when they return, and which one thread at a time may use.
        """
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
