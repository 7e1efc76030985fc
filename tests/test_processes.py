"""Engine processes give what threads give: the same batches, errors and random numbers, and end as well."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from abroad import (
    Asynchronous,
    Deadly,
    Drawing,
    Epochs,
    FieldsError,
    Large,
    Many,
    Points,
    Scheduled,
    Seeded,
    Shared,
    Spare,
    Stream,
    Stuck,
    Unwelcome,
    deadly_collate,
    deadly_decode,
    deadly_late,
    files_in,
    instead,
    little_memory,
    note_worker,
    ragged,
    refuse,
    stacked,
    unsendable,
)
from oracle import assert_same, by_async_for, outcomes, torch_outcomes
from scripts import Nursery, environment

import aioload
from aioload import DataLoader, error_context
from aioload.engine.gang import Gang
from aioload.engine.roster import Roster
from aioload.errors import ArgumentError, LoaderTimeoutError, ProcessDiedError, TransferError
from aioload.slot import SlotState
from aioload.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("forks_are_served", "no_process_is_left")


def loader_of(dataset: Any, batch_size: int | None = 4, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, **{"processes": 2, "num_workers": 2, **arguments})


def until_error(batches: Iterator[Any]) -> tuple[list[Any], BaseException | None]:
    """Return the batches that came before an error, and that error."""
    got: list[Any] = []
    try:
        got.extend(batches)
    except Exception as exc:
        return got, exc
    return got, None


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until no such process is there, for ten seconds at most."""
    deadline = time.monotonic() + 10
    left = set(pids)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        time.sleep(0.01)  # they are nobody's children here, whom to wait for
    assert not left


def gang_of(loader: DataLoader[Any]) -> Gang:
    """Return the processes of a loader with persistent workers."""
    gang = loader._runtime()._kept.crew
    assert isinstance(gang, Gang)
    return gang


def wait_until_ended(roster: Roster) -> None:
    """Wait until all processes of a roster have ended."""
    for member in roster.members:
        member.process.join()


@pytest.mark.parametrize("collate_fn", [None, ragged], ids=["rows", "pieces"])
def test_batches_are_torchs(collate_fn: Any) -> None:
    dataset = Points(30)
    with loader_of(dataset, collate_fn=collate_fn) as loader:
        got = outcomes(iter(loader))
    assert_same(got, torch_outcomes(dataset, batch_size=4, collate_fn=collate_fn))
    if collate_fn is not None:
        assert got[0]["turned"].stride() == (1, 3)
        assert got[0]["arrays"].flags.writeable


def test_tensors_with_strides_that_say_nothing_are_sent() -> None:
    with DataLoader(Spare(), batch_size=None, processes=1) as loader:
        assert_same(list(loader), torch_outcomes(Spare(), batch_size=None))


@pytest.mark.parametrize("arguments", [{"persistent_workers": True}, {"iterable_workers": 3, "prefetch_factor": 8}])
@pytest.mark.parametrize("processes", [1, 2])
def test_all_has_been_counted_when_a_pass_is_over(processes: int, arguments: dict[str, Any]) -> None:
    is_iterable = "iterable_workers" in arguments
    dataset: Any = Stream() if is_iterable else Points(22)
    with DataLoader(dataset, 4, num_workers=3, processes=processes, **arguments) as loader:
        for epoch in range(1, 11):
            assert sum(map(len, loader if is_iterable else (batch.label for batch in loader))) == 22
            num_samples = loader.stats().samples
            assert num_samples >= 22 * epoch
            assert num_samples == 22 * epoch or not is_iterable  # else the next pass may have begun


def test_files_and_their_errors(tmp_path: Path) -> None:
    dataset = files_in(tmp_path, 26, missing=9)
    with loader_of(dataset) as loader:
        got = outcomes(iter(loader))
        assert loader.stats().samples == 22
        assert 66 <= loader.stats().bytes_read <= 75  # a batch that has failed need not be loaded to its end
    expected = torch_outcomes(dataset, batch_size=4)
    assert_same(got, expected)
    error, path = got[2], dataset.paths[9]
    assert isinstance(error, FileNotFoundError)
    assert error.filename == path
    context = error_context(error)
    assert context is not None
    assert (context.index, context.location, context.stage) == (9, path, "read")
    assert any("stage 'read', index 9" in note for note in error.__notes__)


