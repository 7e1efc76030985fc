"""Cards: a CUDA device as the benchmark uses it, and a rehearsal of one on the CPU, which gives no figures."""

import datetime
import gzip
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from aioload.device import CudaBackend, DeviceBackend, Stream
from aioload.testing import SimulatedDevice
from benchmarks.paired import machine
from benchmarks.traces import Event


class Card(Protocol):
    """Where batches go. ``loader_device`` is the loader's ``device``, ``device`` where tensors of it are."""

    backend: DeviceBackend
    device: torch.device
    loader_device: Any
    is_real: bool

    def synchronize(self) -> None:
        """Wait for all that is under way there."""
        ...

    def profile(self, work: Callable[[], object], path: Path | None = None) -> list[Event]:
        """Return what happened on the device during ``work``; and write it, with what the host did, to ``path``."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what it is."""
        ...


class CudaCard:
    """The current CUDA device."""

    is_real = True

    def __init__(self) -> None:
        self.device = self.loader_device = torch.device("cuda", torch.cuda.current_device())
        self.backend: DeviceBackend = CudaBackend(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def profile(self, work: Callable[[], object], path: Path | None = None) -> list[Event]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        if path is not None:  # with the host's part, which takes time of its own
            activities.append(torch.profiler.ProfilerActivity.CPU)
        self.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            work()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            text = plain.read_text()
        if path is not None:
            write_trace(path, text)
        events: list[Event] = json.loads(text)["traceEvents"]
        return events

    def facts(self) -> dict[str, Any]:
        properties: Any = torch.cuda.get_device_properties(self.device)
        fields = "driver_version,pcie.link.gen.max,pcie.link.width.max"
        index = str(self.device.index)
        values = _output(["nvidia-smi", f"--id={index}", f"--query-gpu={fields}", "--format=csv,noheader"]).split(", ")
        return {
            "card": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            **dict(zip(("driver", "pcie_generation", "pcie_lanes"), values, strict=False)),
        }


class Rehearsal:
    """The CPU, where every line of the benchmark can be run, and no figure means anything."""

    is_real = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        simulated = SimulatedDevice()
        with simulated:  # when this has ended it does everything at once
            pass
        self.backend: DeviceBackend = simulated
        self.loader_device = simulated

    def synchronize(self) -> None:
        """Nothing is under way."""

    def profile(self, work: Callable[[], object], path: Path | None = None) -> list[Event]:
        work()
        events = made_up_events()
        if path is not None:
            write_trace(path, json.dumps({"traceEvents": events}))
        return events

    def facts(self) -> dict[str, Any]:
        return {"card": "none: rehearsal, no figures"}


def made_up_events() -> list[Event]:
    """Return four kernels with gaps before the last two, and two copies, one of them half under a kernel."""

    def event(cat: str, name: str, ts: float, dur: float, stream: int, **more: Any) -> Event:
        args = {"device": 0, "context": 1, "stream": stream, "correlation": int(ts), **more}
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}

    copy = "Memcpy HtoD (Pinned -> Device)"
    return [
        {"ph": "M", "name": "process_name", "pid": 0, "ts": 0.0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 90.0, "dur": 200.0},
        event("kernel", "gemm", 0.0, 50.0, 7),
        event("kernel", "gemm", 100.0, 50.0, 7),
        event("kernel", "gemm", 150.0, 50.0, 7),
        event("kernel", "gemm", 250.0, 50.0, 7),
        event("gpu_memcpy", copy, 110.0, 40.0, 13, bytes=2_000_000),
        event("gpu_memcpy", copy, 190.0, 20.0, 13, bytes=1_000_000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 300.0, 5.0, 7, bytes=4),
    ]


def write_trace(path: Path, text: str) -> None:
    """Write a trace, compressed if the name ends in ``.gz``, which viewers of traces read as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def facts_of_the_run(card: Card) -> dict[str, Any]:
    """Return what figures must not be without."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    return {"date": now, "command": command, **card.facts(), **machine()}


def using(card: Card, stream: Stream) -> AbstractContextManager[Any]:
    """Make ``stream`` the current one."""
    return card.backend.stream(stream)


def without_warnings_of_forks() -> None:
    """Silence what Python 3.12 says of torch's workers: they are forked off a process that has threads, CUDA's too."""
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
