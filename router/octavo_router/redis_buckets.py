"""Tenants' buckets in Redis: one script call per deal, a pipeline for all that are due.

Must not know: requests, errors, when to deal. Entry point: `RedisBuckets`.
"""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from octavo.keys import bucket_key
from octavo.redis_link import LinkTiming, RedisLink, execute
from octavo.redis_url import RedisUrl
from octavo_router.buckets import FORGET_S, Deal, DealRequest, Share

_DEAL = files("octavo_router").joinpath("lua/deal.lua").read_text()
# Longer than a bucket needs from its deepest debt to full.
_LEASE_S = 300.0


class RedisBuckets:
    """Buckets of all routers on one Redis. `router_id` must be this process's alone."""

    def __init__(
        self,
        url: str,
        router_id: str,
        timing: LinkTiming | None = None,
        forget_s: float = FORGET_S,
    ) -> None:
        """Raises ConfigurationError for a wrong URL."""
        self._router_id = router_id
        self._forget_ms = round(forget_s * 1000)
        self._link = RedisLink(RedisUrl.parse(url), timing or LinkTiming(), _greet)

    async def deal(self, requests: Sequence[DealRequest]) -> list[Deal | None]:
        deals: list[Deal | None] = []
        if await self._link.call(partial(self._run, requests=requests, deals=deals)):
            return deals
        return [None] * len(requests)

    async def close(self) -> None:
        await self._link.close()

    async def _run(
        self, client: Any, *, requests: Sequence[DealRequest], deals: list[Deal | None]
    ) -> None:
        pipeline = client.pipeline(transaction=False)
        for request in requests:
            pipeline.execute_command(
                *("EVAL", _DEAL, 1, bucket_key(request.tenant), self._router_id),
                *(self._forget_ms, round(_LEASE_S * 1000), int(request.is_leaving)),
                request.num_routers,
                *("" if value is None else value for need in request.needs for value in need),
            )
        deals += [None if isinstance(r, Exception) else _parse(r) for r in await execute(pipeline)]


async def _greet(client: Any) -> None:
    """Nothing to ask of a new connection."""


def _parse(answer: Sequence[bytes]) -> Deal:
    requests, tokens = (Share(int(answer[i]), float(answer[i + 1])) for i in (1, 3))
    return Deal(int(answer[0]), (requests, tokens))
