"""Sends a workload's requests to `Inference.Generate` at once and times the streamed answers.

Entry point: `run_grpc`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.cli.measurement import RequestTiming, Run
from octavo.cli.workloads import BenchRequest
from octavo.client import AsyncClient

OnTokens = Callable[[int], None]


async def run_grpc(
    address: str,
    requests: Sequence[BenchRequest],
    sampling: dict[str, Any],
    on_tokens: OnTokens,
    api_key: str | None = None,
) -> Run:
    """Send `requests` to the router at `address` (host:port), all at once."""
    timings: list[RequestTiming] = []
    async with AsyncClient(address, api_key) as client, asyncio.TaskGroup() as group:
        for request in requests:
            timing = RequestTiming(len(request.token_ids), time.perf_counter())
            timings.append(timing)
            group.create_task(_generate(client, request, sampling, timing, on_tokens))
    return Run(tuple(timings))


async def _generate(
    client: AsyncClient,
    request: BenchRequest,
    sampling: dict[str, Any],
    timing: RequestTiming,
    on_tokens: OnTokens,
) -> None:
    timing.submitted_s = time.perf_counter()
    stream = await client.generate(
        token_ids=request.token_ids,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
        stream=True,
        **sampling,
    )
    async for delta in stream:
        if delta.token_ids:
            timing.frame(time.perf_counter())
            timing.num_output_tokens += len(delta.token_ids)
            on_tokens(len(delta.token_ids))
    if stream.usage is not None:
        timing.num_cached_tokens = stream.usage.cached_tokens
