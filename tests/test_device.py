"""Devices: which there are, and that a real one and the simulated one keep to what a copier relies on."""

import contextlib
import random
import re
import threading
from typing import Any

import pytest
import torch
from accelerators import ACCELERATORS, Accelerator, lazy_device
from rigs import RIGS, Simulated
from scripts import Nursery

from aioload import DataLoader
from aioload.device import (
    AcceleratorBackend,
    DeviceBackend,
    StreamlessBackend,
    backend_for,
    default_index,
    resolve_device,
    why_streamless,
)
from aioload.errors import ArgumentError
from aioload.layout import ALIGNMENT
from aioload.testing import SimulatedDevice

POISON = 0xDB
SIZE = 1 << 16


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_needs_no_more_than_its_name(device: Any) -> None:
    resolved = resolve_device(device)
    assert isinstance(resolved, torch.device)
    assert resolved.type == "cpu"
    assert backend_for(resolved) is None


@pytest.mark.parametrize("device", ["nonsense", "cuda:x", 2.5, object(), "cpu:-2", ["cpu"]])
def test_what_is_no_device_is_an_error_that_says_what_is(device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"device needs 'cpu', 'cuda', 'cuda:N' or another .*; got "):
        resolve_device(device)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_whose_tensors_have_no_contents_is_refused(device: Any) -> None:
    with pytest.raises(ArgumentError, match="tensors there have no contents"):
        resolve_device(device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("mps"), "xpu:0", "hpu", "mtia", "xla", "vulkan"])
def test_a_device_that_is_not_there_is_refused_with_what_torch_sees(device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"needs a device that is there, but torch \S+ sees none beside"):
        resolve_device(device)


def test_a_device_without_streams_is_warned_of_where_the_loader_is_made() -> None:
    lazy = lazy_device()
    with pytest.warns(
        RuntimeWarning, match=r"lazy:0 are not made ahead but by next\(\), .*: torch.accelerator"
    ) as caught:
        loader: DataLoader[Any] = DataLoader(range(3), device="lazy")
    assert [warning.filename for warning in caught] == [__file__]
    assert loader.device == lazy
    assert isinstance(backend_for(lazy), StreamlessBackend)


BARE_ACCELERATOR = """
import warnings
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("bare")

@torch.library.impl("aten::empty.memory_format", "privateuseone")
def empty(size, dtype=None, **more):
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.float32)

import aioload
from aioload.device import backend_for
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader = aioload.DataLoader(range(3), device="bare")
print(backend_for(loader.device), *[warning.message for warning in caught])
"""


def test_an_accelerator_that_has_not_all_that_copies_need_is_one_without_streams(nursery: Nursery) -> None:
    pytest.importorskip("torch._C._acc")
    expected = r"<StreamlessBackend bare:0> Copies of batches to bare:0 are .*: [^.]*aten::record_stream[^.]*\.\n"
    assert re.fullmatch(expected, nursery.run_quietly(BARE_ACCELERATOR))


def test_mps_is_never_used_by_two_threads() -> None:
    device = torch.device("mps", 0)
    assert "two threads" in str(why_streamless(device))
    assert repr(backend_for(device)) == "<StreamlessBackend mps:0>"


@pytest.mark.parametrize(
    ("current", "count", "local_rank", "expected"),
    [
        (0, 8, None, 0),
        (3, 8, None, 3),
        (0, 8, "5", 5),
        (0, 8, "0", 0),
        (3, 8, "5", 3),  # chosen by set_device
        (0, 1, "5", 0),  # each process sees its own device alone
        (0, 8, "8", 0),
        (0, 8, "-1", 0),
        (0, 8, "", 0),
    ],
)
def test_which_device_a_name_without_a_number_is(
    current: int, count: int, local_rank: str | None, expected: int
) -> None:
    assert default_index(current, count, local_rank) == expected


def test_what_does_what_a_device_does_is_one() -> None:
    device = SimulatedDevice()
    assert isinstance(device, DeviceBackend)
    assert resolve_device(device) is backend_for(device) is device
    cuda = backend_for(torch.device("cuda", 3))
    assert isinstance(cuda, DeviceBackend)
    assert repr(cuda) == "<CudaBackend cuda:3>"
    xpu = AcceleratorBackend(torch.device("xpu", 1))
    assert isinstance(xpu, DeviceBackend)
    assert repr(xpu) == "<AcceleratorBackend xpu:1>"


@pytest.fixture(params=[*RIGS, *ACCELERATORS])
def rig(request: pytest.FixtureRequest) -> Any:
    return request.param()


def numbers(backend: DeviceBackend, start: int) -> torch.Tensor:
    """Return bytes that a copy is made from beside the host's work."""
    memory = backend.host_memory(SIZE)
    memory.copy_((torch.arange(SIZE) + start).to(torch.uint8))
    return memory


def warm(rig: Any, host: torch.Tensor, stream: Any, num_copies: int = 1) -> None:
    """Have the allocator keep memory for copies on ``stream``: to make more, a device may wait for its work."""
    copies = [rig.backend.copy(host, stream) for _ in range(num_copies)]
    rig.finish()
    del copies


