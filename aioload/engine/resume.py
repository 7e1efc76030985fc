"""Resume: the state of a pass, for JSON, and whether it fits the loader that is to go on with it."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from aioload.engine.cursors import has_state
from aioload.engine.epochs import innermost
from aioload.engine.indices import IndexStream
from aioload.engine.items import Start, lane_states, lanes_at_start
from aioload.engine.position import Position
from aioload.engine.replay import cursor_for
from aioload.errors import StateError
from aioload.samplers.fingerprints import fingerprint_of, length_of
from aioload.samplers.states import differences

VERSION = 1


class Record:
    """What is kept of a pass, as long as somebody may ask for its state: not its threads, nor its batches.

    Args:
        stream: Its indices.
        position: How far the consumer is.
        starts: Where the lanes of an iterable dataset began.
    """

    def __init__(self, stream: IndexStream, position: Position, starts: Sequence[Start] = ()) -> None:
        self.position, self.epoch = position, stream.epoch
        self._stream, self._starts = stream, starts

    @property
    def base_seed(self) -> int:
        """The number drawn for the workers."""
        return self._stream.base_seed

    @property
    def num_items(self) -> int:
        """Items of an iterable dataset that have been handed out."""
        return sum(lane.mark["num_items"] for lane in self.position.lanes if lane.mark and "num_items" in lane.mark)

    def state(self) -> dict[str, Any]:
        """Return what another pass needs to go on from here."""
        position = self.position
        state = {"epoch": self.epoch, "num_yielded": position.num_yielded}
        if position.num_errors:
            state["num_errors"] = position.num_errors
        if not self._starts:
            return state | self._stream.state(position.lanes[0])
        state |= self._stream.state(self._stream.progress)
        return state | {"lanes": lane_states(position.lanes, self._starts), "latest_lane": position.latest_lane}


def start_of(
    epoch: int, dataset: Any, sampler: Any, generator: Any, *, num_lanes: int, base_seed: int | None
) -> dict[str, Any]:
    """Return the state of a pass that has not begun; ``base_seed`` is that of workers that persist."""
    state: dict[str, Any] = {
        "epoch": epoch,
        "num_yielded": 0,
        "sampler": cursor_for(sampler, generator).state_at_start(),
    }
    if base_seed is not None:
        state["base_seed"] = base_seed
    if isinstance(dataset, IterableDataset) and has_state(dataset):
        state["lanes"] = lanes_at_start(dataset, num_lanes)
    return state


def what_must_fit(
    dataset: Any, sampler: Any, generator: Any, *, batch_size: int | None, drop_last: bool, **others: Any
) -> Any:
    """Return, for JSON, what a state and the loader it is given to must agree in."""
    fits: dict[str, Any] = {"batch_size": getattr(sampler, "batch_size", batch_size)}
    fits["drop_last"] = getattr(sampler, "drop_last", drop_last)
    if isinstance(dataset, IterableDataset):
        fits["dataset_has_state"] = has_state(dataset)
    else:
        fits["dataset_length"] = length_of(dataset)
        fits["sampler"] = _fingerprint_of(sampler)
    fits["num_generators"] = len(cursor_for(sampler, generator).generators)
    fits["has_generator"] = generator is not None  # which a sampler may share
    return fits | others


def completed(state: dict[str, Any], fits: dict[str, Any]) -> dict[str, Any]:
    """Return a state with what makes it fit a loader."""
    fits["num_generators"] = len(state["sampler"].get("generators", ()))  # a sampler may have made one since
    return {"version": VERSION, **state, "fits": fits}


def is_start(state: Mapping[str, Any]) -> bool:
    """Whether a state is of a pass that has not begun."""
    return state["num_yielded"] == 0 and "num_done" not in state


def checked(state: Any, fits: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state that fits.

    Raises:
        StateError: It does not, or is no state of a loader.
    """
    if not isinstance(state, Mapping) or not {"version", "epoch", "num_yielded", "sampler", "fits"} <= set(state):
        message = f"load_state_dict needs what state_dict() of a loader returned; got {state!r}."
        raise StateError(message)
    if state["version"] != VERSION:
        message = f"The state is of version {state['version']!r}; this aioload knows version {VERSION}."
        raise StateError(message)
    found = list(differences(state["fits"], fits))
    if found:
        message = (
            f"The state is of another loader: {'; '.join(found)}. Make the loader with the dataset and the arguments "
            "that it had when the state was saved."
        )
        raise StateError(message)
    return copy.deepcopy(dict(state))


def num_items_again(state: Mapping[str, Any]) -> int:
    """Return how many items of an iterable dataset without a state must be loaded again, and dropped."""
    lanes = state.get("lanes", ())
    return sum(
        lane.get("num_items", 0)
        for lane in lanes
        if not lane.get("ended") and "dataset" not in lane and "iterator" not in lane
    )


def _fingerprint_of(sampler: Any) -> dict[str, Any]:
    inner = innermost(sampler)
    found: dict[str, Any] = fingerprint_of(inner)
    if inner is not sampler and type(sampler) is not BatchSampler:
        found["batch_sampler"] = type(sampler).__name__
        if not any(callable(getattr(each, "set_epoch", None)) for each in (sampler, inner)):
            found["num_batches"] = length_of(sampler)
    return found
