"""Device: what a copier needs of one, how torch's devices give it, and which one a loader's ``device`` is."""

from aioload.device.accelerator import AcceleratorBackend
from aioload.device.backend import DeviceBackend, Event, Stream
from aioload.device.cuda import CudaBackend
from aioload.device.pinning import can_pin, pinned_memory
from aioload.device.resolve import backend_for, default_index, resolve_device, why_streamless
from aioload.device.streamless import PASSED, StreamlessBackend

__all__ = [
    "PASSED",
    "AcceleratorBackend",
    "CudaBackend",
    "DeviceBackend",
    "Event",
    "Stream",
    "StreamlessBackend",
    "backend_for",
    "can_pin",
    "default_index",
    "pinned_memory",
    "resolve_device",
    "why_streamless",
]
