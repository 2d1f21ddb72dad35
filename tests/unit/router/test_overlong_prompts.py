"""Texts far beyond the context are refused without tokenizing them; those near it are counted."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from octavo.v1 import inference_pb2
from octavo_router.prompts import MAX_CHARS_PER_TOKEN, MAX_TEXT_CHARS, PROBED_CHARS_PER_TOKEN
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

CONTEXT = 64
PROBED = PROBED_CHARS_PER_TOKEN * CONTEXT


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def chat_of_call(text: str) -> dict[str, Any]:
    """A history whose template shows what is no message's content."""
    call = {"function": {"name": "f", "arguments": json.dumps({"x": text})}}
    history = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": [*chat("x")["messages"], *history]}


# Path, body, and the longest text that may be tokenized to refuse it.
CASES = [
    ("/v1/completions", {"prompt": "x" * CONTEXT}, CONTEXT),
    ("/v1/completions", {"prompt": "x" * 2 * PROBED}, 2 * PROBED),
    ("/v1/completions", {"prompt": "x" * (2 * PROBED + 1)}, PROBED),
    ("/v1/completions", {"prompt": "x" * 1_000_000}, 0),
    ("/v1/completions", {"prompt": ["x", "x" * 1_000_000]}, 1),
    ("/v1/completions", {"prompt": "x" * 1_000_000, "truncate_prompt_tokens": 5}, 0),
    ("/v1/chat/completions", chat("x" * 1_000_000), 0),
    ("/v1/chat/completions", chat([{"type": "text", "text": "x" * 500_000}] * 2), 0),
    ("/v1/chat/completions", chat("x" * (2 * PROBED + 1)), PROBED),
    ("/v1/chat/completions", chat_of_call("x" * 1_000_000), 0),
    ("/v1/chat/completions", chat_of_call("x" * (2 * PROBED + 1)), PROBED),
    (
        "/v1/chat/completions",
        chat("x") | {"chat_template_kwargs": {"preamble": "x" * 1_000_000}},
        0,
    ),
    ("/v1/chat/completions", {"messages": chat("x" * 50)["messages"] * 4000}, 0),
]


def run(check: Any) -> None:
    async def main() -> None:
        async with running_router(byte_scheduler(max_model_len=CONTEXT)) as router:
            tokenizer: Any = router.service.pipeline.tokenizer
            encode = tokenizer.encode
            seen: list[int] = []

            def counting(text: str, **options: Any) -> Any:
                seen.append(len(text))
                return encode(text, **options)

            tokenizer.encode = counting
            await check(router, seen)

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body", "longest"), CASES)
def test_refused(path: str, body: dict[str, Any], longest: int) -> None:
    async def check(router: RunningRouter, seen: list[int]) -> None:
        answer = await router.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert error["param"].startswith(("prompt", "messages"))
        assert str(CONTEXT) in error["message"]
        assert max(seen, default=0) <= longest

    run(check)


def test_a_long_text_may_be_cut() -> None:
    async def check(router: RunningRouter, seen: list[int]) -> None:
        num_chars = MAX_CHARS_PER_TOKEN * CONTEXT
        body = {"prompt": "x" * num_chars, "truncate_prompt_tokens": 5, "max_tokens": 2}
        answer = await router.http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == 5
        assert seen == [num_chars]

    run(check)


def test_what_the_template_leaves_out_is_not_counted() -> None:
    async def check(router: RunningRouter, seen: list[int]) -> None:
        body = {"messages": [chat("x")["messages"][0] | {"reasoning": "x" * 1_000_000}]}
        answer = await router.http.post("/v1/chat/completions", json={**body, "max_tokens": 2})
        assert answer.json()["usage"]["prompt_tokens"] == max(seen) == len("user:x\nassistant:")

    run(check)


def test_what_is_tokenized_for_its_own_sake_is_bounded_too() -> None:
    async def check(router: RunningRouter, seen: list[int]) -> None:
        text = "x" * (MAX_TEXT_CHARS + 1)
        for body, param in (
            ({"prompt": text}, "prompt"),
            (chat([{"type": "text", "text": text[:-9]}] * 2), "messages"),
            (chat_of_call(text), "messages"),
        ):
            answer = await router.http.post("/tokenize", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith(param)
        call = router.inference.Tokenize(inference_pb2.InferenceTokenizeRequest(text=text))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not seen
        answer = await router.http.post("/tokenize", json={"prompt": text[:1000]})
        assert answer.json()["count"] == 1000

    run(check)
