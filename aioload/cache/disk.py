"""Disk: bytes kept in files of a folder, from one epoch and one run to the next, for all processes of a machine."""

import bisect
import contextlib
import errno
import hashlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aioload.arguments import whole_number
from aioload.cache import entry
from aioload.cache.admission import Admission
from aioload.cache.base import key_of
from aioload.cache.lock import Lock
from aioload.cache.usage import UsageFile
from aioload.errors import ArgumentError

_FOLDER = "aioload-cache-1"
"""In the folder that the user names. All that is in it is ours, with the number of its format; nothing else is."""

_DIGITS = frozenset("0123456789abcdef")
_NUM_DIGITS = 2  # of a name, which are the name of a folder: 256 of them; a new one takes as long as a file
_NUM_BYTES = 16  # of a name

_NEARLY_FULL = 7 / 8
"""From this share of ``max_bytes`` on each hit writes down that there was one, which takes another 1 - 3 us."""

_LOOK_EVERY_S = 1.0  # whether the cache has become nearly full by what other processes put there
_SLACK = 1.5  # by the clock, one pass may take longer than another
_LEFT_OVER_AFTER_S = 3600.0  # no file takes so long to write
_RECOUNT_AFTER_S = 3600.0
_MOST_FILES = 256  # that are looked at in one look for what may go

_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM))


