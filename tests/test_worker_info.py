"""What dataset code is told of its worker, by our ``get_worker_info`` and by torch's own function."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from outcomes import EVERY_WAY, by_for, of_iterator
from sampling import Files, decode_where_it_was_read
from scripts import Nursery
from sharding import Cut, Sharded, cut
from torch.utils.data import get_worker_info as torchs_function

import aioload
from aioload import DataLoader
from aioload.testing import DEADLINE_S, GatedDataset, Gates

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SIZE = 12


def ask() -> Any:
    """Return what both functions answer."""
    ours, theirs = aioload.get_worker_info(), torchs_function()
    assert (ours is None) == (theirs is None)
    if ours is None:
        return None
    assert all(getattr(ours, name) == getattr(theirs, name) for name in ("id", "num_workers", "seed", "dataset"))
    return ours


class Asking:
    """Its samples are ``(id, num_workers, seed)`` of their workers."""

    def __len__(self) -> int:
        return SIZE

    def about(self) -> Any:
        info = ask()
        if info is None:
            return None
        assert info.dataset is self
        return info.id, info.num_workers, info.seed

    def __getitem__(self, index: int) -> Any:
        return self.about()


class ManyAsking(Asking):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.about() for _ in indices]


class AsyncAsking(Asking):
    async def __getitem__(self, index: int) -> Any:
        first = self.about()
        await asyncio.sleep(0)
        in_thread, in_task = await asyncio.gather(asyncio.to_thread(self.about), self.in_a_task())
        assert in_thread == in_task == first
        return first

    async def in_a_task(self) -> Any:
        return self.about()


class FilesAsking(Files, Asking):
    def location(self, index: int) -> str:
        self.about()
        return super().location(index)

    def decode(self, data: bytes, index: int) -> Any:
        super().decode(data, index)
        return self.about()


class ItemsAsking(Asking, torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (self.about() for _ in range(SIZE))


MAKE: dict[str, Callable[[Path], Any]] = {
    "map": lambda _: Asking(),
    "many": lambda _: ManyAsking(),
    "async": lambda _: AsyncAsking(),
    "files": FilesAsking,
    "items": lambda _: ItemsAsking(),
}
every_kind = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def told(dataset: Any, num_workers: int, **arguments: Any) -> tuple[int, list[Any]]:
    """Return the base seed that torch's own loader would draw, and what the samples were told."""
    torch.manual_seed(4)
    base_seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(4)
    batches = by_for(dataset, num_workers=num_workers, batch_size=3, collate_fn=lambda each: each, **arguments)
    return base_seed, [sample for batch in batches for sample in batch]


@every_kind
def test_each_thread_is_a_worker(make: Any, tmp_path: Path) -> None:
    dataset = make(tmp_path)
    for num_workers in (1, 3):
        base_seed, samples = told(dataset, num_workers)
        assert len(samples) == SIZE
        alone = isinstance(dataset, ItemsAsking | AsyncAsking)  # whatever num_workers is
        for number, count, seed in samples:
            assert count == (1 if alone else num_workers)
            assert 0 <= number < count
            assert seed == base_seed + number


@every_kind
def test_without_threads_there_is_none(make: Any, tmp_path: Path) -> None:
    assert told(make(tmp_path), 0)[1] == [None] * SIZE
    assert ask() is None


