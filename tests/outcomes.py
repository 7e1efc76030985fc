"""Outcomes: all that one pass over a loader gives, errors among it, by each way of asking."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

from aioload import DataLoader

Load: TypeAlias = Callable[..., list[Any]]
"""Given a dataset and a loader's arguments, returns the batches, tensors made lists, and the exceptions raised."""

MOST_OUTCOMES = 1000
"""More than any test has batches: a pass that goes on for ever must not."""


def of_iterator(batches: Iterator[Any]) -> list[Any]:
    """Return what is still to come."""
    got: list[Any] = []
    for _ in range(MOST_OUTCOMES):
        try:
            batch = next(batches)
        except StopIteration:
            return got
        except BaseException as exc:
            got.append(exc)
        else:
            got.append(batch.tolist() if hasattr(batch, "tolist") else batch)
    message = f"It does not end: {got[:10]}."
    raise AssertionError(message)


async def of_async_iterator(batches: AsyncIterator[Any]) -> list[Any]:
    """Return what is still to come."""
    got: list[Any] = []
    for _ in range(MOST_OUTCOMES):
        try:
            batch = await anext(batches)
        except StopAsyncIteration:
            return got
        except BaseException as exc:
            got.append(exc)
        else:
            got.append(batch.tolist() if hasattr(batch, "tolist") else batch)
    message = f"It does not end: {got[:10]}."
    raise AssertionError(message)


def by_for(dataset: Any, **arguments: Any) -> list[Any]:
    with DataLoader(dataset, **{"num_workers": 2, **arguments}) as loader:
        return of_iterator(iter(loader))


def by_async_for(dataset: Any, **arguments: Any) -> list[Any]:
    got: list[Any] = []

    async def drain() -> None:  # asyncio.run() makes a repr of what a task returns, for 64 MB in seconds
        async with DataLoader(dataset, **{"num_workers": 2, **arguments}) as loader:
            got.extend(await of_async_iterator(aiter(loader)))

    asyncio.run(drain())
    return got


def by_for_inline(dataset: Any, **arguments: Any) -> list[Any]:
    return by_for(dataset, **{**arguments, "num_workers": 0})


def by_async_for_inline(dataset: Any, **arguments: Any) -> list[Any]:
    return by_async_for(dataset, **{**arguments, "num_workers": 0})


FACES: list[Load] = [by_for, by_async_for]
EVERY_WAY: list[Load] = [*FACES, by_for_inline, by_async_for_inline]
