"""The interpreter's end and Ctrl-C, while samples are loaded: soon, quietly, and with the right exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
from scripts import Nursery, environment

WAYS = {
    "own threads": "num_workers=2",
    "persistent threads": "num_workers=2, persistent_workers=True",
    "no threads": "num_workers=0",
}
every_way = pytest.mark.parametrize("arguments", WAYS.values(), ids=list(WAYS))
with_threads = pytest.mark.parametrize("arguments", [*WAYS.values()][:2], ids=[*WAYS][:2])

HEAD = """
import asyncio, sys, threading, time, warnings
from aioload import DataLoader
from slow import *
"""


@every_way
@pytest.mark.parametrize("dataset", ["Slow", "AsyncSlow"])
def test_an_iterator_that_was_never_finished(nursery: Nursery, dataset: str, arguments: str) -> None:
    nursery.run_quietly(f"{HEAD}batches = iter(DataLoader({dataset}(), {arguments}))\nnext(batches)")


@pytest.mark.parametrize("dataset", ["Stuck", "AsyncStuck"])
@with_threads
def test_a_sample_that_never_comes(nursery: Nursery, dataset: str, arguments: str) -> None:
    nursery.run_quietly(f"{HEAD}batches = iter(DataLoader({dataset}(), {arguments}))\nnext(batches)")


@with_threads
def test_a_sample_that_blocks_the_loop(nursery: Nursery, arguments: str) -> None:
    nursery.run_quietly(f"{HEAD}batches = iter(DataLoader(LoopBlocking(), {arguments}))")


@with_threads
def test_many_iterators_with_samples_that_never_come(nursery: Nursery, arguments: str) -> None:
    script = f"batches = [iter(DataLoader(Stuck(), {arguments})) for _ in range(50)]\nnext(batches[7])"
    nursery.run_quietly(HEAD + script)


@pytest.mark.parametrize("arguments", ["num_workers=1", "num_workers=1, persistent_workers=True"])
def test_the_only_thread_in_the_midst_of_a_batch_ends_after_its_sample(
    nursery: Nursery, arguments: str, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    nursery.run_quietly(
        f"""{HEAD}
class Counted:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        with open({str(loaded)!r}, "ab") as file:
            file.write(b"1")
        begun.set()
        time.sleep(0.01)
        return index

begun = threading.Event()
batches = iter(DataLoader(Counted(), 100, {arguments}))
begun.wait()
"""
    )
    assert 1 <= loaded.stat().st_size < 50


@with_threads
def test_thousands_of_samples_in_the_queue(nursery: Nursery, arguments: str) -> None:
    nursery.run_quietly(f"{HEAD}for batch in DataLoader(Slow(), prefetch_factor=400, {arguments}):\n    break")


@every_way
def test_a_loop_that_raises_while_the_iterator_is_held(nursery: Nursery, arguments: str) -> None:
    script = f"""{HEAD}
batches = iter(DataLoader(Slow(), {arguments}))
for batch in batches:
    raise ZeroDivisionError("the line of the user")
"""
    ended = nursery.run(script)
    assert (ended.code, ended.num_tracebacks) == (1, 1)
    assert '    raise ZeroDivisionError("the line of the user")\n' in ended.err
    assert ended.err.endswith("ZeroDivisionError: the line of the user\n")


@with_threads
def test_samples_that_warn(nursery: Nursery, arguments: str) -> None:
    script = f"""{HEAD}
warnings.simplefilter("always")
for batch in DataLoader(Odd(), {arguments}):
    break
"""
    for _ in range(5):
        ended = nursery.run(script)
        assert (ended.code, ended.num_tracebacks) == (0, 0), ended
        assert "Fatal" not in ended.err


@with_threads
def test_threads_inside_torch_do_not_abort_the_process(nursery: Nursery, arguments: str) -> None:
    for _ in range(3):
        nursery.run_quietly(f"{HEAD}for batch in DataLoader(Computing(), {arguments}):\n    break")


@pytest.mark.parametrize("dataset", ["Slow", "AsyncSlow"])
@with_threads
def test_a_thread_that_loads_on_after_the_main_thread(nursery: Nursery, dataset: str, arguments: str) -> None:
    script = f"""{HEAD}