def test_errors_have_their_fields_and_the_traceback() -> None:
    with loader_of(Points(12, bad=(5,))) as loader:
        _, error, third = outcomes(iter(loader))
    assert third.label.tolist() == [8, 9, 10, 11]
    assert type(error) is FieldsError
    assert (error.code, error.where, str(error)) == (5, "here", "code 5 at here")
    notes = "\n".join(error.__notes__)
    assert 'raise FieldsError(index, where="here")' in notes
    assert f"in process {os.getpid()}" not in notes


@pytest.mark.parametrize("persistent", [False, True])
def test_random_numbers_do_not_depend_on_processes(persistent: bool) -> None:
    arguments: dict[str, Any] = {"batch_size": 5, "seed": 3, "shuffle": True}
    with DataLoader(Drawing(), num_workers=2, **arguments) as threads:
        expected = [outcomes(iter(threads)) for _ in range(2)]
    with DataLoader(Drawing(), processes=2, num_workers=3, persistent_workers=persistent, **arguments) as loader:
        got = [outcomes(iter(loader)) for _ in range(2)]
    for ours, theirs in zip(got, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one["drawn"], other["drawn"])
    pids = {int(pid) for epoch in got for batch in epoch for pid in batch["pid"]}
    assert len(pids) == (2 if persistent else 4)
    assert os.getpid() not in pids
    pairs = [torch.stack(batch["worker"], 1).tolist() for epoch in got for batch in epoch]
    workers = {tuple(pair) for batch in pairs for pair in batch}
    assert workers <= {(0, 0), (1, 0), (2, 1)}
    assert {process for _, process in workers} == {0, 1}


def test_async_samples() -> None:
    with loader_of(Asynchronous()) as loader:
        assert_same(
            outcomes(iter(loader)), [torch.full((4, 3), 0) + torch.arange(n, n + 4)[:, None] for n in range(0, 20, 4)]
        )


def test_a_batch_is_not_written_to_while_it_is_seen() -> None:
    with loader_of(Points(400), persistent_workers=True) as loader:
        held = []
        for number, batch in enumerate(loader):
            if number % 9 == 0:
                held.append((number, batch.image))
            elif number % 9 == 1:
                held.append((number, batch.image.numpy()[1:]))
        for number, image in held:
            first = number * 4 if len(image) == 4 else number * 4 + 1
            assert image[:, 0, 0].tolist() == [*range(first, number * 4 + 4)]
        num_slots = sum(len(member.slots) for member in gang_of(loader).members)
        del batch, image, held
        for _ in loader:
            pass
        assert sum(len(member.slots) for member in gang_of(loader).members) <= num_slots + 2


def test_a_pass_that_is_dropped_ends_its_processes() -> None:
    loader = loader_of(Points(4000))
    batches = iter(loader)
    next(batches)
    next(batches)  # of the other process
    assert len(multiprocessing.active_children()) == 2
    del batches


def test_what_was_loaded_for_a_pass_that_is_dropped_is_used_again() -> None:
    with loader_of(Points(400), persistent_workers=True, prefetch_factor=4) as loader:
        for _ in range(6):
            for number, _batch in enumerate(loader):
                if number == 3:
                    break
        assert len(list(loader)) == 100
        for _batch in loader:
            pass
        gang = gang_of(loader)
        assert sum(len(member.slots) for member in gang.members) <= 100 + 6 * 8
        free = [slot.state is SlotState.FREE for member in gang.members for slot in member.slots.values()]
        assert free.count(False) <= 1 + 8  # _batch, and those of the pass that is begun ahead


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("killed", r"was killed by signal 9 \(SIGKILL\)"),
        ("segfault", r"was killed by signal 11 \(SIGSEGV\)"),
        ("exit", "ended with exit code 3"),
    ],
)
def test_a_process_that_dies_is_an_error_that_says_how_and_on_which_sample(way: str, how: str) -> None:
    with loader_of(Deadly(21, way)) as loader:
        got, error = until_error(iter(loader))
    assert type(error) is ProcessDiedError
    assert re.search(rf"Engine process 1 \(pid \d+\) {how}\. It was loading index 21\.", str(error))
    context = error_context(error)
    assert context is not None
    assert context.index == [21]
    assert [batch.tolist() for batch in got] == [list(range(n, n + 4)) for n in range(0, 4 * len(got), 4)]
    assert len(got) <= 5


