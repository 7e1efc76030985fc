"""Iterators: one pass over a loader, for ``for`` and for ``async for``."""

import warnings
from typing import Any, Protocol

from aioload.engine.passes import Pass
from aioload.engine.resume import Record
from aioload.engine.settings import Answer


class Loader(Protocol):
    """What an iterator needs of the loader that it is over."""

    @property
    def declared_items(self) -> int | None:
        """What an iterable dataset said that its length is, if it was asked."""
        ...

    def __len__(self) -> int:
        """Return the number of batches."""
        ...

    def state_of(self, record: Record) -> dict[str, Any]:
        """Return the state of one pass over the loader."""
        ...


class _PassHolder:
    """What both faces of a pass have in common. Dropping the last reference ends the pass."""

    def __init__(self, loader: Loader, new: Pass) -> None:
        self._loader = loader  # keeps it, and so its slots and persistent threads, for as long as the pass
        self._pass = new
        self._declared = loader.declared_items

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where this pass is; see :meth:`~aioload.loader.DataLoader.state_dict`, which is of the latest pass."""
        return self._loader.state_of(self._pass.run.record)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._pass.run!r}>"

    def _check_length(self) -> None:
        """Warn, once, if an iterable dataset yields more than it said that it would."""
        num_items = self._pass.run.record.num_items
        if self._declared is None or num_items <= self._declared:
            return
        message = (
            f"The dataset said that its length is {self._declared}, when len(loader) asked it, and {num_items} items "
            "have come by now. Its __len__ should count all that its workers yield together."
        )
        self._declared = None
        warnings.warn(message, UserWarning, stacklevel=3)  # the line of the loop

    def __reduce__(self) -> Any:
        message = f"{type(self).__name__} is at work and cannot be pickled or copied; pickle the DataLoader instead."
        raise TypeError(message)


class BatchIterator(_PassHolder):
    """One pass over a loader, for ``for`` and ``next``. Any thread may call ``next``, several at once."""

    def __init__(self, loader: Loader, new: Pass) -> None:
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
        if self._declared is not None:
            self._check_length()
        return batch

    def close(self) -> None:
        """End the pass. A thread that waits in ``next`` gets a :class:`~aioload.errors.LoaderClosedError`."""
        self._pass.close()


class AsyncBatchIterator(_PassHolder):
    """One pass over a loader, for ``async for``. Several coroutines may await batches at once, of any loop."""

    def __init__(self, loader: Loader, new: Pass) -> None:
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
        if self._declared is not None:
            self._check_length()
        return batch

    async def aclose(self) -> None:
        """End the pass. Who waits for a batch gets a :class:`~aioload.errors.LoaderClosedError`."""
        await self._pass.aclose()