def load():
    batches = iter(DataLoader({dataset}(), {arguments}, sampler=range(8)))
    next(batches)
    threading.main_thread().join()
    print(1 + len(list(batches)), len(list(DataLoader(range(20), {arguments}))))

threading.Thread(target=load).start()
"""
    assert nursery.run_quietly(script) == "8 20\n"


@with_threads
def test_a_daemon_thread_that_waits_for_a_batch(nursery: Nursery, arguments: str) -> None:
    script = f"""{HEAD}
started = threading.Event()

def load():
    for batch in DataLoader(Slow(), {arguments}):
        started.set()

threading.Thread(target=load, daemon=True).start()
started.wait()
"""
    nursery.run_quietly(script)


@with_threads
def test_a_coroutine_that_waits_for_a_batch(nursery: Nursery, arguments: str) -> None:
    script = f"""{HEAD}
async def load(started):
    async for batch in DataLoader(AsyncSlow(), {arguments}):
        started.set()

async def main():
    started = asyncio.Event()
    loading = asyncio.create_task(load(started))
    await started.wait()

asyncio.run(main())
"""
    nursery.run_quietly(script)


# Ctrl-C.


@every_way
@pytest.mark.parametrize("dataset", ["Interrupting", "AsyncInterrupting"])
def test_an_interrupt_gives_one_traceback_from_the_line_of_the_user(
    nursery: Nursery, dataset: str, arguments: str
) -> None:
    script = f"""{HEAD}
dataset = {dataset}()
batches = iter(DataLoader(dataset, {arguments}))
for batch in batches:
    if batch == 2:
        dataset.consumed.set()
"""
    ended = nursery.run(script)
    assert (ended.code, ended.num_tracebacks) == (-2, 1)
    assert "    for batch in batches:\n" in ended.err
    assert ended.err.endswith("KeyboardInterrupt\n")
    assert "Exception ignored" not in ended.err


@every_way
def test_an_interrupt_of_a_coroutine(nursery: Nursery, arguments: str) -> None:
    script = f"""{HEAD}
async def main():
    dataset = AsyncInterrupting()
    async for batch in DataLoader(dataset, {arguments}):
        if batch == 2:
            dataset.consumed.set()

asyncio.run(main())
"""
    ended = nursery.run(script)
    assert ended.code == -2
    assert "    async for batch in DataLoader" in ended.err
    assert ended.err.endswith("KeyboardInterrupt\n")
    for word in ("never retrieved", "was destroyed", "never awaited", "Exception ignored"):
        assert word not in ended.err


@every_way
@pytest.mark.parametrize("dataset", ["Interrupting", "AsyncInterrupting"])
def test_an_interrupted_loop_can_go_on(nursery: Nursery, dataset: str, arguments: str) -> None:
    script = f"""{HEAD}
dataset = {dataset}()
batches, got = iter(DataLoader(dataset, {arguments}, sampler=range(10))), []
while len(got) < 10:
    try:
        got.append(int(next(batches)))
        if got[-1] == 2:
            dataset.consumed.set()
    except KeyboardInterrupt:
        print("interrupted")
print(got, list(batches))
"""
    assert nursery.run_quietly(script) == f"interrupted\n{list(range(10))} []\n"


# Development mode.


def test_nothing_is_reported_in_development_mode() -> None:
    script = f"""{HEAD}
async def stop_early(loader):
    async for batch in loader:
        break

async def hold(loader):
    batches = aiter(loader)
    await anext(batches)
    return batches

live, held = Live(), []
for loader in live.loaders:
    for batch in loader:
        break
    asyncio.run(stop_early(loader))
    held.append(asyncio.run(hold(loader)))
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script],
        env=environment() | {"PYTHONASYNCIODEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # asyncio reports callbacks that take long, so on a busy machine any.
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("Executing <")]
    assert (ended.returncode, lines) == (0, [])


def test_a_thread_that_waits_for_a_copy(nursery: Nursery) -> None:
    script = f"""{HEAD}
from aioload.testing import SimulatedDevice

def go_on():
    threading.main_thread().join()
    device.run()

device = SimulatedDevice()
batches = iter(DataLoader(range(8), num_workers=2, num_device_batches=1, device=device))
next(batches)
device.wait_waiting()
threading.Thread(target=go_on).start()
"""
    nursery.run_quietly(script)