def test_a_process_that_dies_when_all_samples_are_there_names_those_it_has_not_handed_over() -> None:
    with loader_of(Deadly(-1, "killed"), 6, processes=1, num_workers=1, collate_fn=deadly_collate) as loader:
        got, error = until_error(iter(loader))
    assert got == [list(range(6)), list(range(6, 12))]
    assert type(error) is ProcessDiedError
    names = "index 12, index 13, index 14, index 15 and 2 more"
    assert str(error).endswith(f" (SIGKILL). It had still to hand over a batch: {names}.")
    context = error_context(error)
    assert context is not None
    assert context.index == list(range(12, 18))


def test_a_process_that_dies_decoding_names_that_sample_first(tmp_path: Path) -> None:
    dataset = files_in(tmp_path, 40, deadly_decode)
    with loader_of(dataset, num_concurrent_reads=8, worker_init_fn=note_worker) as loader:  # not on threads that read
        _, error = until_error(iter(loader))
    context = None if error is None else error_context(error)
    assert context is not None
    assert context.index[0] == 9
    assert f"It was loading index 9 ({dataset.paths[9]!r})" in str(error)


def test_of_files_that_are_decoded_together_the_one_it_was_on_is_named_first(tmp_path: Path) -> None:
    dataset = files_in(tmp_path, 240, deadly_late)
    with loader_of(dataset, 24, processes=1, num_workers=1, num_concurrent_reads=1) as loader:
        _, error = until_error(iter(loader))
    context = None if error is None else error_context(error)
    assert context is not None
    assert context.index[0] == 202


def test_persistent_processes_are_replaced_when_one_was_killed() -> None:
    with loader_of(Points(40), persistent_workers=True) as loader:
        list(loader)
        os.kill(gang_of(loader).members[0].process.pid, signal.SIGKILL)
        gang_of(loader)._thread.join(10)
        assert_same(list(loader), torch_outcomes(Points(40), batch_size=4))


def test_what_cannot_be_pickled_is_named() -> None:
    with loader_of(Points(8), collate_fn=unsendable) as loader:
        first, second = outcomes(iter(loader))
    assert isinstance(first, TransferError)
    assert isinstance(second, TransferError)
    dataset = Points(8)
    dataset.handles = {"lock": [threading.Lock()]}  # type: ignore[attr-defined]
    with loader_of(dataset) as loader, pytest.raises(TransferError, match=r"dataset\.handles\['lock'\]\[0\] cannot"):
        iter(loader)
    loader = loader_of(Points(8), collate_fn=lambda samples: samples)
    with loader, pytest.raises(TransferError, match=r"^collate_fn cannot be given"):
        iter(loader)


def test_processes_do_not_interrupt_who_is_at_work() -> None:
    before = os.sched_getscheduler(0)
    with loader_of(Scheduled()) as loader:
        assert [batch.tolist() for batch in loader] == [[os.SCHED_BATCH] * 4] * 2
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("collate_fn", [None, stacked])
def test_where_there_is_no_memory_to_share_each_batch_says_so(collate_fn: Any) -> None:
    with loader_of(
        Large(), 2, processes=1, num_workers=1, worker_init_fn=little_memory, collate_fn=collate_fn
    ) as loader:
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(OSError, match="File too large") as caught:
                next(batches)
            context = error_context(caught.value)
            assert context is not None
            assert context.stage == "collate"


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_cannot_be_unpacked_is_an_error(has_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_ended:  # with all it was asked for unread, before what it said is taken in
        monkeypatch.setattr(Roster, "await_start", wait_until_ended)
    message = "could not be unpacked.*modules that can be imported.*'fork'"
    with loader_of(Unwelcome(8)) as loader, pytest.raises(TransferError, match=message) as caught:
        next(iter(loader))
    assert isinstance(caught.value.__cause__, FieldsError)


def test_daemonic_processes_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with loader_of(Points(8)) as loader, pytest.raises(ArgumentError, match="daemonic"):
        iter(loader)


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="processes=2 needs num_workers > 0"):
        loader_of(Points(8), num_workers=0)
    with pytest.raises(ArgumentError, match="processes"):
        loader_of(Points(8), processes=-1)
    with pytest.raises(ArgumentError, match=r"processes=2 needs a num_workers of at least as many, .* not 1"):
        loader_of(Points(8), num_workers=1)
    with DataLoader(Points(8), processes=99) as loader:
        assert loader.num_workers == 99
    with loader_of(Stream(), num_workers=1) as loader:  # which is for one of them
        assert torch.cat(list(loader)).tolist() == list(range(22))


