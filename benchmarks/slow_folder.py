"""A slow folder: a local folder mounted once more, where every operation takes as long as one is told."""

import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.samples import npy_files

SOURCE = Path(__file__).with_name("slowfs.c")
END_S = 10.0
# Of the time a file takes, the share of its open; the rest is that of its read.
OPEN_SHARE = 3 / 7
CACHE_S = 3600.0

_numbers = itertools.count()


class SlowFolderError(RuntimeError):
    """The slow file system cannot be built or mounted; the message is one line that says what it needs."""


class SlowFolder:
    """A folder mounted read-only at :attr:`path` for the duration of ``with``.

    The file system is a process of its own. It ends, unmounts and removes the mount point when the ``with`` block ends,
    whatever ends it, and also when this process dies without a word: it waits for the end of a pipe that we hold.
    Reads that are under way then fail.

    Args:
        folder: What is mounted.
        build: Where the program is kept once it is built.
        **settings: See the head of ``slowfs.c``: ``open_ms=3, read_ms=4``, ``slow_opens=0.01`` and so on.

    Attributes:
        path: The mount point.
    """

    def __init__(self, folder: str | Path, build: Path, **settings: float) -> None:
        self.path = Path(tempfile.gettempdir()) / f"slowfs-{os.getpid()}-{next(_numbers)}"
        self._command = [str(_built(build)), str(folder), str(self.path), "until_eof=1", *_arguments(settings)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # A session of its own: Ctrl-C is for us, and what we mounted stays until those who read from it have ended.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            if _output(self._process).readline() != "mounted\n":
                raise SlowFolderError(missing() or f"slowfs did not mount: {_errors(self._process).read().strip()}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmount. Without effect when that has been done."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        except BaseException:
            process.kill()
            process.communicate()
            subprocess.run(["fusermount3", "-u", "-z", str(self.path)], check=False, capture_output=True)
            self.path.rmdir()
            raise

    def set(self, **settings: float) -> None:
        """Change settings for the operations that begin from now on.

        Raises:
            ValueError: There is no such setting, or the value is below 0.
        """
        assert self._process is not None
        for argument in _arguments(settings):
            _input(self._process).write(argument + "\n")
            _input(self._process).flush()
            if (answer := _output(self._process).readline()) != "ok\n":
                raise ValueError(f"{argument}: {answer.strip()}")

    def counts(self) -> dict[str, int]:
        """Return the number of operations so far, by name; ``peak`` is the most that were under way at once."""
        lines = (self.path / ".slowfs").read_text().splitlines()
        return {name: int(number) for name, number in map(str.split, lines)}


@contextmanager
def slow_npy_files(
    data: Path, num_files: int, file_ms: float, **settings: float
) -> Iterator[tuple[SlowFolder, list[str]]]:
    """Lend the ``.npy`` files of 4 KB as a storage has them that takes ``file_ms`` for a file.

    The open is one round trip, which also checks the name, and the read another, as with NFS 4. The kernel keeps
    names and sizes, as NFS clients do, and knows them all; here that leaves more of the processor to the loaders.

    Args:
        data: Where the files, and the program, are kept.
        num_files: How many of the files to list.
        file_ms: How long an open and a read take together, in milliseconds.
        **settings: More settings of the file system.

    Yields:
        The mounted folder, and the paths of the files in it.
    """
    local = npy_files(data)[:num_files]
    delays = {"open_ms": OPEN_SHARE * file_ms, "read_ms": (1 - OPEN_SHARE) * file_ms, "cache_s": CACHE_S}
    with SlowFolder(Path(local[0]).parent, data, **delays, **settings) as folder:
        paths = [str(folder.path / Path(path).name) for path in local]
        for path in paths:
            os.stat(path)
        yield folder, paths


def missing() -> str:
    """Return one line on what this machine lacks for a slow folder, empty if nothing."""
    lacks = [name for name in ("cc", "pkg-config", "fusermount3") if shutil.which(name) is None]
    if "pkg-config" not in lacks and subprocess.run(["pkg-config", "--exists", "fuse3"], check=False).returncode != 0:
        lacks.append("libfuse3-dev")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        lacks.append("/dev/fuse, readable and writable")
    if not lacks:
        return ""
    return (
        "the slow file system needs a C compiler, pkg-config, libfuse3-dev, fuse3 and /dev/fuse; "
        f"this machine lacks: {', '.join(lacks)}. On Debian: apt-get install gcc pkg-config libfuse3-dev fuse3"
    )


def _built(folder: Path) -> Path:
    """Return the program, compiled when its source is not the one it was compiled from."""
    program = folder / f"slowfs-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if program.exists():
        return program
    if line := missing():
        raise SlowFolderError(line)
    flags = subprocess.run(["pkg-config", "fuse3", "--cflags", "--libs"], check=True, capture_output=True, text=True)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"unfinished-slowfs-{os.getpid()}"
    command = ["cc", "-O2", "-o", str(unfinished), str(SOURCE), *flags.stdout.split(), "-pthread"]
    compiled = subprocess.run(command, check=False, capture_output=True, text=True)
    if compiled.returncode != 0:
        raise SlowFolderError(f"slowfs.c does not compile: {' '.join(command)}\n{compiled.stderr}")
    unfinished.rename(program)
    return program


def _arguments(settings: dict[str, float]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def _input(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _errors(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stderr is not None
    return process.stderr
