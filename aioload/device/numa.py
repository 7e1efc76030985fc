"""NUMA: memory of the host near a device, by where the thread runs that allocates it.

Linux takes the pages of new memory from the node of the processor that first touches them, and page-locked memory is
touched by the thread that asks for it. So that thread is kept on processors near the device meanwhile.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")


def parse_cpulist(text: str) -> frozenset[int]:
    """Return the numbers in a list such as ``"0-3,8,10-11"``, the form in which Linux gives sets of processors.

    Raises:
        ValueError: It is no such list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def pci_address(properties: Any) -> str | None:
    """Return the PCI address in what ``torch.cuda.get_device_properties`` gives, ``None`` where torch does not say it.

    Args:
        properties: With ``pci_domain_id``, ``pci_bus_id`` and ``pci_device_id``, which torch before 2.9 may lack.
    """
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(number is None for number in numbers):
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cpus_near(address: str | None, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the processors on the node of a PCI device: all where its node is not known, none where nothing is.

    Args:
        address: As in ``0000:3b:00.0``, ``None`` if unknown.
        sysfs: Where the system shows its devices.
    """
    if address is None:
        return frozenset()
    try:
        return parse_cpulist((sysfs / "bus/pci/devices" / address / "local_cpulist").read_text())
    except (OSError, ValueError):  # not Linux, or no such device is shown to this container
        return frozenset()


@contextlib.contextmanager
def on_cpus(cpus: frozenset[int]) -> Iterator[None]:
    """Keep the calling thread, and no other, on those of ``cpus`` that it may run on, until the end of ``with``.

    Does nothing where there are none of them, or no others, or the system does not let it.
    """
    before = _narrow(cpus)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):  # they have been taken away: the system has moved the thread itself
                os.sched_setaffinity(0, before)


def _narrow(cpus: frozenset[int]) -> set[int] | None:
    """Restrict the calling thread; return the processors that it ran on, ``None`` if nothing was done."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)  # 0 is the calling thread, not the process
    wanted = before & cpus
    if not wanted or wanted == before:
        return None
    try:
        os.sched_setaffinity(0, wanted)
    except OSError:
        return None
    return before