TENSORS: dict[str, torch.Tensor] = {
    "bytes": torch.arange(200, dtype=torch.uint8),
    "numbers": torch.randn(3, 4, 5),
    "one number": torch.tensor(3, dtype=torch.int16),
    "none": torch.empty(0, 3),
    "transposed": torch.randn(4, 5).T,
    "every other": torch.arange(40).reshape(4, 10)[:, ::2],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "bfloat16": torch.randn(3).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_copy_is_what_was_copied_when_its_event_has_passed(rig: Any, tensor: torch.Tensor) -> None:
    backend = rig.backend
    side = backend.new_stream()
    copied = backend.copy(tensor, side)
    event = backend.record_event(side)
    assert (copied.device, copied.dtype, copied.shape) == (backend.device, tensor.dtype, tensor.shape)
    assert copied.stride() == torch.empty_like(tensor, device="meta").stride()
    assert copied.data_ptr() % ALIGNMENT == 0
    rig.finish()
    assert event.query()
    event.synchronize()
    assert torch.equal(copied.cpu(), tensor)
    assert backend.copy(copied, side) is copied or copied.numel() == 0


def test_the_host_waits_for_nothing(rig: Any) -> None:
    backend = rig.backend
    side, host = backend.new_stream(), numbers(backend, 1)
    warm(rig, host, side)
    rig.busy(side)
    backend.copy(host, side)
    event = backend.record_event(side)
    backend.wait_event(backend.current_stream(), event)
    later = backend.record_event(backend.current_stream())
    assert not event.query()
    assert not later.query()
    rig.finish()
    assert event.query()
    assert later.query()


def test_a_stream_that_waits_for_the_event_reads_what_was_copied(rig: Any) -> None:
    backend = rig.backend
    side, other = backend.new_stream(), backend.new_stream()
    host = numbers(backend, 1)
    rig.busy(side)
    copied = backend.copy(host, side)
    backend.wait_event(other, backend.record_event(side))
    with backend.stream(other):
        value = rig.read(copied)
    rig.finish()
    assert torch.equal(value(), host)


def test_memory_that_is_no_host_memory_may_be_written_to_at_once(rig: Any) -> None:
    backend = rig.backend
    side = backend.new_stream()
    rig.busy(side)
    tensor = torch.arange(SIZE)
    copied = backend.copy(tensor, side)
    tensor.fill_(-1)
    rig.finish()
    assert torch.equal(copied.cpu(), torch.arange(SIZE))


def test_host_memory_is_not_given_out_again_before_it_has_been_copied(rig: Any) -> None:
    backend = rig.backend
    side, host = backend.new_stream(), numbers(backend, 1)
    warm(rig, host, side)
    rig.busy(side)
    copied = backend.copy(host, side)
    del host
    other = numbers(backend, 2)
    expected = backend.copy(other, side)
    rig.finish()
    assert torch.equal(copied.cpu() + 1, expected.cpu())


def test_device_memory_is_given_out_again_at_once_for_its_own_stream(rig: Any) -> None:
    backend = rig.backend
    if isinstance(rig, Accelerator):
        pytest.skip("one that keeps what it copies to until it has done so is as good")
    side = backend.new_stream()
    copied = backend.copy(numbers(backend, 1), side)
    address = copied.data_ptr()
    del copied
    other = numbers(backend, 2)
    again = backend.copy(other, side)
    assert again.data_ptr() == address
    rig.finish()
    assert torch.equal(again.cpu(), other)


def test_device_memory_waits_for_the_stream_that_was_recorded(rig: Any) -> None:
    backend = rig.backend
    side, other = backend.new_stream(), backend.new_stream()
    host, more = numbers(backend, 1), numbers(backend, 2)
    warm(rig, host, side, num_copies=2)
    copied = backend.copy(host, side)
    backend.wait_event(other, backend.record_event(side))
    backend.record_stream(copied, other)
    rig.busy(other)
    with backend.stream(other):
        value = rig.read(copied)
    address = copied.data_ptr()
    del copied
    again = backend.copy(more, side)
    assert again.data_ptr() != address
    rig.finish()
    assert torch.equal(value(), host)
    del again
    assert backend.copy(host, side).data_ptr()  # and what is free, here both, may be given out
    rig.finish()


def test_recording_a_tensor_without_bytes_is_nothing(rig: Any) -> None:
    rig.backend.record_stream(rig.backend.copy(torch.empty(0, 3)), rig.backend.new_stream())


def test_each_thread_has_a_current_stream(rig: Any) -> None:
    backend = rig.backend
    streams: list[Any] = []
    stream = backend.new_stream()
    with backend.stream(stream):
        thread = threading.Thread(target=lambda: streams.append(backend.current_stream()))
        thread.start()
        thread.join()
        assert backend.current_stream() == stream
        assert backend.copy(torch.ones(1)).shape == (1,)
    assert backend.current_stream() == streams[0] != stream
    rig.finish()


def test_a_stream_may_be_current_in_two_threads_at_once_and_twice_in_one(rig: Any) -> None:
    backend = rig.backend
    stream, barrier = backend.new_stream(), threading.Barrier(2, timeout=60)
    before = backend.current_stream()
    after: list[Any] = []

    def other() -> None:
        mine = backend.current_stream()
        barrier.wait()
        with backend.stream(stream):
            barrier.wait()
            barrier.wait()
            after.append(backend.current_stream() == stream)
        after.append(backend.current_stream() == mine)

    thread = threading.Thread(target=other)
    thread.start()
    with contextlib.suppress(KeyError), backend.stream(stream):
        barrier.wait()
        barrier.wait()
        with backend.stream(stream):
            pass
        after.append(backend.current_stream() == stream)
        raise KeyError
    barrier.wait()
    thread.join()
    assert after == [True, True, True]
    assert backend.current_stream() == before


def test_a_thread_may_sleep_until_an_event_has_passed(rig: Any) -> None:
    backend = rig.backend
    side = backend.new_stream()
    rig.busy(side)
    event = backend.record_event(side)
    seen: list[bool] = []

    def wait() -> None:
        event.synchronize()
        seen.append(event.query())

    thread = threading.Thread(target=wait)
    thread.start()
    if isinstance(rig, Simulated):
        rig.backend.wait_waiting()
        assert not seen
    rig.finish()
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize("make", ACCELERATORS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_the_cpu_are_pinned_for_whatever_accelerator_there_is(make: Any, num_workers: int) -> None:
    device = make().backend.device
    rows = torch.arange(4000.0).reshape(40, 100)
    with DataLoader(list(rows), 4, num_workers=num_workers, pin_memory=True) as loader:
        held = [batch for _ in range(2) for batch in loader]
    assert all(batch.is_pinned() for batch in held)
    copies = [batch.to(device, non_blocking=True) for batch in held]
    torch.accelerator.synchronize(device)
    assert torch.equal(torch.cat(copies).cpu(), rows.repeat(2, 1))


# What only the simulated device does.


def test_who_reads_too_early_reads_poison() -> None:
    device = SimulatedDevice()
    side = device.new_stream()
    copied = device.copy(torch.arange(4, dtype=torch.uint8), side)
    reading = device.read(copied)
    assert device.step(device.default_stream)
    assert reading.is_done
    assert reading.value.tolist() == [POISON] * 4
    device.run()
    assert copied.tolist() == [0, 1, 2, 3]


def test_who_reads_memory_that_is_free_reads_poison_or_what_is_there_now() -> None:
    device = SimulatedDevice()
    side = device.new_stream()
    for again in (False, True):
        copied = device.copy(torch.arange(4, dtype=torch.uint8), side)
        reading = device.read(copied)
        del copied
        other = device.copy(torch.full((4,), 7, dtype=torch.uint8), side) if again else None
        assert device.run(side) >= 2
        device.run()
        assert reading.value.tolist() == ([7] * 4 if again else [POISON] * 4)
        assert device.num_blocks == 1
        assert device.num_blocks_in_use == (other is not None)
        del other
    assert "blocks=1 in_use=0" in repr(device)


def test_host_memory_is_counted_as_long_as_it_is_there() -> None:
    device = SimulatedDevice()
    memory = device.host_memory(100)
    assert device.host_bytes == 100
    copied = device.copy(memory[:10])
    del memory
    assert device.host_bytes == 100
    device.run()
    assert device.host_bytes == 0
    assert len(copied) == 10


def test_a_call_fails_when_it_is_told_to() -> None:
    device, error = SimulatedDevice(), MemoryError()
    device.fail("copy", error, after=1)
    device.fail("copied", error)
    for num_copies in (1, 1, 2):
        if num_copies == 2:
            device.copy(torch.ones(1))
        else:
            with pytest.raises(MemoryError) as caught:
                device.copy(torch.ones(1))
            assert caught.value is error
        assert device.num_copies == num_copies
    device.run()


def test_with_a_pace_the_same_calls_have_the_same_outcome() -> None:
    def go(seed: int) -> list[Any]:
        device = SimulatedDevice(pace=random.Random(seed))
        side = device.new_stream()
        readings = []
        for number in range(30):
            copied = device.copy(torch.full((4,), number, dtype=torch.uint8), side)
            readings.append(device.read(copied))
        device.record_event(side).synchronize()
        device.record_event(device.default_stream).synchronize()
        return [reading.value.tolist() for reading in readings]

    outcomes = [go(seed) for seed in range(5)]
    assert outcomes == [go(seed) for seed in range(5)]
    assert outcomes[0] != outcomes[1]
    assert any([POISON] * 4 in outcome for outcome in outcomes)


def test_at_the_end_of_with_nobody_waits_any_longer() -> None:
    with SimulatedDevice() as device:
        side = device.new_stream()
        copied = device.copy(torch.arange(3), side)
        thread = threading.Thread(target=device.record_event(side).synchronize)
        thread.start()
        device.wait_waiting()
    thread.join()
    assert copied.tolist() == [0, 1, 2]
    assert device.copy(copied + 1, side).tolist() == [1, 2, 3]
    assert device.record_event(side).query()
