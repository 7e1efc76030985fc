"""Testing: datasets whose samples wait until the test lets them go, and a device whose copies do.

A test of concurrent loading asks what is loaded while something else is not. Here the test decides::

    with GatedDataset(4) as dataset:
        batches = iter(DataLoader(dataset, num_workers=4))
        dataset.gates.wait_started(0, 1, 2, 3)  # all four are being loaded
        dataset.gates.open(2)
        dataset.gates.wait_finished(2)  # sample 2 has come, and waits for the three others
        dataset.gates.open_all()
        assert [int(batch) for batch in batches] == [0, 1, 2, 3]

So it does of a :class:`SimulatedDevice`, which needs no GPU::

    device = SimulatedDevice()
    batches = iter(DataLoader(range(4), 2, device=device))
    reading = device.read(next(batches))  # as a kernel would, on the current stream; nothing has been copied yet
    device.run()
    assert reading.value.tolist() == [0, 1]
"""

from aioload.testing.device import SimulatedDevice
from aioload.testing.gates import DEADLINE_S, AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems, Gates
from aioload.testing.streams import Reading, SimulatedEvent, SimulatedStream

__all__ = [
    "DEADLINE_S",
    "AsyncGatedDataset",
    "GatedDataset",
    "GatedFiles",
    "GatedItems",
    "Gates",
    "Reading",
    "SimulatedDevice",
    "SimulatedEvent",
    "SimulatedStream",
]
