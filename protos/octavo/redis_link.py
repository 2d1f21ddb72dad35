"""A connection to Redis that may fail at any time without hurting anybody.

The client is thrown away at its first failure and built anew after a pause, so that a dead
socket, an old primary (READONLY after a failover) or a changed cluster is never used twice.
It tries again for ever. Must not know: keys, records. Entry points: `RedisLink.call`, `execute`.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, ResponseError

from octavo.redis_url import RedisUrl, close_client, open_client

logger = logging.getLogger(__name__)

Operation = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """How long to wait, in seconds."""

    # For one answer; for one operation of several round trips.
    socket_s: float = 0.5
    call_s: float = 1.0
    # The pause after a failure doubles from the first to the second.
    min_pause_s: float = 0.1
    max_pause_s: float = 2.0


class RedisLink:
    """One user's connection; calls follow one another, never at the same time."""

    def __init__(self, url: RedisUrl, timing: LinkTiming, on_connect: Operation) -> None:
        self._url = url
        self._timing = timing
        self._on_connect = on_connect
        self._client: Any = None
        self._num_failures = 0

    async def call(self, operation: Operation) -> bool:
        """Run `operation(client)`; False if Redis failed, after the pause that follows.

        Whatever `operation` raises counts as Redis's failure.
        """
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task else 0
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self._timing.call_s):
                if self._client is None:
                    self._client = open_client(self._url, self._timing.socket_s)
                    await self._on_connect(self._client)
                await operation(self._client)
        except Exception as error:
            failure = error
        if task and task.cancelling() > num_cancels:
            # The client library swallowed a cancellation: without this its task never ends.
            raise asyncio.CancelledError
        if failure is not None:
            await self._fail(failure)
            return False
        if self._num_failures:
            logger.info("Redis at %s answers again", self._url)
        self._num_failures = 0
        return True

    async def close(self) -> None:
        """Drop the client, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                async with asyncio.timeout(self._timing.socket_s):
                    await close_client(client)

    async def _fail(self, error: Exception) -> None:
        if self._num_failures == 0:
            logger.warning(
                "Redis at %s fails (%s: %s); going on without it and trying again",
                self._url,
                type(error).__name__,
                error,
            )
        await self.close()
        timing = self._timing
        pause_s = min(timing.max_pause_s, timing.min_pause_s * 2 ** min(self._num_failures, 16))
        self._num_failures += 1
        # Jitter: a fleet that lost its Redis must not come back in step.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))


async def execute(pipeline: Any) -> list[Any]:
    """The pipeline's results; an error that concerns one command only is its result.

    Such are: memory full, a key of a foreign type, no permission. Raises the others: after
    them the connection must not be used again.
    """
    results: list[Any] = await pipeline.execute(raise_on_error=False)
    for result in results:
        if not isinstance(result, Exception):
            continue
        is_moved = isinstance(result, ReadOnlyError | ClusterDownError | AskError)
        if is_moved or not isinstance(result, ResponseError):
            raise result
    return results
