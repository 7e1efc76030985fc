"""Forks in the middle of passes: the parent goes on, and the child begins anew or ends quietly."""

import pytest
from scripts import Nursery

HEAD = """
import asyncio, gc, multiprocessing, os, sys, warnings
from aioload.errors import ForkedIteratorError
from slow import Live

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
live = Live()
"""


def test_a_fork_that_only_ends(nursery: Nursery) -> None:
    script = f"""{HEAD}
pid = os.fork()
if pid == 0:
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
live.go_on()
live.load_all()
"""
    nursery.run_quietly(script)


def test_a_fork_that_lets_go_of_what_it_inherited(nursery: Nursery) -> None:
    script = f"""{HEAD}
pid = os.fork()
if pid == 0:
    for each in (*live.iterators, *live.loaders):
        if hasattr(each, "close"):
            each.close()
    del each, live
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
live.go_on()
live.load_all()
"""
    nursery.run_quietly(script)


def test_a_fork_closes_the_loop_that_it_inherited_and_does_not_run_it(nursery: Nursery) -> None:
    """Else it is for the garbage collector, which may not be able to."""
    script = f"""{HEAD}
from aioload import DataLoader

class Looping:
    def __len__(self):
        return 4

    async def __getitem__(self, index):
        self.loop = asyncio.get_running_loop()
        if index == 0:
            self.task = asyncio.create_task(asyncio.sleep(60))
        return index

dataset = Looping()
loader = DataLoader(dataset, num_workers=0)
batches = iter(loader)
assert int(next(batches)) == 0
pid = os.fork()
if pid == 0:
    del batches, loader
    assert dataset.loop.is_closed()
    assert not dataset.task.cancelling()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert [int(batch) for batch in batches] == [1, 2, 3]
loader.close()
"""
    nursery.run_quietly(script)


@pytest.mark.parametrize("how", ["for", "async for"])
def test_forks_that_load(nursery: Nursery, how: str) -> None:
    script = f"""{HEAD}
async def load_all():
    for loader in live.loaders:
        assert [int(batch) async for batch in loader] == list(range(20))

def load():
    if {how!r} == "for":
        live.load_all()
    else:
        asyncio.run(load_all())

processes = [multiprocessing.get_context("fork").Process(target=load) for _ in range(2)]
for process in processes:
    process.start()
live.go_on()
live.load_all()
for process in processes:
    process.join()
    assert process.exitcode == 0
"""
    nursery.run_quietly(script)


def test_iterators_of_the_parent_are_refused_in_a_fork(nursery: Nursery) -> None:
    script = f"""{HEAD}
async def drain(batches):
    return [int(batch) async for batch in batches]

not_started = [aiter(loader) for loader in live.loaders if loader.num_workers]

def use(batches):
    if hasattr(batches, "__anext__"):
        asyncio.run(drain(batches))
    else:
        next(batches)

def use_all():
    refused = 0
    for batches in (*live.iterators, *not_started):
        try:
            use(batches)
        except ForkedIteratorError as exc:
            assert "before a fork" in str(exc) and "iter(loader)" in str(exc)
            refused += 1
    assert refused == 16, refused  # those without threads have nothing that a fork lacks

process = multiprocessing.get_context("fork").Process(target=use_all)
process.start()
process.join()
assert process.exitcode == 0
for batches in not_started:
    assert asyncio.run(drain(batches)) == list(range(20))
live.go_on()
"""
    nursery.run_quietly(script)


def test_a_fork_while_another_thread_begins_its_workers(nursery: Nursery) -> None:
    script = """
import os, threading, time, warnings
from aioload import DataLoader

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
begun, go_on = threading.Event(), threading.Event()

def begin(_):
    begun.set()
    go_on.wait(60)

def load(worker_init_fn):
    loader = DataLoader(range(20), num_workers=2, worker_init_fn=worker_init_fn)
    assert [int(batch) for batch in loader] == list(range(20))

thread = threading.Thread(target=load, args=(begin,))
thread.start()
begun.wait(60)
pid = os.fork()
if pid == 0:
    load(lambda _: None)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
go_on.set()
thread.join()
"""
    nursery.run_quietly(script)