class DiskCache:
    """Keeps what was read in a folder of a local disk, for later epochs, later runs and other processes.

    Any number of threads, loaders and processes (the ranks of a node, forked or not) may use one folder at once; give
    all the same ``max_bytes``. Each entry is a file with its length and checksum, and gets its name only when it is
    complete: what a killed process or the disk has damaged is not found, and is read and put there again.

    ``max_bytes`` counts entries in whole blocks of 4 KB. All processes together keep to it at all times; what is just
    being written (a file by each thread) comes on top, and so do up to 256 folders. When the cache is full, what is
    in it stays, and nothing more comes in: of a set twice as large, each epoch finds half. Only what no process has
    asked for during about two whole epochs makes room for others.

    It is for files that nobody changes: whether a file has is not looked at, for that takes a read of the storage. Call
    :meth:`clear`, or name another ``namespace``, when they have. If the folder cannot be written to, or its disk is
    full, one warning says so and this object puts nothing more there; what is there is still found.

    Nothing is made or opened before the first file is put there, or the cache is cleared, and nothing held open. It may
    be pickled.

    Args:
        path: The folder. It is made if need be. Only in a folder of its own within it, ``aioload-cache-1``, is anything
            written or removed.
        max_bytes: The most bytes that its files may take.
        namespace: Sets locations apart which another reader, or another storage, gives other bytes for.

    Raises:
        ArgumentError: ``path`` is no path or an empty one, ``max_bytes`` no whole number of at least 1, or
            ``namespace`` no string.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, namespace: str = "") -> None:
        folder: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(folder, str) or not folder:
            message = f"DiskCache needs the path of a folder, as a string or a Path; got {path!r}."
            raise ArgumentError(message)
        name: Any = namespace
        if not isinstance(name, str):
            message = f"namespace must be a string; got {namespace!r}."
            raise ArgumentError(message)
        self.path, self.namespace = Path(os.path.abspath(folder)), namespace
        self._folder = f"{self.path}/{_FOLDER}"
        self.max_bytes = whole_number("max_bytes", max_bytes, 1)
        self._prefix = namespace.encode("utf-8", "surrogatepass") + b"\0"
        self._usage = UsageFile(f"{self._folder}/usage", int(_NEARLY_FULL * self.max_bytes), self._count)
        self._lock = Lock()
        self._admission = Admission(time.time(), _SLACK)
        self._temporary = f"{self._folder}/tmp"
        self._touches, self._look_at = False, 0.0
        self._seen_bytes = self.max_bytes  # what was used when it was last seen
        self._is_ready = self._is_off = self._is_counted = False
        self._folder_before = os.urandom(2).hex()  # that looks in several processes begin at different places

    def __repr__(self) -> str:
        space = f", namespace={self.namespace!r}" if self.namespace else ""
        return f"DiskCache({str(self.path)!r}, max_bytes={self.max_bytes}{space})"

    def __reduce__(self) -> Any:
        return type(self), (str(self.path), self.max_bytes, self.namespace)

    @property
    def used_bytes(self) -> int:
        """How much of ``max_bytes`` is used, by all namespaces and processes."""
        usage = self._usage.look()
        return 0 if usage is None else usage.used_bytes

    @property
    def generation(self) -> float:
        """Changes whenever the cache is cleared, by any process."""
        usage = self._usage.look()
        return 0.0 if usage is None else usage.cleared_at

    def get(self, location: Any) -> bytes | None:
        """Return the bytes of a location, or ``None`` if they are not there, or not whole. Blocks, for one small read.

        Raises:
            DatasetError: ``location`` is nothing that can be told apart: see :func:`~aioload.cache.key_of`.
        """
        name, now = self._name_of(location), time.time()
        if not hash(name) & self._admission.mask:
            self._admission.note(name, now)
        if not self._look_at - _LOOK_EVERY_S <= now < self._look_at:  # or the clock was set back
            self._look(now)
        path = self._path_of(name)
        try:
            return entry.read(path, name, touch=self._touches)
        except entry.DamagedEntryError:
            with contextlib.suppress(OSError):
                self._remove(path)
        except OSError:  # whatever it is, the storage has the file too
            pass
        return None

    def put(self, location: Any, data: bytes, generation: float | None = None) -> None:
        """Keep the bytes of a location, if there is room for them and they are not there yet. Blocks.

        Args:
            location: The location.
            data: Its bytes.
            generation: What :attr:`generation` was before they were read; if it has changed, they are not kept.

        Raises:
            DatasetError: As :meth:`get`.
        """
        name, size = self._name_of(location), entry.size_on_disk(len(data))
        if self._is_off or size > self.max_bytes:
            return
        try:
            self._make_ready()
            if self._has_room(size):
                self._add(name, data, size, generation)
        except OSError as error:
            if error.errno not in _PASSING:
                self._turn_off(error)

    def clear(self) -> None:
        """Remove all entries, those of other namespaces and processes too.

        What loaders have begun to read before is not kept either, for the rest of their pass.

        Raises:
            OSError: They cannot be removed, or the folder cannot be written to.
        """
        os.makedirs(self._folder, exist_ok=True)  # others may be about to put the first there
        with self._usage.locked() as usage:
            for path in self._entries():
                path.unlink(missing_ok=True)
            usage.used_bytes, usage.cleared_at = 0, time.time()

    def _name_of(self, location: Any) -> str:
        key = key_of(location).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(self._prefix + key, digest_size=_NUM_BYTES).hexdigest()

    def _path_of(self, name: str) -> str:
        return f"{self._folder}/{name[:_NUM_DIGITS]}/{name[_NUM_DIGITS:]}"

    def _look(self, now: float) -> None:
        usage = self._usage.look()
        self._touches = usage is not None and usage.full_since > 0
        self._look_at = now + _LOOK_EVERY_S

    def _make_ready(self) -> None:
        if self._is_ready:
            return
        os.makedirs(self._temporary, exist_ok=True)
        for file in os.scandir(self._temporary):
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                if time.time() - file.stat().st_mtime > _LEFT_OVER_AFTER_S:
                    os.unlink(file.path)
        self._is_ready = True

    def _add(self, name: str, data: bytes, size: int, generation: float | None) -> None:
        path, temporary, is_named = self._path_of(name), f"{self._temporary}/{os.urandom(8).hex()}", False
        entry.write(temporary, name, data)
        try:
            with self._usage.locked() as usage:
                self._seen_bytes = usage.used_bytes
                if generation is not None and generation != usage.cleared_at:
                    return
                if usage.used_bytes + size > self.max_bytes or os.path.exists(path):
                    return
                usage.used_bytes += size
                try:
                    os.rename(temporary, path)
                except FileNotFoundError:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    os.rename(temporary, path)
                is_named = True
                self._touches = usage.full_since > 0
        finally:
            if not is_named:
                os.unlink(temporary)

    def _has_room(self, size: int) -> bool:
        """Whether ``size`` bytes fit, now or when what may go has gone."""
        if self._seen_bytes + size <= _NEARLY_FULL * self.max_bytes or self.used_bytes + size <= self.max_bytes:
            return True
        if not self._is_counted:  # what killed processes have begun is still counted as theirs
            self._is_counted = True
            with self._usage.locked(recount_after_s=_RECOUNT_AFTER_S) as usage:
                if usage.used_bytes + size <= self.max_bytes:
                    return True
        if not self._admission.is_worth_a_look():
            return False
        self._admission.looked(found=self._make_room(size) > 0)
        return self.used_bytes + size <= self.max_bytes

    def _make_room(self, size: int) -> int:
        """Remove what may go, if need be until ``size`` bytes more are free; return how many are."""
        usage = self._usage.look()
        if usage is None or usage.full_since == 0:
            return 0
        freed = num_files = 0
        folders = sorted(self._folders())
        start = bisect.bisect(folders, self._folder_before)
        for folder in [*folders[start:], *folders[:start]]:
            self._folder_before = folder
            for file in _files_of(f"{self._folder}/{folder}"):
                num_files += 1
                with contextlib.suppress(FileNotFoundError):
                    if self._admission.may_go(max(usage.full_since, file.stat().st_mtime), time.time()):
                        freed += self._remove(file.path)
            if freed >= size or num_files >= _MOST_FILES:
                break
        return freed

    def _remove(self, path: str) -> int:
        """Remove an entry and return how many bytes it took."""
        with self._usage.locked() as usage:
            try:
                size = entry.blocks_of(os.stat(path).st_size)
                os.unlink(path)
            except FileNotFoundError:
                return 0
            usage.used_bytes = max(0, usage.used_bytes - size)
            return size

    def _entries(self) -> Iterator[Path]:
        for folder in self._folders():
            for file in _files_of(f"{self._folder}/{folder}"):
                yield Path(file.path)

    def _folders(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if len(name) == _NUM_DIGITS and not set(name) - _DIGITS]

    def _count(self) -> int:
        total = 0
        for path in self._entries():
            with contextlib.suppress(FileNotFoundError):
                total += entry.blocks_of(path.stat().st_size)
        return total

    def _turn_off(self, error: OSError) -> None:
        with self._lock:
            if self._is_off:
                return
            self._is_off = True
        warnings.warn(
            f"{self!r} keeps nothing more: {error}. What it has is still used, and the rest read from the storage.",
            UserWarning,
            stacklevel=2,
        )


def _files_of(folder: str) -> Iterator["os.DirEntry[str]"]:
    try:
        files = os.scandir(folder)
    except FileNotFoundError:
        return
    with files:
        yield from files
