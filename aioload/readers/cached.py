"""Cached: reads that a cache comes before."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from aioload.cache import Cache, DiskCache, MemoryCache
from aioload.readers.threads import threads_of_this_loop
from aioload.stats import Tally


class CachedReads:
    """Reads of one pass: from the cache where it has the bytes, or else from the storage, and then into the cache.

    Args:
        cache: The cache.
        read: Returns what is at a location, or an awaitable of it.
        size_of: Refuses what ``read`` should not have returned.
        tally: Where hits and misses are counted, by any thread: of a number that is at hand, without a call in between.
    """

    def __init__(self, cache: Cache, read: Callable[[Any], Any], size_of: Callable[[Any], int], tally: Tally) -> None:
        self._cache, self._read, self._size_of, self._tally = cache, read, size_of, tally
        self._get, self._put = cache.get, cache.put
        if type(cache).put in (DiskCache.put, MemoryCache.put):  # what was read before it is cleared is not to come in
            owned: Any = cache
            self._put = functools.partial(owned.put, generation=owned.generation)

    def read(self, location: Any) -> bytes:
        """Return the bytes at a location. Blocks."""
        data = self.look(location)
        return self.keep(location, self._read(location)) if data is None else data

    def look(self, location: Any) -> bytes | None:
        """Return the bytes that the cache has of a location, if any. Blocks."""
        data = self._get(location)
        if data is not None:
            self._tally.cache_hits += 1
        return data

    def keep(self, location: Any, data: Any) -> bytes:
        """Return what has been read from the storage as ``bytes``, which the cache now has too. Blocks."""
        content = self._bytes_of(data)
        self._put(location, content)
        self._tally.cache_misses += 1
        return content

    async def look_async(self, location: Any) -> bytes | None:
        """As :meth:`look`; a cache that may block does so in a thread beside the running loop."""
        data = await self._call(self._get, location)
        if data is not None:
            self._tally.cache_hits += 1
        return data  # type: ignore[no-any-return]

    async def keep_async(self, location: Any, data: Any) -> bytes:
        """As :meth:`keep`, in such a thread."""
        content = self._bytes_of(data)
        await self._call(self._put, location, content)
        self._tally.cache_misses += 1
        return content

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if isinstance(self._cache, MemoryCache):
            return function(*args)
        with threads_of_this_loop().lend() as thread:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *args)

    def _bytes_of(self, data: Any) -> bytes:
        """Return what was read as ``bytes``, as the cache will: a view of a file, say, must not seem to be another."""
        if type(data) is bytes:
            return data
        self._size_of(data)
        return memoryview(data).tobytes()
