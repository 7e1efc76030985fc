"""Readers: from a location to its bytes."""

from aioload.cache import Cache, DiskCache, MemoryCache
from aioload.readers.aiofiles import AiofilesReader
from aioload.readers.base import BytesLike, Reader, is_async, num_bytes
from aioload.readers.fsspec import FsspecReader
from aioload.readers.hedge import Hedge
from aioload.readers.local import LocalReader, read_file
from aioload.readers.mapped import MmapReader
from aioload.readers.objects import ObjectStoreReader
from aioload.readers.policy import ReadPolicy
from aioload.readers.schemes import SchemeReader

__all__ = [
    "AiofilesReader",
    "BytesLike",
    "Cache",
    "DiskCache",
    "FsspecReader",
    "Hedge",
    "LocalReader",
    "MemoryCache",
    "MmapReader",
    "ObjectStoreReader",
    "ReadPolicy",
    "Reader",
    "SchemeReader",
    "is_async",
    "num_bytes",
    "read_file",
]