@pytest.mark.parametrize("processes", [1, 2])
def test_what_has_been_read_is_counted_when_the_last_batch_is_there(tmp_path: Path, processes: int) -> None:
    dataset = files_in(tmp_path, 200)
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    with loader_of(dataset, 8, processes=processes, num_workers=2) as loader:
        for epoch in range(1, 4):
            assert len(list(loader)) == 25
            assert (loader.stats().bytes_read, loader.stats().samples) == (epoch * num_bytes, epoch * 200)


def test_set_epoch_reaches_processes_that_persist() -> None:
    with loader_of(Epochs(), persistent_workers=True, in_order=True) as loader:
        gangs = set()
        for epoch in (0, 3, 3, 5):
            loader.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == [[epoch] * 4] * 2
            gangs.add(gang_of(loader))
        assert len(gangs) == 1
        loader.dataset.epoch = 8  # type: ignore[attr-defined]
        assert [batch.tolist() for batch in loader] == [[8] * 4] * 2
        assert gang_of(loader) not in gangs


def test_a_pass_is_resumed() -> None:
    arguments: dict[str, Any] = {"shuffle": True, "seed": 5}
    with loader_of(Points(40), **arguments) as loader:
        whole = list(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    with loader_of(Points(40), **arguments) as loader:
        loader.load_state_dict(state)
        assert_same(list(loader), whole[3:])


@pytest.mark.parametrize("on_error", ["skip", "replace", instead])
def test_samples_that_fail_are_dealt_with(on_error: Any) -> None:
    arguments: dict[str, Any] = {"on_error": on_error, "max_errors": 6}
    dataset = Points(24, bad=(1, 8, 9, 10, 11, 23))
    with DataLoader(dataset, 4, num_workers=2, **arguments) as loader:
        expected, records = list(loader), loader.errors()
    with loader_of(dataset, **arguments) as loader:
        assert_same(list(loader), expected)
        assert loader.stats().errors == 6
        for ours, theirs in zip(loader.errors(), records, strict=True):
            assert ours[:3] == theirs[:3]
            assert (type(ours.error), str(ours.error)) == (type(theirs.error), str(theirs.error))


def test_an_iterable_dataset_is_passed_over_once() -> None:
    with loader_of(Stream(), num_workers=3) as loader:
        assert [batch.tolist() for batch in loader] == [list(range(n, min(n + 4, 22))) for n in range(0, 22, 4)]
    with loader_of(Stream(), num_workers=3, iterable_workers=2) as loader:
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(22))


def test_async_for() -> None:
    with loader_of(Points(22)) as loader:
        assert_same(by_async_for(loader), torch_outcomes(Points(22), batch_size=4))


