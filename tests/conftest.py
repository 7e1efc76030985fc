"""What every test is held to: it leaves no thread, task, open file or slot behind."""

import asyncio
import gc
import importlib.util
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Nursery

sys.path.append(str(Path(__file__).parents[1]))  # for a checkout of which nothing is installed

from aioload.arguments import usable_cores
from aioload.engine.server import new_context
from aioload.slot import Slot, SlotState

THREAD_GRACE_S = 10.0
"""A thread ends after the job it is on, and tests open their gates before they end."""

# A shell that starts us in the background has interrupts ignored, and Python then installs no handler for them.
signal.signal(signal.SIGINT, signal.default_int_handler)

NEEDS = {
    "test_readers_of_urls.py": ("aiohttp", "flask", "flask_cors", "fsspec", "moto", "obstore"),
    "test_resume_beside_torchdata.py": ("torchdata",),
}
"""What tests import that those of a device, which are to run on whatever machine has one, can do without."""

missing = {file: [name for name in names if importlib.util.find_spec(name) is None] for file, names in NEEDS.items()}
collect_ignore = [file for file, names in missing.items() if names]

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # on a busy machine an example may take any time
    settings.load_profile("untimed")

if torch.cuda.is_available():
    # The driver opens files for good: on first use, and the tests are not to be blamed for that.
    torch.empty(1, pin_memory=True).to("cuda", non_blocking=True)
    torch.cuda.synchronize()

_FAILED = pytest.StashKey[bool]()
_of_failed_tests: list[Any] = []

_OF_DRIVER = ("/dev/nvidia", "anon_inode:[eventfd]")
"""Files that the driver opens as it needs them, such as for more memory; nothing of ours has any like these."""

_FREEZE_EVERY = 50
_num_passed = itertools.count(1)


def loader_threads() -> set[threading.Thread]:
    """Return the threads of all loaders."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("aioload-")}


def join_all(threads: set[threading.Thread]) -> set[threading.Thread]:
    """Wait for threads to end and return those that did not."""
    deadline = time.monotonic() + THREAD_GRACE_S
    for thread in threads:
        while time.monotonic() < deadline:
            try:
                thread.join(max(0.0, deadline - time.monotonic()))
            except RuntimeError:  # it is listed, and yet to begin
                time.sleep(0.001)
            else:
                break
    return {thread for thread in threads if thread.is_alive()}


def living(*kinds: type[Any]) -> list[Any]:
    """Return the objects of these kinds that are there after a collection."""
    gc.collect()
    return _there_are(*kinds)


def _there_are(*kinds: type[Any]) -> list[Any]:
    # Not isinstance: it asks the object for its class, and some of torch's answer with a warning.
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}  # mostly none, of some hundreds
    return [each for each in objects if type(each) in wanted] if wanted else []


def slots_in_use() -> list[Slot]:
    """Return the slots, of all rings, that are neither free nor dropped, after a collection."""
    return [slot for slot in living(Slot) if _in_use(slot)]


def _in_use(slot: Slot) -> bool:
    if slot.state is SlotState.LENT:  # it stays so until the ring looks, also when no view is left
        return slot.watch is not None and slot.watch() is not None
    return slot.state in (SlotState.FILLING, SlotState.READY)


def _left_over() -> list[Any]:
    def left_among(objects: list[Any]) -> list[Any]:
        return [each for each in objects if (_in_use(each) if isinstance(each, Slot) else not each.done())]

    # A collection takes 10 to 20 ms, and is seldom needed: there was one when the test had ended.
    return left_among(_there_are(Slot, asyncio.Task)) and left_among(living(Slot, asyncio.Task))


def _open_files() -> dict[str, str]:
    files = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            files[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return files
    return {number: name for number, name in files.items() if not name.startswith(_OF_DRIVER)}


def _files_left(num_before: int) -> dict[str, str]:
    """Return the open files; where they are more, when the threads that close connections have had their time."""
    deadline = time.monotonic() + THREAD_GRACE_S
    while len(files := _open_files()) > num_before and time.monotonic() < deadline:
        time.sleep(0.01)  # threads that are not Python's, and tell nobody
        gc.collect()  # what a thread that has ended meanwhile still held
    return files


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("asyncio"):  # which the tests of a device can do without
        for name in ("asyncio_mode", "asyncio_debug", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "of pytest-asyncio, which is not installed")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Have one more test at a time than there are cores, for ``-n auto``: many wait for processes to be there."""
    return usable_cores() + 1


def pytest_report_header() -> list[str]:
    return [f"{file} is left out for want of {', '.join(names)}" for file, names in missing.items() if names]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was there before the first test is not looked through for each


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Give what runs scripts in processes of their own."""
    nursery = Nursery(tmp_path_factory.mktemp("scripts"))
    yield nursery
    nursery.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session")
def forks_are_served() -> None:
    """Start what multiprocessing keeps for the life of this process, files included."""
    context = new_context(None)
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    multiprocessing.Value("i")
    # The server takes seconds to import torch, which no test with a time-out should have to wait for.
    process = context.Process(target=os.getpid)  # type: ignore[attr-defined]
    process.start()
    process.join()
    process.close()


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Fail a test that leaves an engine process behind."""
    yield
    gc.collect()
    join_all(loader_threads())  # those that see processes end
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind."""
    threads, files = loader_threads(), _open_files()
    yield
    if request.node.stash.get(_FAILED, False):
        _of_failed_tests.extend(_left_over())  # its traceback holds what it worked with
        return
    gc.collect()
    left_threads = join_all(loader_threads() - threads)
    assert not left_threads, f"threads left behind: {left_threads}"
    left = [each for each in _left_over() if each not in _of_failed_tests]
    if left:
        _of_failed_tests.extend(left)
    assert not left, f"left behind: {left}"
    left_files = _files_left(len(files))
    assert len(left_files) <= len(files), f"files left open: {set(left_files.items()) - set(files.items())}"
    if next(_num_passed) % _FREEZE_EVERY == 0:
        gc.freeze()  # what has come to stay, reports and modules, is not looked through for each of the next ones
