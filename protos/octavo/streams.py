"""What the services' long-lived gRPC streams have in common.

Must not know: messages, any service. Entry points: `END_OF_STREAM`, `first_of`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc.aio

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
