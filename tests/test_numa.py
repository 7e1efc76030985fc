"""NUMA: which processors are near a device, and that only the thread that allocates is kept on them."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs import RIGS

from aioload.device.numa import cpus_near, on_cpus, parse_cpulist, pci_address

ON_LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason=f"{sys.platform} keeps no thread anywhere")
TWO = pytest.mark.skipif(ON_LINUX.args[0] or len(os.sched_getaffinity(0)) < 2, reason="needs two processors")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("0-0", {0}),
        ("\n", set()),
        ("", set()),
        ("0-1,128-129", {0, 1, 128, 129}),
    ],
)
def test_lists_of_processors_are_read(text: str, expected: set[int]) -> None:
    assert parse_cpulist(text) == expected


@pytest.mark.parametrize("text", ["a", "0-", "-3", "0-3;5", "0-b"])
def test_what_is_no_list_of_processors_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpulist(text)


def test_the_address_is_that_of_the_system() -> None:
    assert pci_address(SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=10)) == "0001:3b:0a.0"
    assert pci_address(SimpleNamespace(pci_bus_id=1, pci_device_id=0)) is None
    assert pci_address(SimpleNamespace(name="A100")) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("\n", set()), ("nonsense", set()), (None, set())]
)
def test_the_processors_near_a_device_are_what_the_system_says(
    tmp_path: Path, text: str | None, expected: set[int]
) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    if text is not None:
        (device / "local_cpulist").write_text(text)
    assert cpus_near("0000:3b:00.0", tmp_path) == expected
    assert cpus_near("0000:3c:00.0", tmp_path) == set()
    assert cpus_near(None, tmp_path) == set()
    assert cpus_near("0000:3b:00.0", tmp_path / "none") == set()


@TWO
def test_only_the_calling_thread_is_kept_near_and_goes_back() -> None:
    before = os.sched_getaffinity(0)
    near = frozenset([min(before), 100_000])
    begun, done = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        done.wait()

    other = threading.Thread(target=wait)
    other.start()
    begun.wait()
    assert other.native_id is not None
    try:
        with on_cpus(near):
            assert os.sched_getaffinity(0) == {min(before)}
            assert os.sched_getaffinity(other.native_id) == before
        assert os.sched_getaffinity(0) == before
        with pytest.raises(MemoryError), on_cpus(near):
            raise MemoryError
        assert os.sched_getaffinity(0) == before
    finally:
        done.set()
        other.join()


@TWO
def test_where_there_is_nothing_to_choose_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    done: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_setaffinity", lambda pid, cpus: done.append(cpus))
        for cpus in (frozenset[int](), frozenset([100_000]), frozenset(before | {100_000})):
            with on_cpus(cpus):
                pass
    assert not done


@TWO
def test_a_system_that_does_not_let_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError

    before = os.sched_getaffinity(0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_setaffinity", refuse)
        with on_cpus(frozenset([min(before)])):
            assert os.sched_getaffinity(0) == before


@TWO
@pytest.mark.parametrize("make", RIGS)
def test_a_device_gives_memory_and_leaves_the_thread_where_it_was(make: Any) -> None:
    before = os.sched_getaffinity(0)
    memory = make().backend.host_memory(1 << 20)
    assert memory.numel() == 1 << 20
    assert os.sched_getaffinity(0) == before
