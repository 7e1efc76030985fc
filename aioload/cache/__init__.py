"""Caches: the bytes of samples, kept from one epoch to the next and, on disk, from one run to the next."""

from aioload.cache.base import Cache, key_of
from aioload.cache.disk import DiskCache
from aioload.cache.memory import MemoryCache

__all__ = ["Cache", "DiskCache", "MemoryCache", "key_of"]
