"""Server: the process that engine processes are forked off, and how it is begun.

It is :mod:`multiprocessing`'s own, and has imported what they all need: what :mod:`~aioload.engine.template` says.
"""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, ForkServerProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

_PRELOAD = "aioload.engine.template"

MAIN_VARIABLE = "AIOLOAD_MAIN"
"""In the environment of a server that is started here: what its main module is, if it is to import that."""

_NUM_FILES = 5
"""Those that are opened at a time while a process is started: two pipes, and a socket to the server."""

_NAMES = ("sys_path", "sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")


def new_context(context: Any) -> BaseContext:
    """Return how engine processes are started: as ``multiprocessing_context`` says, or by a server that forks them.

    The server is a process that has done nothing but import, so that each further one takes milliseconds.
    """
    if context is not None and context.get_start_method() != "forkserver":
        return context  # type: ignore[no-any-return]
    chosen = multiprocessing.get_context("forkserver")
    preloaded = getattr(forkserver._forkserver, "_preload_modules", None)  # noqa: SLF001
    if preloaded == ["__main__"]:
        preloaded = ["__main__", _PRELOAD]
        chosen.set_forkserver_preload(preloaded)
    try:
        with contextlib.ExitStack() as stack:
            if preloaded is not None and _PRELOAD in preloaded:  # which sees to the rest
                resource_tracker.ensure_running()  # when that starts, it unblocks what is blocked
                stack.enter_context(_telling_main())
                stack.enter_context(interrupts_blocked())
            forkserver.ensure_running()
    except OSError:  # its socket needs a folder for temporary files, and there is none
        return multiprocessing.get_context("spawn")
    return chosen


def start_server(context: Any) -> None:
    """Have the server that forks processes begin to import things, which takes seconds. Never waits."""
    is_server = context is None or context.get_start_method() == "forkserver"
    if is_server and not multiprocessing.current_process().daemon:
        with contextlib.suppress(RuntimeError):  # the main module is being imported: who wants processes is told
            new_context(None)


def is_up(context: BaseContext) -> bool:
    """Return whether processes are forked off a server that has forked one before, and so is no longer importing."""
    return context.get_start_method() == "forkserver" and _Popen.proven_server == _pid_of_server()


def _pid_of_server() -> int | None:
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001


def new_process(context: BaseContext, **arguments: Any) -> BaseProcess:
    """Return a process to be started; where it is forked off the server, its start does not wait for that.

    ``pid`` then waits for it, and is ``None`` if there is no server any more.
    """
    if context.get_start_method() == "forkserver":
        return _Asked(**arguments)
    process: BaseProcess = context.Process(**arguments)  # type: ignore[attr-defined]
    return process


class _Asked(ForkServerProcess):
    """A process that the server is asked for."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        return _Popen(process)


class _Popen(popen_forkserver.Popen):
    """As multiprocessing's own, which waits for the process: so several would begin one after the other."""

    proven_server: ClassVar[int | None] = -1
    """The number of the server that has forked a process."""

    def __init__(self, process: BaseProcess) -> None:
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._is_told = False
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), buffer)
            reduction.dump(process, buffer)
        finally:
            set_spawning_popen(None)
        self.sentinel, end = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, _close, (os.dup(end), self.sentinel))
        self._server = _pid_of_server()
        with open(end, "wb") as file:
            file.write(buffer.getbuffer())

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        with self._lock:
            if not self._is_told:
                with contextlib.suppress(EOFError):
                    self._pid = forkserver.read_signed(self.sentinel)
                    _Popen.proven_server = self._server
                self._is_told = True
            return self._pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if not self._is_told and (flag != os.WNOHANG or wait([self.sentinel], 0)):
            _ = self.pid  # comes before what it returns
        return super().poll(flag) if self._is_told else None


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Have a process that is started here begin with SIGINT blocked, until it ignores it: that is for this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_room() -> None:
    """Raise OSError if too few files may be opened to start a process: multiprocessing would leave some open then."""
    files: list[int] = []
    try:
        files.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_NUM_FILES))
    finally:
        _close(*files)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


@contextlib.contextmanager
def _telling_main() -> Iterator[None]:
    """Have a server that is started here import the main module, as each process would have to by itself."""
    data = spawn.get_preparation_data("aioload")
    os.environ[MAIN_VARIABLE] = json.dumps({name: data[name] for name in _NAMES if name in data})
    try:
        yield
    finally:
        os.environ.pop(MAIN_VARIABLE, None)
