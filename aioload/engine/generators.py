"""Generators: torch's sources of random numbers, and their states as text."""

import base64
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TypeAlias

import torch

StandIn: TypeAlias = Callable[[], "torch.Generator | None"]
"""Returns what torch's samplers are to draw from in place of the global generator; ``None`` while it is that itself."""


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw the number that torch draws for its workers from the loader's generator, or the global one."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def in_state(state: torch.Tensor) -> torch.Generator:
    """Return a new generator in that state."""
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def encoded(state: torch.Tensor) -> int | str:
    """Return a generator's state for JSON: its seed, if nothing has been drawn yet, or about 4.3 KB of text."""
    generator = in_state(state)
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    if torch.equal(fresh.get_state(), state):
        return generator.initial_seed()
    return base64.b64encode(zlib.compress(bytes(state.numpy()))).decode()


def decoded(value: int | str) -> torch.Tensor:
    """Return the state that :func:`encoded` was given."""
    if isinstance(value, int):
        return torch.Generator().manual_seed(value).get_state()
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(value))), dtype=torch.uint8)


def exchange(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor], into: list[torch.Tensor]) -> None:
    """Append to ``into`` where the generators are, and have them be in ``states``: no interrupt divides that."""
    present, moves = map(torch.Generator.get_state, generators), map(torch.Generator.set_state, generators, states)
    into.extend(map(itemgetter(0), zip(present, moves, strict=True)))


def distinct(candidates: Iterable[object]) -> list[torch.Generator]:
    """Return those that are generators, each once, in this order."""
    return list({id(each): each for each in candidates if isinstance(each, torch.Generator)}.values())


def put_back(generators: Sequence[torch.Generator], states: Sequence[int | str]) -> None:
    """Have each of ``generators`` be in the state that was saved of it."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(decoded(state))


@contextmanager
def global_generator_in(state: torch.Tensor | None) -> Iterator[None]:
    """Let torch's global generator be in ``state``, if that is known, and put it back afterwards."""
    present = torch.default_generator.get_state()
    if state is not None:
        torch.default_generator.set_state(state)
    try:
        yield
    finally:
        torch.default_generator.set_state(present)
