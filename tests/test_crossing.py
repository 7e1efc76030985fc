"""Crossing: few batches are on the device ahead of the consumer, few copies under way, and errors where they belong."""

import asyncio
import gc
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import by_async_for, by_for
from scripts import Nursery

from aioload import DataLoader, FileDataset, TensorDataset, error_context, get_worker_info, sample_rng
from aioload.copier import Copier
from aioload.engine.crossing import Crossing
from aioload.engine.handoff import Handoff
from aioload.errors import NoSampleError
from aioload.ring import Ring
from aioload.testing import Reading, SimulatedDevice

SAMPLES = [{"row": torch.full((5,), index), "index": index} for index in range(40)]


class Finished:
    """What a crossing looks at in a batch."""

    def __init__(self, number: int, *, error: BaseException | None = None, is_empty: bool = False) -> None:
        self.number, self.error, self.is_empty = number, error, is_empty
        self.indices, self.columns, self.slot, self.bundle = [number], list[Any](), None, None
        self.result: Any = torch.full((3,), number)
        self.copied: Any = None
        self.context: Any = None
        self.recipe = types.SimpleNamespace(context=None, batched=True)
        self.is_discarded = False

    def discard(self) -> None:
        self.is_discarded = True


class Scene:
    """A crossing whose loop does what it is called for when the test says so."""

    def __init__(self, num_batches: int) -> None:
        self.device = SimulatedDevice()
        self.handoff = Handoff()
        self.calls: list[Callable[[], None]] = []
        self.called = threading.Semaphore(0)
        self.crossing = Crossing(self.handoff, Copier(self.device, Ring()), self._call, num_batches=num_batches)

    def _call(self, function: Callable[[], None]) -> None:
        self.calls.append(function)
        self.called.release()

    def put(self, *batches: Any) -> None:
        for batch in batches:
            self.crossing.put(batch)

    def take(self) -> Any:
        """Take a batch as the consumer does."""
        batch: Any = self.handoff.peek()
        self.handoff.pop(batch)
        self.crossing.resume()
        return batch

    def go_on(self, num_calls: int = 1) -> None:
        """Wait until the loop has been called, and let it do what it was called for."""
        for _ in range(num_calls):
            assert self.called.acquire(timeout=60)
            self.calls.pop(0)()

    @property
    def handed_over(self) -> list[int]:
        return [batch.number for batch in self.handoff._batches]


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_as_many_are_on_the_device_as_may_be_and_the_next_when_one_has_been_taken(num_batches: int) -> None:
    scene = Scene(num_batches)
    scene.put(*(Finished(number) for number in range(8)))
    for number in range(8):
        last = min(8, number + num_batches)
        assert scene.handed_over == list(range(number, last))
        assert scene.device.num_copies == last
        scene.device.run()
        batch = scene.take()
        assert batch.result is None
        assert scene.crossing.receive(batch).tolist() == [number] * 3
        if last < 8:
            scene.go_on()
    assert scene.calls == []
    scene.device.run()


def test_a_consumer_who_takes_batches_faster_than_they_are_copied_has_to_wait() -> None:
    scene = Scene(2)
    scene.put(*(Finished(number) for number in range(4)))
    assert [scene.take().number, scene.take().number] == [0, 1]
    scene.go_on(2)
    assert scene.handed_over == []
    assert (scene.device.num_copies, scene.device.num_copied) == (2, 0)
    scene.device.wait_waiting()
    scene.crossing.resume()  # one who waits looks now and then, and nothing comes of it
    scene.go_on()
    assert repr(scene.crossing) == "<Crossing waiting=2 copying=2>"
    side = scene.device.streams[1]
    assert scene.device.step(side)
    assert scene.device.step(side)
    scene.go_on()
    assert scene.handed_over == [2]
    scene.device.run()
    scene.go_on()
    assert scene.handed_over == [2, 3]
    scene.device.run()


def test_what_needs_no_copy_keeps_its_place() -> None:
    scene = Scene(2)
    scene.put(Finished(0), Finished(1, error=OSError()), Finished(2, is_empty=True), Finished(3))
    assert scene.handed_over == [0, 1]
    scene.device.run()
    for _ in range(2):
        scene.take()
        scene.go_on()
    assert scene.handed_over == [2, 3]
    assert scene.device.num_copies == 2
    scene.device.run()