@pytest.mark.parametrize("inline", [False, True])
def test_numbers_are_below_num_workers_on_threads_that_read_too(
    inline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_where_it_was_read(monkeypatch, always=inline)
    dataset = FilesAsking(tmp_path)
    with DataLoader(dataset, 4, sampler=[*range(SIZE)] * 20, num_workers=2, collate_fn=lambda each: each) as loader:
        for batch in loader:
            assert {(number < 2, count) for number, count, _ in batch} == {(True, 2)}
    assert ("aioload-read" in dataset.threads) is inline


def test_each_worker_has_a_number_of_its_own() -> None:
    class Waiting(GatedDataset):
        def __getitem__(self, index: int) -> int:
            super().__getitem__(index)
            return int(ask().id)

    with Waiting(4) as dataset, DataLoader(dataset, num_workers=4) as loader:
        batches = iter(loader)
        dataset.gates.wait_started(*range(4))
        dataset.gates.open_all()
        assert sorted(of_iterator(batches)) == [[0], [1], [2], [3]]


@every_kind
@pytest.mark.parametrize("num_workers", [1, 3])
def test_worker_init_fn_is_told_its_own_number(make: Any, num_workers: int, tmp_path: Path) -> None:
    dataset, infos = make(tmp_path), []

    def begin(number: int) -> None:
        infos.append((number, ask()))

    base_seed, samples = told(dataset, num_workers, worker_init_fn=begin)
    assert len(samples) == SIZE
    num_begun = 1 if isinstance(dataset, ItemsAsking) else num_workers
    assert sorted(number for number, _ in infos) == list(range(num_begun))
    for number, info in infos:
        assert (info.id, info.num_workers, info.seed) == (number, num_begun, base_seed + number)
        assert info.dataset is dataset


@every_kind
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_collate_fn_is_told_the_worker_it_runs_in(make: Any, batch_size: int | None, tmp_path: Path) -> None:
    dataset = make(tmp_path)

    def collate(_: Any) -> Any:
        info = ask()
        assert info.dataset is dataset
        return 0 <= info.id < info.num_workers

    for way in EVERY_WAY[:2]:
        got = way(dataset, batch_size=batch_size, num_workers=3, collate_fn=collate)
        assert got == [True] * (SIZE if batch_size is None else SIZE // 3)
    assert by_for(dataset, num_workers=0, batch_size=SIZE, collate_fn=lambda _: ask()) == [None]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_a_dataset_that_shards_itself_yields_all_once(num_lanes: int, persistent: bool) -> None:
    for dataset, begin in ((Sharded(), None), (Cut(), cut)):
        for num_workers in (1, 4):
            with DataLoader(
                dataset, num_workers=num_workers, iterable_workers=num_lanes, worker_init_fn=begin,
                persistent_workers=persistent,
            ) as loader:  # fmt: skip
                for _ in range(3):
                    assert sorted(of_iterator(iter(loader))) == [[number] for number in range(SIZE)]
    assert of_iterator(iter(DataLoader(Sharded(), num_workers=0))) == [[number] for number in range(SIZE)]


def test_torchs_own_workers_are_answered_as_ever() -> None:
    assert len(by_for(Asking(), collate_fn=lambda each: 0)) == SIZE  # it is us who answer now
    loader = torch.utils.data.DataLoader(Sharded(), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(batch) for batch in loader) == list(range(SIZE))
    assert ask() is None


class InProcesses(Asking):
    """Each sample comes from worker processes of torch's, started by one of our threads."""

    def __getitem__(self, index: int) -> Any:
        before = self.about()
        inner = torch.utils.data.DataLoader(Sharded(), num_workers=2, multiprocessing_context="fork")
        numbers = sorted(int(batch) for batch in inner)
        assert self.about() == before
        return numbers


def test_processes_forked_by_a_sample_are_no_workers_of_ours() -> None:
    assert by_for(InProcesses(), sampler=[0], num_workers=1, collate_fn=list) == [[list(range(SIZE))]]


def test_a_loader_that_came_by_pickle_answers_too(nursery: Nursery) -> None:
    script = """
        import pickle
        import aioload, torch
        from sharding import Sharded
        loader = pickle.loads(pickle.dumps(aioload.DataLoader(Sharded(), num_workers=1, iterable_workers=2)))
        print(sorted(int(batch) for batch in loader))
        loader.close()
    """
    assert nursery.run_quietly(script).strip() == str(list(range(SIZE)))


def test_torchs_collation_in_our_threads_does_not_use_shared_memory() -> None:
    class Collating(Asking):
        def __getitem__(self, index: int) -> Any:
            assert ask() is not None
            batch = torch.utils.data.default_collate([torch.zeros(3), torch.ones(3)])
            assert not batch.is_shared()
            return batch

    def collate(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        assert not batch.is_shared()
        return batch.sum()

    assert by_for(Collating(), batch_size=SIZE, collate_fn=collate) == [3 * SIZE]


def test_threads_of_the_users_are_told_nothing() -> None:
    class Elsewhere(Asking):
        def __getitem__(self, index: int) -> Any:
            seen: list[Any] = [0]
            thread = threading.Thread(target=lambda: seen.append(ask()))
            thread.start()
            thread.join()
            return seen

    assert by_for(Elsewhere(), sampler=[0], collate_fn=list) == [[[0, None]]]


def test_the_consumer_is_told_nothing_between_batches() -> None:
    for dataset in (Asking(), ItemsAsking(), AsyncAsking()):
        for num_workers in (0, 2):
            with DataLoader(dataset, num_workers=num_workers, collate_fn=lambda each: 0) as loader:
                for _ in loader:
                    assert ask() is None


@every_kind
@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_keeps_a_dataset_alive_after_its_loader(make: Any, num_workers: int, tmp_path: Path) -> None:
    dataset = make(tmp_path)
    gone = weakref.ref(dataset)
    for begin in (None, lambda _: None):
        loader = DataLoader(
            dataset, num_workers=num_workers, persistent_workers=num_workers > 0, worker_init_fn=begin,
            collate_fn=lambda each: aioload.sample_rng(0).random(),
        )  # fmt: skip
        assert len(of_iterator(iter(loader))) == SIZE
        del loader
    del dataset
    gc.collect()
    assert gone() is None


def test_parked_threads_keep_no_copy_alive() -> None:
    gates = Gates(opened=True)

    class Noted(Sharded):
        def __deepcopy__(self, _: Any) -> "Noted":
            new = Noted()
            weakref.finalize(new, gates.pass_through, "gone")
            return new

    with DataLoader(Noted(), num_workers=2, iterable_workers=2, persistent_workers=True) as loader:
        assert len(of_iterator(iter(loader))) == SIZE
        deadline = time.monotonic() + DEADLINE_S
        while len(gates.started) < 2:  # nothing tells when a thread has parked
            assert time.monotonic() < deadline
            gc.collect()
