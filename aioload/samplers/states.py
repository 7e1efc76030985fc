"""States: whether a saved one fits the sampler it is given to."""

from collections.abc import Iterator, Mapping
from typing import Any

from aioload.arguments import MAX_SAMPLES, whole_number
from aioload.errors import ArgumentError


def checked(state: object, fingerprint: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Return the epoch and position of ``state``.

    Raises:
        ArgumentError: It has other fields, is of another sampler than ``fingerprint`` says, or of a position that an
            epoch of ``length`` items does not have.
    """
    if not isinstance(state, Mapping) or set(state) != {"epoch", "position", "sampler"}:
        msg = f"load_state_dict needs what state_dict() returned: epoch, position and sampler; got {state!r}"
        raise ArgumentError(msg)
    found = list(differences(state["sampler"], fingerprint))
    if found:
        msg = (
            f"The state is of another sampler than this {fingerprint.get('name')}: {'; '.join(found)}. "
            "Make the sampler with the arguments it had when the state was saved"
        )
        raise ArgumentError(msg)
    epoch = whole_number("The state's epoch", state["epoch"], 0, MAX_SAMPLES)
    return epoch, whole_number("The state's position", state["position"], 0, max(0, length - 1))


def differences(saved: object, own: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield in what a saved fingerprint differs from a sampler's own, one field each."""
    if not isinstance(saved, Mapping):
        yield f"{prefix or 'sampler'} is {saved!r} in the state and {dict(own)!r} here"
        return
    for field in dict.fromkeys([*own, *saved]):
        name = f"{prefix}.{field}" if prefix else str(field)
        if field not in own:
            yield f"{name} is {saved[field]!r} in the state and missing here"
        elif field not in saved:
            yield f"{name} is missing in the state and {own[field]!r} here"
        elif isinstance(own[field], Mapping):
            yield from differences(saved[field], own[field], name)
        elif saved[field] != own[field]:
            yield f"{name} is {saved[field]!r} in the state and {own[field]!r} here"