def test_two_passes_at_once() -> None:
    with loader_of(Points(24), persistent_workers=True) as loader:
        pairs = list(zip(loader, loader, strict=True))
    assert_same([one for one, _ in pairs], torch_outcomes(Points(24), batch_size=4))
    assert_same([other for _, other in pairs], [one for one, _ in pairs])


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": torch.utils.data.TensorDataset(torch.arange(22), torch.rand(22, 3))},
        {"dataset": Many(22)},
        {"dataset": Points(6), "batch_size": None},
        {"dataset": Points(6), "batch_size": None, "processes": 1, "num_concurrent_reads": 2},
        {"dataset": Points(0)},
        {"dataset": list(range(22)), "prefetch_bytes": 100, "drop_last": True},
    ],
    ids=["tensors", "many", "samples", "one process", "nothing", "few bytes"],
)
def test_all_kinds_of_datasets(arguments: dict[str, Any]) -> None:
    theirs = {name: arguments[name] for name in ("batch_size", "drop_last") if name in arguments}
    with loader_of(**arguments) as loader:
        got = outcomes(iter(loader))
    assert_same(got, torch_outcomes(arguments["dataset"], **{"batch_size": 4, **theirs}))


def test_batches_go_on_to_a_device() -> None:
    device = SimulatedDevice()
    for collate_fn, name in ((None, "image"), (ragged, "turned")):
        readings = []
        with loader_of(Points(24), device=device, collate_fn=collate_fn) as loader:
            for batch in loader:
                readings.append(device.read(getattr(batch, name) if collate_fn is None else batch[name]))
                del batch
                device.run()
        for reading, batch in zip(
            readings, torch_outcomes(Points(24), batch_size=4, collate_fn=collate_fn), strict=True
        ):
            assert_same(reading.value, getattr(batch, name) if collate_fn is None else batch[name])


def test_a_batch_that_takes_too_long() -> None:
    with loader_of(Stuck(9), timeout=0.5) as loader:
        got, error = until_error(iter(loader))
    assert [batch.tolist() for batch in got] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert type(error) is LoaderTimeoutError
    assert "index 9" in str(error)


def test_persistent_processes_end_with_their_loader() -> None:
    loader = loader_of(Points(8), persistent_workers=True)
    list(loader)
    assert len(multiprocessing.active_children()) == 2
    del loader


@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_other_ways_to_start_them(way: str) -> None:
    with loader_of(Points(12), multiprocessing_context=way, processes=1) as loader:
        assert_same(list(loader), torch_outcomes(Points(12), batch_size=4))


def test_worker_init_fn_is_called_for_each_worker_and_what_it_raises_is_raised() -> None:
    with loader_of(Seeded(), 1, num_workers=3, worker_init_fn=note_worker) as loader:
        assert {int(batch) for batch in loader} <= {0, 1, 2}
    with loader_of(Seeded(), worker_init_fn=refuse) as loader, pytest.raises(FieldsError, match="code 1 at beginning"):
        next(iter(loader))


def test_locks_and_values_are_shared_with_the_processes() -> None:
    dataset = Shared()
    with loader_of(dataset) as loader:
        for _ in range(2):  # then the server has shown that it forks, and is asked before the dataset is pickled
            assert_same(outcomes(iter(loader)), torch_outcomes(list(range(24)), batch_size=4))
    assert dataset.count.value == 48


def test_any_order() -> None:
    with loader_of(Points(30), in_order=False) as loader:
        batches = sorted((batch.label.tolist() for batch in loader), key=lambda labels: labels[0])
    assert batches == [list(range(n, min(n + 4, 30))) for n in range(0, 30, 4)]


def test_two_loaders_at_once() -> None:
    with loader_of(Points(24)) as one, loader_of(Many(24), shuffle=True, seed=4) as other:
        pairs = list(zip(one, other, strict=True))
    assert_same([mine for mine, _ in pairs], torch_outcomes(Points(24), batch_size=4))
    assert sorted(-int(number) for _, batch in pairs for number in batch) == list(range(24))


@pytest.mark.parametrize("num_large", [2, 40])
def test_bytes_in_flight_are_bounded_over_all_processes(num_large: int) -> None:
    with loader_of(Large(), 2, prefetch_bytes=num_large << 20, prefetch_factor=8) as loader:
        for number, batch in enumerate(loader):
            assert batch[:, -1].tolist() == [2 * number, 2 * number + 1]
        # Each process lets the batch go on that is needed next.
        assert 2 << 20 <= loader.stats().peak_bytes_in_flight <= max(num_large, 2 * 3) << 20


