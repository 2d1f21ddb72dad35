"""How a prompt is made: truncation, template options, start tokens, salt, priority, sizes."""

import asyncio
from typing import Any

import grpc
import pytest

from octavo.v1 import inference_pb2
from tests.fakes.fake_scheduler import FakeScheduler, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def run(fake: FakeScheduler, check: Any, **settings: Any) -> None:
    async def main() -> None:
        async with running_router(fake, **settings) as router:
            await check(router)

    asyncio.run(main())


async def prompt_of(router: RunningRouter, fake: FakeScheduler, path: str, **body: Any) -> bytes:
    """What is submitted; the Tokenize door must agree where nothing is cut."""
    answer = await router.http.post(path, json={"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return bytes(ids_of(fake.submits[-1].prompt_token_ids))


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, "j"), (4, "ghij"), (10, "abcdefghij"), (11, "abcdefghij")]
)
@pytest.mark.parametrize("prompt", ["abcdefghij", [*b"abcdefghij"]], ids=["text", "ids"])
def test_the_last_tokens_are_kept(prompt: Any, limit: int, kept: str) -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        body = {"prompt": prompt, "truncate_prompt_tokens": limit}
        assert await prompt_of(router, fake, TEXT, **body) == kept.encode()
        whole = (await router.http.post(TEXT, json={**body, "echo": True, "max_tokens": 2})).json()
        assert whole["choices"][0]["text"].startswith(kept)
        assert whole["usage"]["prompt_tokens"] == len(kept)

    run(fake, check)


def test_as_many_are_kept_as_fit() -> None:
    fake = byte_scheduler(max_model_len=100)

    async def check(router: RunningRouter) -> None:
        body = {"prompt": "x" * 500, "truncate_prompt_tokens": -1}
        assert len(await prompt_of(router, fake, TEXT, **body, max_tokens=30)) == 70
        # Absent is 16 for a completion, whatever is cut for it.
        assert len(await prompt_of(router, fake, TEXT, **body, max_tokens=None)) == 84
        assert fake.submits[-1].sampling.max_tokens == 16
        assert len(await prompt_of(router, fake, TEXT, **body, max_tokens=0, echo=True)) == 99
        # Absent is the rest of the context for a chat: one token at least, or those asked for.
        chat = {"messages": [{"role": "user", "content": "x" * 500}], "truncate_prompt_tokens": -1}
        assert len(await prompt_of(router, fake, CHAT, **chat, max_tokens=None)) == 99
        assert fake.submits[-1].sampling.max_tokens == 1
        for least in (1, 8, 90):
            options = {**chat, "max_tokens": None, "min_tokens": least}
            assert len(await prompt_of(router, fake, CHAT, **options)) == 100 - least
            assert fake.submits[-1].sampling.max_tokens == least
        fake.max_request_tokens = 60
        # What the cache holds counts too, from the next session on.
        fake.drop_sessions()
        sessions = router.service.sessions
        await until(lambda: sessions.model is not None and sessions.model.max_total_tokens == 60)
        assert len(await prompt_of(router, fake, TEXT, **body, max_tokens=30)) == 30

    run(fake, check)


def test_what_the_cache_holds_is_a_limit_as_the_context_is() -> None:
    fake = byte_scheduler(max_model_len=1000, max_request_tokens=100)

    async def check(router: RunningRouter) -> None:
        await prompt_of(router, fake, CHAT, messages=HI, max_tokens=None)
        assert fake.submits[-1].sampling.max_tokens == 100 - len("user:hi\nassistant:")
        await prompt_of(router, fake, TEXT, prompt="x" * 90, max_tokens=10)
        num_submits = len(fake.submits)
        for prompt, max_tokens, param in [(90, 11, "max_tokens"), (100, 1, "prompt")]:
            body = {"prompt": "x" * prompt, "max_tokens": max_tokens}
            answer = await router.http.post(TEXT, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["code"] == "context_length_exceeded"
            assert f"{prompt} tokens" in error["message"]
            assert "the cache holds 100 tokens" in error["message"]
        assert len(fake.submits) == num_submits

    run(fake, check)


TURNS = [*HI, {"role": "assistant", "content": "Well, "}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": HI}, "user:hi\nassistant:"),
        ({"messages": HI, "add_generation_prompt": True}, "user:hi\nassistant:"),
        ({"messages": HI, "add_generation_prompt": False}, "user:hi\n"),
        ({"messages": TURNS, "continue_final_message": True}, "user:hi\nassistant:Well, "),
        (
            {
                "messages": TURNS,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "user:hi\nassistant:Well, ",
        ),
        ({"messages": HI, "chat_template_kwargs": {"preamble": "P|"}}, "P|user:hi\nassistant:"),
        ({"messages": HI, "chat_template_kwargs": {"unknown": [1]}}, "user:hi\nassistant:"),
        ({"messages": [{"role": "user", "content": []}]}, "user:\nassistant:"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}
                ]
            },
            "user:a\nb\nassistant:",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "42"},
                ]
            },
            'assistant:{"name": "f", "arguments": {"a": 1}}\ntool:42\nassistant:',
        ),
    ],
)
def test_chats(body: dict[str, Any], expected: str) -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        assert (await prompt_of(router, fake, CHAT, **body)).decode() == expected
        tokens = (await router.http.post("/tokenize", json=body)).json()["tokens"]
        assert bytes(tokens).decode() == expected

    run(fake, check)


