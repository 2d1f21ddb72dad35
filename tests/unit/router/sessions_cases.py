"""What the tests of sessions share: cells that fall silent after some tokens, undisturbed texts."""

import asyncio
from typing import Any

from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until
from tests.sse_parser import Stream

BODY = {"prompt": "abc", "max_tokens": 60, "n": 2, "seed": 5}


def fake_cell(name: str, **options: Any) -> FakeScheduler:
    return byte_scheduler(scheduler_id=name, interval_s=0.003, num_cached_tokens=16, **options)


async def undisturbed() -> list[str]:
    fake = fake_cell("calm")
    async with running_router(fake) as router:
        stream = await router.stream("/v1/completions", BODY, 2)
        return [stream.text(0), stream.text(1)]


def check_same(stream: Stream, texts: list[str]) -> None:
    assert [stream.text(0), stream.text(1)] == texts
    assert stream.finish(0) == stream.finish(1) == "length"
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == 120
    # The first start's hits: a move adds none.
    assert stream.usage["prompt_tokens_details"]["cached_tokens"] == 16


async def streaming(router: RunningRouter) -> Any:
    body = {**BODY, "stream_options": {"include_usage": True}}
    return asyncio.create_task(router.stream("/v1/completions", body, 2))


async def num_sent(fake: FakeScheduler, count: int) -> None:
    """Until the fake sent `count` ids of every sequence."""
    await until(
        lambda: any(
            sequence.num_sent >= count
            for session in fake._sessions
            for sequence in session.sequences.values()
        )
    )