@pytest.mark.parametrize("persistent", [False, True])
def test_the_peak_of_bytes_in_flight_is_that_of_all_passes(persistent: bool) -> None:
    peaks = []
    with loader_of(Large(), 2, prefetch_bytes=8 << 20, persistent_workers=persistent) as loader:
        for _ in range(2):
            assert sum(map(len, loader)) == len(Large())
            peaks.append(loader.stats().peak_bytes_in_flight)
    assert 2 << 20 <= peaks[0] <= peaks[1] <= 8 << 20
    assert loader.stats().peak_bytes_in_flight >= peaks[1]


def test_a_process_that_waits_to_be_heard_hears_what_it_has_to() -> None:
    """Hundreds of batches that are made as soon as they are asked for, while nobody waits for the first."""
    dataset = torch.utils.data.TensorDataset(torch.arange(900))
    with loader_of(dataset, 1, processes=1, num_workers=1, prefetch_factor=700, timeout=30) as loader:
        assert [int(batch) for (batch,) in loader] == list(range(900))


def test_texts_that_fill_the_sockets() -> None:
    texts = [f"{number} " * 40_000 for number in range(40)]
    with loader_of(texts, 1, processes=1, prefetch_factor=20) as loader:
        assert [batch for (batch,) in loader] == texts


HEAD = """
import multiprocessing, os, signal, time
os.setpgid(0, 0)  # the processes will be of the group that one Ctrl-C is for
from abroad import Points
from aioload import DataLoader
loader = DataLoader(Points(4000), 4, processes=2, num_workers=2, multiprocessing_context=WAY)
batches = iter(loader)
next(batches), next(batches)  # one of each
for process in multiprocessing.active_children():
    print(process.pid, flush=True)
"""


def test_the_interpreter_ends_quietly_beside_processes(nursery: Nursery) -> None:
    pids = nursery.run_quietly(HEAD.replace("WAY", "'fork'"))
    assert len(pids.split()) == 2
    wait_until_gone(map(int, pids.split()))


