"""Resolve: which device a loader's ``device`` is, and how batches get to it."""

import functools
import os
import warnings
from typing import Any

import torch

from aioload.device.accelerator import AcceleratorBackend
from aioload.device.backend import DeviceBackend
from aioload.device.cuda import CudaBackend
from aioload.device.streamless import StreamlessBackend
from aioload.errors import ArgumentError


def resolve_device(device: Any) -> torch.device | DeviceBackend:
    """Return the device that batches are to arrive on. Warns of one without streams.

    Raises:
        ArgumentError: It is no device, or one that this machine does not have.
    """
    if isinstance(device, DeviceBackend):
        return device
    try:
        named = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as exc:
        message = f"device needs 'cpu', 'cuda', 'cuda:N' or another that torch.device knows; got {device!r}."
        raise ArgumentError(message) from exc
    if named.type == "cpu":
        return named
    if named.type == "meta":
        message = f"device={device!r}: tensors there have no contents, so no batch can be loaded to it. Use 'cpu'."
        raise ArgumentError(message)
    resolved = _present(named, device)
    reason = None if named.type == "cuda" else why_streamless(resolved)
    if reason is not None:
        warnings.warn(
            f"Copies of batches to {resolved} are not made ahead but by next(), which holds up the loop for as long "
            f"as they take: {reason}.",
            RuntimeWarning,
            stacklevel=3,  # the line that makes the loader
        )
    return resolved


def backend_for(device: torch.device | DeviceBackend) -> DeviceBackend | None:
    """Return how batches get to a resolved device, ``None`` for the CPU, where they are already."""
    if not isinstance(device, torch.device):
        return device
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaBackend(device)
    return AcceleratorBackend(device) if why_streamless(device) is None else StreamlessBackend(device)


def default_index(current: int, count: int, local_rank: str | None) -> int:
    """Return the number of the device that a name without one, such as ``"cuda"``, is.

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


@functools.cache
def why_streamless(device: torch.device) -> str | None:
    """Return why copies to a device that is there cannot have a stream of their own, ``None`` if they can."""
    if device.type == "mps":
        return "torch's mps has no streams, and does not stand two threads at once"
    accelerator = _accelerator()
    if accelerator is None or accelerator.type != device.type:
        return f"torch.accelerator, by which torch has streams, does not serve {device.type} here"
    backend = AcceleratorBackend(device)
    try:  # what the copier will do
        stream, current = backend.new_stream(), backend.current_stream()
        with backend.stream(stream):
            tensor = torch.empty(1, device=device)
        event = backend.record_event(stream)
        backend.wait_event(current, event)
        backend.record_stream(tensor, current)
        event.synchronize()
    except Exception as exc:  # a backend says by any what it does not have
        return str(exc).partition("\n")[0].partition(". ")[0] or repr(exc)
    return "all its streams are one" if stream == current else None


def _present(named: torch.device, asked: Any) -> torch.device:
    """Return ``named`` with a number, if torch sees it."""
    count = _count(named.type)
    if count is None:
        try:
            return torch.empty(1, device=named).device
        except Exception as exc:  # another one for each kind of device
            raise _absent(asked) from exc
    if (named.index or 0) >= count:
        raise _absent(asked)
    if named != torch.device(named.type):  # but one with a number
        return named
    is_cuda = named.type == "cuda"
    current = torch.cuda.current_device() if is_cuda else torch.accelerator.current_device_index()
    return torch.device(named.type, default_index(current, count, os.environ.get("LOCAL_RANK")))


def _count(kind: str) -> int | None:
    """Return how many devices of a kind torch sees, ``None`` if it does not count these."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    accelerator = _accelerator()
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else None


def _absent(asked: Any) -> ArgumentError:
    accelerator = _accelerator()
    kinds = {"cuda", "cuda" if accelerator is None else accelerator.type}
    counts = [(kind, count) for kind in sorted(kinds) if (count := _count(kind))]
    seen = " and ".join(f"{count} {kind} device{'s' * (count > 1)}" for kind, count in counts)
    return ArgumentError(
        f"device={asked!r} needs a device that is there, but torch {torch.__version__} sees {seen or 'none'} beside "
        "the CPU. Use what there is, or a torch build and driver that see the device."
    )


def _accelerator() -> torch.device | None:
    """Return torch's current accelerator, if there is one here."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
