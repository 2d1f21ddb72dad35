"""What the tests of the HTTP API share: scripts of a scheduler, both endpoints, both ways."""

import asyncio
from typing import Any

import pytest

from octavo.v1 import common_pb2
from tests.fakes.byte_tokenizer import EOS
from tests.fakes.fake_scheduler import FakeScheduler, Plan, Script
from tests.fakes.router_process import RunningRouter, running_router

STOP = common_pb2.FINISH_REASON_STOP
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


BOTH = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})], ids=["chat", "text"]
)


def saying(text: str | bytes, *, ends: bool = True) -> Script:
    """A script that answers `text`, then EOS if `ends`; max_tokens cuts it."""
    data = text.encode() if isinstance(text, str) else text

    def script(submit: Any, index: int) -> Plan:
        ids = [*data, EOS] if ends else [*data]
        budget = submit.sampling.max_tokens
        return Plan(ids[:budget], STOP) if ends and len(ids) <= budget else Plan(ids[:budget])

    return script


def text_of(body: dict[str, Any], index: int = 0) -> str:
    choice = body["choices"][index]
    assert choice["index"] == index
    return choice["message"]["content"] if "message" in choice else choice["text"]


async def both_ways(
    router: RunningRouter, path: str, body: dict[str, Any], num_choices: int = 1
) -> dict[str, Any]:
    """The unstreamed answer, after checking that the streamed one adds up to the same."""
    answer = await router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    streamed = await router.stream(
        path, {**body, "stream_options": {"include_usage": True}}, num_choices
    )
    assert streamed.usage == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        assert streamed.text(index) == text_of(whole, index)
        assert streamed.finish(index) == choice["finish_reason"]
        if choice["logprobs"] is None:
            assert all(c["logprobs"] is None for c in streamed.choices)
        elif path == CHAT:
            assert streamed.logprobs(index) == choice["logprobs"]["content"]
        else:
            assert streamed.text_logprobs(index) == choice["logprobs"]
    return whole


def run(fake: FakeScheduler, check: Any, **settings: Any) -> None:
    async def main() -> None:
        async with running_router(fake, **settings) as router:
            await check(router)

    asyncio.run(main())
