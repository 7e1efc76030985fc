"""Iterators: one pass over a loader, for ``for`` and for ``async for``."""

from collections.abc import Sized
from typing import Any

from aioload.engine.passes import Pass
from aioload.engine.settings import Answer


class _PassHolder:
    """What both faces of a pass have in common. Dropping the last reference ends the pass."""

    def __init__(self, loader: Sized, new: Pass) -> None:
        self._loader = loader  # keeps it, and so its slots and persistent threads, for as long as the pass
        self._pass = new

    def __len__(self) -> int:
        return len(self._loader)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._pass.run!r}>"

    def __reduce__(self) -> Any:
        message = f"{type(self).__name__} is at work and cannot be pickled or copied; pickle the DataLoader instead."
        raise TypeError(message)


class BatchIterator(_PassHolder):
    """One pass over a loader, for ``for`` and ``next``. Any thread may call ``next``, several at once."""

    def __init__(self, loader: Sized, new: Pass) -> None:
        super().__init__(loader, new)
        new.run.start()

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Any:
        """Return the next batch, which is the caller's, waiting until it is there.

        Raises:
            StopIteration: The pass is over.
            LoaderTimeoutError: It took longer than the loader's ``timeout``. Asking again goes on waiting.
            LoaderClosedError: The loader or this iterator was closed.
            ForkedIteratorError: The iterator was made before a fork, in the parent.
            BaseException: What the dataset, ``collate_fn`` or sampler raised for this batch. Asking again
                gives the batch after it.
        """
        batch = self._pass.run.next()
        if batch is Answer.OVER:
            self.close()
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the pass. A thread that waits in ``next`` gets a :class:`~aioload.errors.LoaderClosedError`."""
        self._pass.close()


class AsyncBatchIterator(_PassHolder):
    """One pass over a loader, for ``async for``. Several coroutines may await batches at once, of any loop."""

    def __init__(self, loader: Sized, new: Pass) -> None:
        super().__init__(loader, new)
        self._started = False

    def __aiter__(self) -> "AsyncBatchIterator":
        return self

    async def __anext__(self) -> Any:
        """Return the next batch, which is the caller's; the event loop goes on meanwhile.

        Raises as :meth:`BatchIterator.__next__`, at the end ``StopAsyncIteration``. A cancelled call loses no batch.
        """
        if not self._started:
            self._started = True
            self._pass.start_on_loop()
        batch = await self._pass.run.anext()
        if batch is Answer.OVER:
            await self.aclose()
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """End the pass. Who waits for a batch gets a :class:`~aioload.errors.LoaderClosedError`."""
        await self._pass.aclose()
