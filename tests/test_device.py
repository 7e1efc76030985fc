"""Devices: which there are, and that a real one and the simulated one keep to what a copier relies on."""

import random
import threading
from typing import Any

import pytest
import torch
from rigs import RIGS, Simulated

from aioload.device import DeviceBackend, backend_for, cuda_index, resolve_device
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
    with pytest.raises(ArgumentError, match=r"device needs 'cpu', 'cuda', 'cuda:N' or a torch\.device; got "):
        resolve_device(device)


@pytest.mark.parametrize("device", ["meta", torch.device("mps"), "xpu:0"])
def test_other_devices_are_not_supported(device: Any) -> None:
    with pytest.raises(NotImplementedError, match="only cpu and cuda devices"):
        resolve_device(device)


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
def test_which_device_cuda_is(current: int, count: int, local_rank: str | None, expected: int) -> None:
    assert cuda_index(current, count, local_rank) == expected


def test_what_does_what_a_device_does_is_one() -> None:
    device = SimulatedDevice()
    assert isinstance(device, DeviceBackend)
    assert resolve_device(device) is backend_for(device) is device
    cuda = backend_for(torch.device("cuda", 3))
    assert isinstance(cuda, DeviceBackend)
    assert repr(cuda) == "<CudaBackend cuda:3>"


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Any:
    return request.param()


def numbers(backend: DeviceBackend, start: int) -> torch.Tensor:
    """Return bytes that a copy is made from beside the host's work."""
    memory = backend.host_memory(SIZE)
    memory.copy_((torch.arange(SIZE) + start).to(torch.uint8))
    return memory


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
    side = backend.new_stream()
    rig.busy(side)
    backend.copy(numbers(backend, 1), side)
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
    rig.busy(side)
    host = numbers(backend, 1)
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
    side = backend.new_stream()
    rig.busy(side)
    copied = backend.copy(numbers(backend, 1), side)
    other = numbers(backend, 2)
    expected = backend.copy(other, side)
    rig.finish()
    assert torch.equal(copied.cpu() + 1, expected.cpu())


def test_device_memory_is_given_out_again_at_once_for_its_own_stream(rig: Any) -> None:
    backend = rig.backend
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
    host = numbers(backend, 1)
    copied = backend.copy(host, side)
    backend.wait_event(other, backend.record_event(side))
    backend.record_stream(copied, other)
    rig.busy(other)
    with backend.stream(other):
        value = rig.read(copied)
    address = copied.data_ptr()
    del copied
    again = backend.copy(numbers(backend, 2), side)
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
