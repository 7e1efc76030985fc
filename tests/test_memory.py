"""How much memory there is to load ahead into, as the system tells it."""

from pathlib import Path

import pytest

from aioload.engine.memory import available_bytes

MB = 1 << 20


def write(folder: Path, **texts: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 1000 MB available, and a process in no group."""
    proc = tmp_path / "proc"
    write(proc, meminfo=f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable: {1000 * 1024} kB")
    return proc


def test_some_is_available_here() -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < available_bytes() <= int(meminfo["MemTotal"].split()[0]) * 1024


def test_what_the_machine_has_where_there_are_no_groups(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 1000 * MB
    write(proc / "self", cgroup="0::/job")
    assert available_bytes(proc, tmp_path / "none") == 1000 * MB


def test_something_where_the_system_tells_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) > 100 * MB
    write(tmp_path, meminfo="MemAvailable: plenty")
    assert available_bytes(tmp_path, tmp_path) > 100 * MB


def test_the_tightest_limit_of_all_groups_above(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    write(proc / "self", cgroup="0::/pod/job")
    write(groups / "pod/job", memory__max="max", memory__current=50 * MB, memory__stat="anon 0")
    write(groups / "pod", memory__max=300 * MB, memory__current=100 * MB, memory__stat="anon 7")
    write(groups, memory__max=900 * MB, memory__current=100 * MB, memory__stat="anon 0")
    write(groups.parent, memory__max=1, memory__current=1, memory__stat="anon 0")  # not a group
    assert available_bytes(proc, groups) == 200 * MB
    write(groups / "pod/job", memory__max=100 * MB)
    assert available_bytes(proc, groups) == 50 * MB
    write(groups / "pod/job", memory__current=200 * MB)
    assert available_bytes(proc, groups) == 0


def test_cached_files_do_not_count_as_used(proc: Path, tmp_path: Path) -> None:
    stat = f"anon {10 * MB}\ninactive_file {150 * MB}\nactive_file {30 * MB}\nslab_reclaimable {5 * MB}"
    write(proc / "self", cgroup="0::/")
    write(tmp_path / "groups", memory__max=200 * MB, memory__current=199 * MB, memory__stat=stat)
    assert available_bytes(proc, tmp_path / "groups") == 186 * MB


def test_groups_of_the_first_version(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    write(proc / "self", cgroup="3:cpuset:/x\n4:memory:/docker/abc\n1:cpu,cpuacct:/\n0::/")
    # The path is that of the host; a container sees its own group as the root.
    write(
        groups / "memory",
        memory__limit_in_bytes=400 * MB,
        memory__usage_in_bytes=390 * MB,
        memory__stat=f"total_inactive_file {200 * MB}\ntotal_active_file {40 * MB}",
    )
    assert available_bytes(proc, groups) == 250 * MB


def test_a_limit_that_the_machine_does_not_reach_is_none(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    write(proc / "self", cgroup="4:memory:/job")
    write(groups / "memory/job", memory__limit_in_bytes=(1 << 63) - 4096)  # how the first version says "max"
    write(groups / "memory", memory__limit_in_bytes=9_999_998 * 1024, memory__usage_in_bytes=9_999_900 * 1024)
    write(groups / "memory", memory__stat="total_active_file 0")
    assert available_bytes(proc, groups) == 98 * 1024


def test_limits_hold_where_the_machine_does_not_say_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "self", cgroup="0::/")
    write(tmp_path / "groups", memory__max=3000 * MB, memory__current=0, memory__stat="anon 0")
    assert available_bytes(tmp_path, tmp_path / "groups") == 3000 * MB
