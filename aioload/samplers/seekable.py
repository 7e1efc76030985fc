"""Seekable: a sampler that can begin an epoch anywhere; what the loader resumes by."""

from collections.abc import Iterator
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Seekable(Protocol[T_co]):
    """A sampler whose items depend on the epoch and the position alone."""

    @property
    def next_epoch(self) -> int:
        """The epoch that the next ``iter()`` will yield."""
        ...

    @property
    def next_position(self) -> int:
        """The position at which the next ``iter()`` will begin: 0, unless a state was loaded."""
        ...

    def iter_from(self, epoch: int, position: int, /) -> Iterator[T_co]:
        """Return the items of ``epoch`` (indices, or batches of a batch sampler) from ``position`` on.

        The sampler stays as it is: any number of these may go on at once, in any thread each.
        """
        ...

    def fingerprint(self) -> dict[str, JSON]:
        """Return what a saved state must agree with: the kind, numbers, seed, and short hashes of arrays."""
        ...