def test_an_interrupt_is_for_the_consumer_and_nothing_outlives_it(nursery: Nursery) -> None:
    before = set(os.listdir("/dev/shm"))
    end = """
try:
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print(sum(1 for _ in batches), flush=True)
batches = iter(loader)
next(batches), next(batches)  # one of each
for process in multiprocessing.active_children():
    print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = nursery.run(HEAD.replace("WAY", "None") + end)
    *pids, num_batches, first, second = map(int, ended.out.split())
    assert (ended.code, ended.err, num_batches) == (-signal.SIGKILL, "", 998)
    wait_until_gone([*pids, first, second])
    assert set(os.listdir("/dev/shm")) <= before


def test_an_interrupt_is_not_for_a_process_that_has_just_been_forked(nursery: Nursery) -> None:
    script = """
    import os, signal, threading
    from multiprocessing import forkserver
    from abroad import Points
    from aioload import DataLoader
    loader = DataLoader(Points(40), 4, processes=2, num_workers=2)
    list(loader)  # by now there is a server
    server, pids = forkserver._forkserver._forkserver_pid, set()

    def interrupt():
        while len(pids) < 20:
            for pid in open(f"/proc/{server}/task/{server}/children").read().split():
                if pid not in pids:
                    pids.add(pid)
                    os.kill(int(pid), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    print(sum(len(list(loader)) for _ in range(10)))
    thread.join()
    """
    assert nursery.run_quietly(script) == "100\n"


def test_an_interrupt_comes_through_to_the_processes_of_others(nursery: Nursery) -> None:
    script = """
    import multiprocessing
    from abroad import Points, fork_with_interrupts
    from aioload import DataLoader
    list(DataLoader(Points(40), 4, processes=2, num_workers=2))
    process = multiprocessing.get_context("forkserver").Process(target=fork_with_interrupts)
    process.start()
    process.join()
    """
    assert nursery.run_quietly(script) == "[True, True]\n"


def test_nothing_outlives_a_consumer_that_was_killed_while_a_process_keeps_its_interpreter(nursery: Nursery) -> None:
    ended = nursery.run("""
    import multiprocessing, os, signal, time
    from abroad import Hog
    from aioload import DataLoader
    batches = iter(DataLoader(Hog(), 4, processes=1, num_workers=1, multiprocessing_context='fork'))
    next(batches)
    pid = multiprocessing.active_children()[0].pid
    print(pid, flush=True)
    clock = os.sysconf("SC_CLK_TCK")
    while int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11]) < clock // 4:  # it is at it
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert ended.code == -signal.SIGKILL
    wait_until_gone([int(ended.out)])


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_script_that_would_run_again_is_told_so(start_method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    arguments = f"processes=1, num_workers=1, multiprocessing_context={start_method!r}"
    script.write_text(f"import aioload\nnext(iter(aioload.DataLoader([0, 1], 2, {arguments})))\n")
    environment = os.environ | {"PYTHONPATH": str(Path(aioload.__file__).parent.parent)}
    ended = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == 1
    *_, in_process, last = [line for line in ended.stderr.splitlines() if "Error: " in line]
    assert "ArgumentError: processes= is for the script itself" in in_process
    assert ended.stderr.endswith(f"{last}\n")
    assert "ProcessDiedError: Engine process 0" in last
    assert "as it began" in last
    assert "if __name__ == '__main__':" in last


@pytest.mark.parametrize("has_thread", [False, True])
def test_the_main_module_is_imported_once_for_all_processes(has_thread: bool, tmp_path: Path, nursery: Nursery) -> None:
    """Unless it leaves a thread behind, beside which nothing should be forked."""
    main = tmp_path / "main.py"
    # They are ours as well, and the first to be imported in the server that processes are forked off.
    lines = ["from aioload import DataLoader", "from aioload.engine.gang import Gang", "import os"]
    lines += ["os.write(1, (__name__ + chr(10)).encode())"]  # in one piece: another process may be at it as well
    if has_thread:
        lines += ["import threading", "threading.Thread(target=threading.Event().wait, daemon=True).start()"]
    else:  # an interrupt at that time is for the consumer as well, and not for the server
        lines += ["import signal", "os.kill(os.getpid(), signal.SIGINT)"]
    main.write_text("\n".join(lines))
    script = f"""
    import __main__
    from abroad import Points
    from aioload import DataLoader
    __main__.__file__ = {str(main)!r}
    print([sum(1 for _ in DataLoader(Points(8), 2, processes=2, num_workers=2)) for _ in range(2)])
    """
    imports = 1 if not has_thread else 1 + 2 * 2
    assert nursery.run_quietly(script) == "__mp_main__\n" * imports + "[4, 4]\n"


def test_a_fork_of_the_consumer_may_end_as_it_likes(nursery: Nursery) -> None:
    script = """
    import os, sys
    from abroad import Points
    from aioload import DataLoader
    from aioload.errors import ForkedIteratorError
    arguments = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(Points(40), 4, processes=2, num_workers=2, **arguments)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except ForkedIteratorError:
            print("refused", flush=True)
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    print(sum(1 for _ in batches), sum(1 for _ in loader))
    """
    assert nursery.run_quietly(script).split() == ["refused", "7", "9", "10"]


def test_dev_shm_is_not_needed() -> None:
    """Batches of 128 MB in all, and a dataset that holds a tensor."""
    script = """
import torch
from aioload import DataLoader
dataset = torch.utils.data.TensorDataset(torch.arange(8.0).repeat(1 << 22, 1).t().contiguous())
held = [batch for batch, in DataLoader(dataset, 2, processes=1, num_workers=2)]
print([batch[:, -1].tolist() for batch in held])
"""
    mount = "mount -t tmpfs -o ro tmpfs /dev/shm"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=60)
    assert (ended.stdout, ended.stderr) == ("[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]\n", "")


def test_no_folder_for_temporary_files_is_needed(nursery: Nursery) -> None:
    script = """
    import tempfile
    tempfile.tempdir = "/nowhere"
    from abroad import Points
    from aioload import DataLoader
    print(sum(1 for _ in DataLoader(Points(40), 4, processes=1, num_workers=2)))
    """
    assert nursery.run_quietly(script) == "10\n"
