import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aioload.readers import local, read_file


def _open_files() -> list[str]:
    return os.listdir("/proc/self/fd")


def _directory_size(size: int | OSError) -> Callable[[int, int, int], int]:
    def lseek(fd: int, position: int, how: int) -> int:
        if isinstance(size, OSError):
            raise size
        return size

    return lseek


@pytest.mark.parametrize("size", [0, 1, 4096, 1_000_003])
def test_reads_the_whole_file(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    before = _open_files()
    assert read_file(path) == content
    assert read_file(str(path)) == content
    assert read_file(os.fsencode(path)) == content
    assert _open_files() == before


def test_a_file_that_reports_no_size_is_read_to_its_end() -> None:
    assert b"\nPid:\t%d\n" % os.getpid() in read_file("/proc/self/status")


def test_devices_are_read_to_their_end() -> None:
    assert read_file("/dev/null") == b""


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = os.urandom(300_000)  # more than a pipe holds
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    assert read_file(path) == content
    writer.join()


def test_short_reads_do_not_shorten_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, max(1, size // 3), offset))
    path = tmp_path / "file"
    path.write_bytes(b"abcdefgh")
    assert read_file(path) == b"abcdefgh"


def test_a_file_over_the_limit_of_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_READ_MAX", 7)
    path = tmp_path / "file"
    path.write_bytes(b"abcdefgh")
    assert read_file(path) == b"abcdefgh"


def test_a_file_that_shrank_gives_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdefgh")

    def lseek_then_shrink(fd: int, position: int, how: int) -> int:
        os.truncate(path, 3)
        return 8

    monkeypatch.setattr(os, "lseek", lseek_then_shrink)
    assert read_file(path) == b"abc"


@pytest.mark.parametrize("size", [None, 0, 4096, 2**63 - 1, OSError(errno.EINVAL, "Invalid argument")], ids=str)
def test_a_directory_is_refused_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | OSError | None
) -> None:
    if size is not None:
        monkeypatch.setattr(os, "lseek", _directory_size(size))
    before = _open_files()
    with pytest.raises(IsADirectoryError) as caught:
        read_file(tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert caught.value.errno == errno.EISDIR
    assert _open_files() == before


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught:
        read_file(path)
    assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as caught:
        read_file(os.fsencode(path))
    assert caught.value.filename == os.fsencode(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"secret")
    path.chmod(0)
    with pytest.raises(PermissionError) as caught:
        read_file(path)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("call", ["open", "pread", "close"])
def test_an_error_of_any_call_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    error = OSError(errno.EIO, "Input/output error")
    close = os.close

    def fail(*args: object) -> None:
        if call == "close":
            assert isinstance(args[0], int)
            close(args[0])
        raise error

    before = _open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="Input/output error") as caught:
            read_file(path)
    assert caught.value is error
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.EIO
    assert _open_files() == before


def test_something_that_is_no_path_is_refused() -> None:
    with pytest.raises(TypeError, match="path"):
        read_file(3)  # type: ignore[arg-type]


def test_many_threads_read_the_same_files(tmp_path: Path) -> None:
    contents = [os.urandom(1000 + i) for i in range(20)]
    for i, content in enumerate(contents):
        (tmp_path / str(i)).write_bytes(content)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda i: read_file(tmp_path / str(i % 20)), range(400)))
    assert read == contents * 20