def test_what_waits_when_it_is_closed_is_discarded_and_what_comes_later_too() -> None:
    scene = Scene(1)
    batches = [Finished(number) for number in range(4)]
    scene.put(*batches[:3])
    scene.crossing.close()
    scene.put(batches[3])
    assert [batch.is_discarded for batch in batches] == [False, True, True, True]
    scene.crossing.resume()
    assert scene.calls == []
    scene.device.run()


def test_without_a_thread_that_waits_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    scene = Scene(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scene.put(Finished(0), Finished(1))
    scene.take()
    scene.go_on()
    assert scene.handed_over == [1]
    scene.device.run()


@pytest.mark.parametrize("call", ["query", "synchronize"])
def test_of_a_broken_device_the_next_copy_says_so(call: str) -> None:
    scene, error = Scene(1), RuntimeError("device-side assert triggered")
    scene.put(Finished(0), Finished(1))
    scene.take()
    scene.device.fail(call, RuntimeError())
    scene.device.fail("copy", error)
    scene.go_on(1 if call == "query" else 2)
    batch = scene.take()
    assert (batch.number, batch.error) == (1, error)
    assert batch.context.stage == "copy"
    scene.device.run()


# Through the loader.


@pytest.mark.parametrize("face", [by_for, by_async_for])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_loop_that_is_faster_than_the_copies_gets_every_batch(face: Callable[..., Any], in_order: bool) -> None:
    for seed in range(5):
        device = SimulatedDevice(pace=random.Random(seed))
        with DataLoader(
            SAMPLES, 4, num_workers=2, in_order=in_order, num_device_batches=1 + seed % 2, device=device
        ) as loader:
            batches = face(loader)
        device.run()
        assert sorted(index for batch in batches for index in batch["index"].tolist()) == list(range(40))
        assert 1 <= device.max_copying <= 1 + seed % 2


@pytest.mark.parametrize("collate_fn", [None, lambda samples: torch.utils.data.default_collate(samples)])
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_handed_over_when_its_copy_has_been_issued(num_workers: int, awaits: bool, collate_fn: Any) -> None:
    async def anext_of(loader: DataLoader[Any]) -> Any:
        async with loader:
            return await anext(aiter(loader))

    with SimulatedDevice() as device:
        loader: DataLoader[Any] = DataLoader(
            SAMPLES, 4, num_workers=num_workers, collate_fn=collate_fn, device=device, num_device_batches=1
        )
        batch = asyncio.run(anext_of(loader)) if awaits else next(iter(loader))
        reading = device.read(batch["row"])
        assert (device.num_copies, device.num_copied, reading.is_done) == (1, 0, False)
        device.run()
        assert reading.value.tolist() == [[index] * 5 for index in range(4)]
        loader.close()


def test_how_many_are_on_the_device_can_be_read() -> None:
    with SimulatedDevice() as device:
        loader = DataLoader(SAMPLES, 4, num_workers=2, num_device_batches=3, device=device)
        assert loader.num_device_batches == 3
        batches = iter(loader)
        next(batches), next(batches), next(batches)
        device.wait_waiting()
        assert loader.stats().device_batches == 0  # no fourth one before a copy is done
        device.run()
        next(batches)
        device.wait_num_copies(6)
        assert 1 <= loader.stats().device_batches <= 2  # the last one may be about to be handed over
        loader.close()
        assert loader.stats().device_batches == 0


class Aside(SimulatedDevice):
    """A device that can be told to refuse an event on a stream of the loader's."""

    def record_event(self, stream: Any) -> Any:
        if stream is not self.default_stream:
            self._come("record_event aside")
        return super().record_event(stream)


@pytest.mark.parametrize("call", ["copy", "copied", "record_event aside", "wait_event", "record_stream"])
@pytest.mark.parametrize("collate_fn", [None, torch.utils.data.default_collate, lambda samples: {**samples[0]}])
def test_an_error_on_the_way_to_the_device_is_raised_for_its_batch_and_no_other(call: str, collate_fn: Any) -> None:
    samples = [{"row": torch.full((5,), index)} for index in range(40)]
    with Aside() as device:
        loader: DataLoader[Any] = DataLoader(samples, 4, num_workers=2, collate_fn=collate_fn, device=device)
        ring = loader._runtime().ring
        ring.poison = 0xDB
        error = torch.OutOfMemoryError("there is none left")
        device.fail(call, error, after=2)
        batches, firsts = iter(loader), []
        for number in range(10):
            if number == 2:
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    next(batches)
                assert caught.value is error
                context = error_context(error)
                assert context is not None
                assert (context.stage, context.index) == ("copy", [8, 9, 10, 11])
                del caught
            else:
                firsts.append(next(batches)["row"][0])
            device.run()
        assert [int(first.flatten()[0]) for first in firsts] == [4 * number for number in range(10) if number != 2]
        assert list(batches) == []
        loader.close()
        error.__traceback__ = None
        del batches, firsts
        device.run()
        assert device.num_blocks_in_use == 0
        ring.release(ring.acquire(1))
        assert ring.num_copying == 0


def test_without_threads_an_error_of_a_copy_says_where_it_was_too() -> None:
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader = DataLoader(SAMPLES, 4, num_workers=0, device=device)
        error = torch.OutOfMemoryError("there is none left")
        device.fail("copy", error, after=2)
        outcomes = by_for(loader)
        assert [outcome is error for outcome in outcomes] == [number == 2 for number in range(10)]
        context = error_context(error)
        assert context is not None
        assert (context.stage, context.index) == ("copy", [8, 9, 10, 11])
        error.__traceback__ = None


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("face", [by_for, by_async_for])
def test_without_page_locked_memory_it_goes_on_and_says_so_once(face: Callable[..., Any], num_workers: int) -> None:
    device = SimulatedDevice(pace=random.Random(0))
    for after in (0, 1):
        device.fail("host_memory", RuntimeError("CUDA error: out of memory"), after=after)
    with (
        DataLoader(SAMPLES, 4, num_workers=num_workers, device=device) as loader,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        loader._runtime().ring.poison = 0xDB
        batches = face(loader)
    device.run()
    assert [index for batch in batches for index in batch["index"].tolist()] == list(range(40))
    assert [each.category for each in caught] == [RuntimeWarning]
    assert "no page-locked memory for a batch" in str(caught[0].message)
    assert "RuntimeError('CUDA error: out of memory')" in str(caught[0].message)
    if face is by_for or num_workers > 0:
        assert Path(caught[0].filename).name == "oracle.py"


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_is_broken_off_leaves_nothing_on_the_device(persistent: bool) -> None:
    with SimulatedDevice() as device:
        loader: DataLoader[Any] = DataLoader(SAMPLES, 4, num_workers=2, persistent_workers=persistent, device=device)
        for num_taken in (0, 1, 3, 10):
            batches = iter(loader)
            for _ in range(num_taken):
                next(batches)
                device.run()
            if num_taken == 1:
                batches.close()
            del batches
        loader.close()
        gc.collect()
        device.run()
        assert device.num_blocks_in_use == 0
        ring = loader._runtime().ring
        ring.release(ring.acquire(1))
        assert ring.num_copying == 0
        assert device.host_bytes <= (ring.max_free + 1) * 4096


def test_rows_of_tensors_go_to_the_device_too_however_small() -> None:
    rows = torch.arange(80).reshape(40, 2)
    with SimulatedDevice() as device:
        loader: DataLoader[Any] = DataLoader(TensorDataset(rows), 4, num_workers=2, device=device)
        found = []
        for (batch,) in loader:
            device.run()
            found.append(batch.clone())
        assert torch.equal(torch.cat(found), rows)
        assert device.max_copying <= 2


def half(device: SimulatedDevice) -> Callable[[Any], Any]:
    return lambda batch: {**batch, "row": device.launch(lambda row: row // 2, batch["row"])}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, torch.utils.data.default_collate])
def test_a_transform_is_given_each_batch_on_the_device(num_workers: int, collate_fn: Any) -> None:
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader(
            SAMPLES, 4, num_workers=num_workers, collate_fn=collate_fn, device=device, device_transform=half(device)
        )
        readings = [(device.read(batch["row"]), device.read(batch["index"])) for batch in loader]
        loader.close()
    assert torch.equal(torch.cat([row.value[:, 0] for row, _ in readings]), torch.arange(40) // 2)
    assert torch.equal(torch.cat([index.value for _, index in readings]), torch.arange(40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_transform_is_raised_for_its_batch_and_no_other(num_workers: int) -> None:
    error = ZeroDivisionError()

    def transform(batch: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert threading.current_thread().name == "aioload-loop"
        numbers.append(len(numbers))
        if len(numbers) == 3:
            raise error
        return batch

    numbers: list[int] = []
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader = DataLoader(SAMPLES, 4, num_workers=num_workers, device=device, device_transform=transform)
        outcomes = by_for(loader)
        assert [outcome is error for outcome in outcomes] == [number == 2 for number in range(10)]
        context = error_context(error)
        assert context is not None
        assert (context.stage, context.index) == ("device_transform", [8, 9, 10, 11])
        loader.close()
        error.__traceback__ = None


class Own:
    """Moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, _: Any) -> "Own":
        return self


def test_what_is_moved_late_is_transformed_late_and_in_the_thread_that_asked_for_it() -> None:
    threads = []

    def transform(batch: Any) -> Any:
        threads.append(threading.current_thread())
        return {"x": batch["own"].x, "sparse": batch["sparse"].to_dense()}

    def collate(samples: Any) -> Any:
        return {"own": Own(torch.tensor(samples)), "sparse": torch.eye(2).to_sparse()}

    with SimulatedDevice(pace=random.Random(0)) as device:
        with DataLoader(
            range(8), 4, num_workers=2, collate_fn=collate, device=device, device_transform=transform
        ) as loader:
            assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert threads == [threading.main_thread()] * 2


@pytest.mark.parametrize("make", [lambda: torch.eye(2).to_sparse(), lambda: Own(torch.ones(1))], ids=["sparse", "own"])
def test_a_transform_cannot_make_what_cannot_be_guarded(make: Callable[[], Any]) -> None:
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader(
            SAMPLES, 4, num_workers=2, device=device, device_transform=lambda batch: [batch, make()]
        )
        with loader, pytest.raises(TypeError, match="device_transform must return dense tensors, in lists"):
            next(iter(loader))


def hidden(kind: str, x: torch.Tensor) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "namespace": lambda: types.SimpleNamespace(deep=[x]),
        "set": lambda: {x},
        "iterator": lambda: iter([x]),
        "generator": lambda: (each for each in [x]),
        "own": lambda: Holder(x),
    }
    return kinds[kind]()


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize("kind", ["namespace", "set", "iterator", "generator", "own"])
def test_a_transform_cannot_hide_tensors_from_the_allocator(kind: str) -> None:
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader(
            SAMPLES, 4, num_workers=2, device=device, device_transform=lambda batch: [1, hidden(kind, batch["row"])]
        )
        with loader, pytest.raises(TypeError, match="lists, tuples, dicts, dataclasses and the like; got a "):
            next(iter(loader))


def test_what_a_transform_returns_beside_tensors_may_be_anything() -> None:
    others = [Path("x"), {1, 2}, types.SimpleNamespace(x=1), object(), iter([]), torch.nn.Linear, range(3), None]
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader(
            SAMPLES, 4, num_workers=2, device=device, device_transform=lambda batch: (batch["row"], *others)
        )
        with loader:
            assert all(list(batch[1:]) == others for batch in loader)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_device_that_is_behind_the_consumer_bounds_what_is_there(num_workers: int) -> None:
    most = []
    for num_batches in (40, 160):
        device = SimulatedDevice(pace=random.Random(1))
        loader: DataLoader[Any] = DataLoader(range(num_batches), 1, num_workers=num_workers, device=device)
        readings, blocks = list[Reading](), 0
        with loader:
            for batch in loader:
                readings.extend(device.read(batch) for _ in range(50))  # far more than it does meanwhile
                del batch
                blocks = max(blocks, device.num_blocks_in_use)
        device.run()
        assert [reading.value.item() for reading in readings[::50]] == list(range(num_batches))
        most.append(blocks)
    assert max(most) <= 4 + 2 + 2 + 1  # behind, ahead, being copied, being taken


def test_without_threads_as_well() -> None:
    device = SimulatedDevice(pace=random.Random(1))
    readings = []
    with DataLoader(range(160), 1, num_workers=0, device=device) as loader:
        for batch in loader:
            readings.append(device.read(batch))
            del batch
    assert device.max_copying <= 5
    assert device.max_host_bytes <= 6 * 4096
    device.run()
    assert [reading.value.item() for reading in readings] == list(range(160))


class OnDevice(torch.Tensor):
    """Of a kind that is not brought together with others."""


@pytest.mark.parametrize("transforms", [False, True])
def test_what_is_on_the_device_already_is_waited_for_too(transforms: bool) -> None:
    for seed in range(5):
        device = SimulatedDevice(pace=random.Random(seed))
        stream = device.new_stream()

        def collate(samples: list[int], device: SimulatedDevice = device) -> Any:
            return {"there": device.copy(torch.tensor(samples)).as_subclass(OnDevice), "number": samples[0]}

        def transform(batch: Any, device: SimulatedDevice = device) -> Any:
            return {**batch, "there": device.launch(lambda x: x * 1, batch["there"])}

        loader: DataLoader[Any] = DataLoader(
            range(200),
            2,
            num_workers=2,
            device=device,
            collate_fn=collate,
            device_transform=transform if transforms else None,
        )
        readings = []
        with loader, device.stream(stream):
            for batch in loader:
                readings.append((batch["number"], device.read(batch["there"])))
                del batch
        device.run()
        assert all(reading.value.tolist() == [number, number + 1] for number, reading in readings)


@pytest.mark.parametrize("num_workers", [0, 4])
def test_a_transform_works_for_no_sample_and_in_no_worker(num_workers: int) -> None:
    def transform(batch: Any) -> Any:
        with pytest.raises(NoSampleError):
            sample_rng()
        assert get_worker_info() is None
        return batch

    with SimulatedDevice(pace=random.Random(0)) as device:
        for dataset in (SAMPLES, TensorDataset(torch.arange(40))):
            loader: DataLoader[Any] = DataLoader(
                dataset, 4, num_workers=num_workers, device=device, seed=0, device_transform=transform
            )
            with loader:
                assert len(list(loader)) == 10


def scaled(device: SimulatedDevice, batch: torch.Tensor, by: int) -> torch.Tensor:
    return device.launch(lambda x: x * by, batch)


def test_a_pass_that_begins_early_is_neither_transformed_nor_copied_before_it_is_asked_for() -> None:
    scale = [1]
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader(
            range(16),
            2,
            num_workers=2,
            device=device,
            persistent_workers=True,
            device_transform=lambda batch: scaled(device, batch, scale[0]),
        )
        with loader:
            for epoch in range(3):
                scale[0] = 10**epoch
                readings = [device.read(batch) for batch in loader]
                assert device.num_copies == 8 * (epoch + 1)
                device.run()
                assert [reading.value.tolist() for reading in readings] == [
                    [number * scale[0], (number + 1) * scale[0]] for number in range(0, 16, 2)
                ]


def test_only_batches_with_data_count_as_being_there() -> None:
    class Failing:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> int:
            raise ValueError(index)

    with SimulatedDevice(pace=random.Random(0)) as device, DataLoader(Failing(), 4, num_workers=2, device=device) as it:
        batches = iter(it)
        for _ in range(5):
            with pytest.raises(ValueError, match=r"^[0-9]+"):
                next(batches)
            assert it.stats().device_batches == 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("call", ["copy", "transform"])
def test_without_batches_an_error_names_the_sample_and_its_path(num_workers: int, call: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")

    def transform(_: Any) -> Any:
        raise error

    with SimulatedDevice(pace=random.Random(0)) as device:
        error = torch.OutOfMemoryError("there is none left")
        if call == "copy":
            device.fail("copy", error)
        loader: DataLoader[Any] = DataLoader(
            FileDataset([path], lambda data, index: torch.tensor([*data, index])),
            batch_size=None,
            num_workers=num_workers,
            device=device,
            device_transform=transform if call == "transform" else None,
        )
        with loader, pytest.raises(torch.OutOfMemoryError) as caught:
            next(iter(loader))
        assert caught.value is error
        context = error_context(error)
        assert context is not None
        stage = "copy" if call == "copy" else "device_transform"
        assert (context.stage, context.index, context.location) == (stage, 0, path)
        error.__traceback__ = None


def test_what_was_refused_keeps_nobody_alive() -> None:
    class Model:
        pass

    def train(loader: DataLoader[Any]) -> Any:
        model = Model()
        for _ in loader:
            pass
        return weakref.ref(model)

    for num_workers in (0, 2):
        device = SimulatedDevice(pace=random.Random(0))
        device.fail("host_memory", RuntimeError("none"))
        loader: DataLoader[Any] = DataLoader(
            range(8), 2, num_workers=num_workers, device=device, collate_fn=torch.tensor
        )
        with loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert train(loader)() is None
        device.run()


def test_a_device_that_hangs_does_not_hold_up_the_exit(nursery: Nursery) -> None:
    script = """
import aioload
from aioload.testing import SimulatedDevice

loader = aioload.DataLoader(list(range(40)), 2, num_workers=2, device=SimulatedDevice())
batches = iter(loader)
next(batches), next(batches)
import threading
while not any(thread.name == "aioload-copies" for thread in threading.enumerate()):
    pass
loader.close()
print("at the end")
"""
    assert nursery.run_quietly(script) == "at the end\n"
