"""Work in threads that a handler waits for, whatever happens to the handler."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run `work` in a thread and return what it returns.

    A cancelled caller gets its cancellation only when the work is done: what the work uses stays locked until then.
    """
    return await to_its_end(asyncio.to_thread(work))


async def to_its_end(work: Awaitable[ResultT]) -> ResultT:
    """Wait for something that must not be left half done; a cancellation is passed on after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that nobody complains that it was not
        raise