def test_a_requests_own_template_needs_the_operators_leave() -> None:
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}!{{ x }}"}

    async def refused(router: RunningRouter) -> None:
        for path in (CHAT, "/tokenize"):
            answer = await router.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
            assert "trust_request_chat_template" in answer.json()["error"]["message"]

    run(byte_scheduler(), refused)
    fake = byte_scheduler()

    async def allowed(router: RunningRouter) -> None:
        assert await prompt_of(router, fake, CHAT, **body) == b"hi!"
        variables = {"chat_template_kwargs": {"x": "y"}}
        assert await prompt_of(router, fake, CHAT, **body, **variables) == b"hi!y"
        request = inference_pb2.InferenceGenerateRequest(
            chat=inference_pb2.ChatMessages(
                messages=[inference_pb2.ChatMessage(role="user", content="hi")]
            ),
            chat_template="{{ messages[0].content }}!{{ x }}",
            chat_template_kwargs_json='{"x": "z"}',
            max_tokens=1,
        )
        assert [m async for m in router.inference.Generate(request)]
        assert bytes(ids_of(fake.submits[-1].prompt_token_ids)) == b"hi!z"
        for broken in ("{% for %}", "{{", "x" * 70_000):
            answer = await router.http.post(CHAT, json={**body, "chat_template": broken})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")

    run(fake, allowed, trust_request_chat_template=True)


def test_a_history_over_grpc() -> None:
    fake = byte_scheduler()
    call = inference_pb2.ToolCall(id="1", name="f", arguments_json='{"a": 1}')
    message = inference_pb2.ChatMessage
    history = [
        message(role="assistant", tool_calls=[call]),
        message(role="tool", content="42", tool_call_id="1"),
        message(role="assistant", content="It is"),
    ]

    async def check(router: RunningRouter) -> None:
        request = inference_pb2.InferenceTokenizeRequest(
            chat=inference_pb2.ChatMessages(messages=history), continue_final_message=True
        )
        answer = await router.inference.Tokenize(request)
        assert bytes(answer.token_ids).decode() == (
            'assistant:{"name": "f", "arguments": {"a": 1}}\ntool:42\nassistant:It is'
        )
        request.chat.messages[0].ClearField("tool_calls")
        with pytest.raises(grpc.RpcError) as caught:
            await router.inference.Tokenize(request)
        trailers: Any = caught.value
        assert dict(trailers.trailing_metadata())["octavo-param"] == "messages[0].content"
        for text in ("", "[]", "{", '{"messages": 1}'):
            request = inference_pb2.InferenceTokenizeRequest(
                chat=inference_pb2.ChatMessages(messages=history), chat_template_kwargs_json=text
            )
            with pytest.raises(grpc.RpcError) as caught:
                await router.inference.Tokenize(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]

    run(fake, check)


def test_different_salts_share_nothing() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        async def hashes(key: str, **body: Any) -> tuple[bytes, bytes]:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "x" * 40, "max_tokens": 1, **body}
            assert (await router.http.post(TEXT, json=body, headers=headers)).status_code == 200
            return fake.submits[-1].root_hash, fake.submits[-1].block_hashes

        asked = [
            (key, salt) for key in ("k1", "k2") for salt in ({}, *({"cache_salt": s} for s in "ab"))
        ]
        seen = [await hashes(key, **salt) for key, salt in asked]
        assert len(set(seen)) == len(asked)
        assert len({blocks[:16] for _, blocks in seen}) == len(asked)
        assert await hashes("k1", cache_salt="a") == await hashes("k1", cache_salt="a")

    run(fake, check, api_keys="k1:one,k2:two")


def test_smaller_priorities_are_larger_on_the_wire() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        for given, sent in [(None, 0), (0, 0), (5, -5), (-7, 7), (2**31 - 1, -(2**31) + 1)]:
            await router.http.post(TEXT, json={"prompt": "x", "priority": given})
            assert fake.submits[-1].priority == sent
        request = inference_pb2.InferenceGenerateRequest(text="x", priority=-3)
        assert [m async for m in router.inference.Generate(request)]
        assert fake.submits[-1].priority == 3

    run(fake, check)


def test_equal_ids_and_keys_are_strangers_when_one_is_cancelled() -> None:
    fake = byte_scheduler(interval_s=0.002)

    async def check(router: RunningRouter) -> None:
        headers = {"X-Request-Id": "same", "Idempotency-Key": "same"}
        body = {"prompt": "a", "max_tokens": 60}
        alone = (await router.http.post(TEXT, json=body, headers=headers)).json()["choices"]
        leaving = asyncio.create_task(router.http.post(TEXT, json=body, headers=headers))
        staying = asyncio.create_task(router.http.post(TEXT, json=body, headers=headers))
        await until(lambda: len(fake.submits) == 3)
        leaving.cancel()
        assert (await staying).json()["choices"] == alone
        assert len({submit.sampling.seed for submit in fake.submits}) == 1

    run(fake, check)
