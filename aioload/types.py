"""Protocols: the shapes a dataset may have. No base class is needed; the loader looks at the methods."""

import os
from collections.abc import Awaitable
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

Location: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""Where a sample's bytes are: a path (mounts included), a URL, or what else the loader's reader takes."""

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class MapDataset(Protocol[T_co]):
    """A sample by index. ``__getitem__`` runs on decode threads, several at a time."""

    def __getitem__(self, index: Any, /) -> T_co:
        """Return the sample of ``index``; the loader owns it from then on."""
        ...


@runtime_checkable
class AsyncDataset(Protocol[T_co]):
    """A sample by index, awaited: ``async def __getitem__``.

    All coroutines of a loader run on one event loop, in its own thread, for as long as the loader lives, so a
    client bound to the loop may be kept on the dataset over epochs.
    """

    def __getitem__(self, index: Any, /) -> Awaitable[T_co]:
        """Return an awaitable of the sample of ``index``."""
        ...


@runtime_checkable
class StagedDataset(Protocol[T_co]):
    """A sample in two stages, so that many reads wait at once while few threads decode.

    It should have ``__len__`` and ``__getitem__`` too, so that other loaders can use it. A class below that overrides
    ``__getitem__`` without defining both stages is asked by ``__getitem__``.
    """

    def location(self, index: Any, /) -> Location:
        """Return where the bytes of sample ``index`` are. Cheap: once per sample, on a read thread or the loop."""
        ...

    def decode(self, data: Any, index: Any, /) -> T_co:
        """Return the sample made from ``data``, the loader's until its batch is made: no buffer that is used again.

        Runs on a decode thread, or on the one that read, several at a time.

        Args:
            data: The file's ``bytes``; with a reader of the loader's, what that returned.
            index: The sample's index.
        """
        ...
