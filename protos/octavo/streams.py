"""What the services' long-lived gRPC streams have in common.

Must not know: messages, any service. Entry points: `END_OF_STREAM`, `first_of`, `ending`.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import grpc.aio

CallT = TypeVar("CallT", bound=grpc.aio.Call)
# grpc.aio's marker, which its type stubs leave out.
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one returns or raises; the others are cancelled, its error is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextlib.contextmanager
def ending(call: CallT) -> Generator[CallT]:
    """End the call on its server, too, however the block is left.

    A client call of grpc.aio ends by itself when the task that reads it is cancelled, but not in
    the moment between the request's sending and the first read: then its server goes on alone.
    """
    try:
        yield call
    finally:
        call.cancel()
