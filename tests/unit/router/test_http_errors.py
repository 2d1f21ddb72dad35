"""Bad requests over HTTP: each has its status, names its field, and reaches no scheduler."""

import asyncio
import json
from typing import Any, NoReturn

import pytest

from octavo.v1 import common_pb2
from octavo_router import http_generate
from tests.fakes.fake_scheduler import Plan
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
# What is sent raw (bytes) or as JSON, and the field that the error must name (None = none).
Case = tuple[str, Any, str | None]

BODIES: list[Case] = [
    (CHAT, raw, None)
    for raw in (
        b"{:",
        b"",
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b'{"messages": ',
        '{"messages": "hé"}'.encode("latin-1"),
        "\ufeff{}".encode(),
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"messages":[{"role":"user","content":"\\udc00\\ud83d"}]}',
        b'{"\\ud800": 1}',
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": -Infinity}',
        b'{"metadata": {"x": Infinity}}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    )
]
MESSAGES: list[Case] = [
    *((CHAT, {"messages": value}, "messages") for value in (None, [], "hi", 5, {}, True)),
    (CHAT, {}, "messages"),
    *((CHAT, {"messages": [value]}, "messages[0]") for value in (None, "hi", 5, [])),
    *(
        (CHAT, {"messages": [{"role": role, "content": "x"}]}, "messages[0].role")
        for role in (None, "", "User", "robot", 5, ["user"])
    ),
    *(
        (CHAT, {"messages": [{"role": "user", "content": value}]}, "messages[0].content")
        for value in (None, 5, {}, True)
    ),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    *(
        (CHAT, {"messages": [*HI, {"role": "user", "content": [part]}]}, "messages[1].content[0]")
        for part in ({"type": "image_url", "image_url": {}}, {"text": "x"}, "x", None)
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    *(
        (CHAT, {"messages": [{"role": "assistant", "content": "", name: {"x": 1}}]}, path)
        for name, path in [
            ("function_call", "messages[0].function_call"),
            ("audio", "messages[0].audio"),
        ]
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    # What the template refuses.
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
]
PROMPTS: list[Case] = [
    *((TEXT, {"prompt": value}, "prompt") for value in (None, [], "", 5, {}, True)),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": [""]}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt[1]"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"),
    (TEXT, {"prompt": [[1], []]}, "prompt[1]"),
    (TEXT, {"prompt": ["a", 5]}, "prompt[1]"),
    (TEXT, {"prompt": ["a", [1, "b"]]}, "prompt[1][1]"),
    *((TEXT, {"prompt": [value]}, "prompt[0]") for value in (-1, 257, 2**63, True, 5.0, None)),
    *((TEXT, {"prompt": [1, value]}, "prompt[1]") for value in (-1, 257, "a", 1.0, None, [1])),
    (TEXT, {"prompt": [[1], [257]]}, "prompt[1][0]"),
    (TEXT, {"prompt": ["a"] * 1025}, "prompt"),
    (TEXT, {"prompt": ["a"] * 1000, "n": 100}, "n"),
]
CHAT_FIELDS: list[Case] = [
    (CHAT, {"messages": HI, **fields}, name)
    for name, fields in [
        ("temperature", {"temperature": "0.5"}),
        ("n", {"n": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 5, "max_tokens": 6}),
        ("stream", {"stream": "yes"}),
        ("stream", {"stream": 1}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options", {"stream": True, "stream_options": True}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"logprobs": False, "top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("logprobs", {"logprobs": 1}),
        ("model", {"model": 5}),
        ("model", {"model": "m" * 300}),
        ("user", {"user": 5}),
        ("stop", {"stop": 5}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("audio", {"audio": {"voice": "x"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("best_of", {"best_of": 3}),
        ("best_of", {"best_of": 3, "n": 1, "stream": True}),
        *((f"guided_{kind}", {f"guided_{kind}": "x"}) for kind in ("json", "regex", "grammar")),
        ("echo", {"echo": True}),
        ("echo", {"echo": 1}),
        ("prompt", {"prompt": "x"}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        *(("prompt_logprobs", {"prompt_logprobs": v}) for v in (-1, 21, True, "1")),
        *(("logit_bias", {"logit_bias": {k: 1}}) for k in ("257", "-1", "x", "", "1.0", "+1")),
        *(
            ("logit_bias", {"logit_bias": v})
            for v in ([], "x", 5, {str(i): 1 for i in range(20000)})
        ),
        *(("logit_bias.5", {"logit_bias": {"5": v}}) for v in (101, -100.5, None, "1", True, [])),
        *(("presence_penalty", {"presence_penalty": v}) for v in (2.01, -2.01, "1", True)),
        *(("frequency_penalty", {"frequency_penalty": v}) for v in (2.01, -3, [], False)),
        *(("repetition_penalty", {"repetition_penalty": v}) for v in (0, -1, 101, "x")),
        *(("min_tokens", {"min_tokens": v}) for v in (-1, 1.5, True, 2**31)),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("min_tokens", {"min_tokens": 2040}),
        *(("allowed_token_ids", {"allowed_token_ids": v}) for v in ([], 5, {}, "x")),
        *(("allowed_token_ids[0]", {"allowed_token_ids": [v]}) for v in (257, -1, 1.0, None)),
        *(("bad_words", {"bad_words": v}) for v in ("x", 5, {}, ["x"] * 129)),
        *(("bad_words[0]", {"bad_words": [v]}) for v in ("", " ", 5, None, "x" * 257)),
        *(
            (name, {name: v})
            for v in (1, "true", [])
            for name in (
                "include_stop_str_in_output",
                "skip_special_tokens",
                "spaces_between_special_tokens",
                "return_token_ids",
                "add_generation_prompt",
                "continue_final_message",
                "add_special_tokens",
            )
        ),
        (
            "continue_final_message",
            {"continue_final_message": True, "add_generation_prompt": True},
        ),
        *(("truncate_prompt_tokens", {"truncate_prompt_tokens": v}) for v in (0, -2, 1.5, True)),
        ("chat_template", {"chat_template": "x"}),
        ("chat_template", {"chat_template": 5}),
        *(("chat_template_kwargs", {"chat_template_kwargs": v}) for v in ([], "x", 5)),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        *(("cache_salt", {"cache_salt": v}) for v in ("", 5, "x" * 257)),
        *(("priority", {"priority": v}) for v in (1.5, True, "1", 2**31)),
        *(("request_id", {"request_id": v}) for v in (5, "x" * 70000)),
        (
            "stream_options.continuous_usage_stats",
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": 1},
            },
        ),
    ]
]
TEXT_FIELDS: list[Case] = [
    (TEXT, {"prompt": "x", **fields}, name)
    for name, fields in [
        ("logprobs", {"logprobs": True}),
        ("logprobs", {"logprobs": 21}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 0, "echo": False}),
        ("max_tokens", {"max_tokens": -1, "echo": True}),
        ("min_tokens", {"min_tokens": 17}),
        ("min_tokens", {"min_tokens": 1, "max_tokens": 0, "echo": True}),
        ("best_of", {"best_of": 2, "n": 1}),
        ("suffix", {"suffix": "x"}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("messages", {"messages": HI}),
        ("max_completion_tokens", {"max_completion_tokens": 5}),
        ("top_logprobs", {"top_logprobs": 5}),
        ("continue_final_message", {"continue_final_message": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": 1}}),
        ("add_special_tokens", {"add_special_tokens": 1}),
    ]
]


def strict(text: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


def check_error(answer: Any, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = strict(answer.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert 0 < len(error["message"]) < 500
    return error


def run(check: Any, **settings: Any) -> None:
    async def main() -> None:
        fake = byte_scheduler()
        async with running_router(fake, **settings) as router:
            await check(router, fake)

    asyncio.run(main())


@pytest.mark.parametrize("cases", [BODIES, MESSAGES, PROMPTS, CHAT_FIELDS, TEXT_FIELDS], ids=len)
def test_bad_requests(cases: list[Case]) -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        for path, body, param in cases:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await router.http.post(
                path, content=data, headers={"content-type": "application/json"}
            )
            error = check_error(answer, 400, param)
            if param is not None and param != "messages":
                assert error["message"].startswith(param), error
        assert not fake.submits
        assert {outcome for _, outcome in router.outcomes()} == {"rejected"}
        assert sum(router.outcomes().values()) == len(cases)
        assert router.value("octavo_requests_in_flight") == 0
        answer = await router.http.post(TEXT, json={"prompt": "x"})
        assert answer.status_code == 200

    run(check)


def test_harmless_fields_are_ignored() -> None:
    body = {
        "messages": HI,
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "user": "u",
        "n": None,
        "best_of": 1,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "echo": False,
        "prompt_logprobs": None,
        "chat_template_kwargs": {},
        "priority": 0,
        "parallel_tool_calls": True,
        "no_such_field": [1, 2],
        "stream_options": None,
        "max_tokens": 2,
    }

    async def check(router: RunningRouter, fake: Any) -> None:
        answer = await router.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text

    run(check)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "s"}],
        [{"role": "assistant", "content": "a"}],
        [{"role": "developer", "content": "d"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": "nul \x00 here", "name": "bob"}],
        [{"role": "user", "content": []}],
        [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    ],
)
def test_good_messages(messages: Any) -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        answer = await router.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200

    run(check)


def test_text_parts_are_joined_by_newlines() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        async def ids(content: Any) -> bytes:
            body = {"messages": [{"role": "user", "content": content}]}
            return bytes((await router.http.post("/tokenize", json=body)).json()["tokens"])

        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert await ids(parts[:1]) == await ids("a")
        assert await ids(parts) == await ids("a\nb")

    run(check)


def test_routes_methods_sizes_and_types() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        http = router.http
        assert check_error(await http.get("/nope"), 404)["code"] == "not_found"
        assert check_error(await http.post("/v1/nope", json={}), 404)["code"] == "not_found"
        answer = await http.get(CHAT)
        assert check_error(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == "POST"
        answer = await http.post(TEXT, content=b'"' + b"x" * 5000, headers=JSON)
        assert check_error(answer, 413)["code"] == "request_too_large"

        async def chunks() -> Any:
            for _ in range(20):
                yield b" " * 1000

        answer = await http.post(TEXT, content=chunks(), headers=JSON)
        assert check_error(answer, 413)["code"] == "request_too_large"
        answer = await http.post(TEXT, content=b"{}", headers={"content-type": "text/plain"})
        check_error(answer, 400, "Content-Type")
        answer = await http.post(TEXT, content=b"{}", headers={**JSON, "content-encoding": "gzip"})
        check_error(answer, 400, "Content-Encoding")
        answer = await http.post(TEXT, json={"prompt": "x"}, headers={"idempotency-key": "k" * 300})
        check_error(answer, 400, "Idempotency-Key")

    run(check, max_body_bytes=4096)


JSON = {"content-type": "application/json"}


def test_a_refusal_of_the_scheduler_is_a_status_even_when_streaming() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        for code, status, retry in [(8, 429, 2500), (3, 400, None), (14, 503, 10), (13, 500, None)]:
            fake.reject = common_pb2.Error(
                code=code, message="no room", param="", retry_after_ms=retry
            )
            for stream in (False, True):
                answer = await router.http.post(TEXT, json={"prompt": "x", "stream": stream})
                assert check_error(answer, status)["message"] == "no room"
                if retry:
                    assert answer.headers["retry-after"] == str(-(-retry // 1000))
        outcomes = router.outcomes()
        assert outcomes == {("completions", "rejected"): 6, ("completions", "error"): 2}

    run(check)


def test_a_refusal_is_a_status_as_long_as_the_stream_has_no_row() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        fake.is_paused = True
        body = {"prompt": "x", "stream": True}
        posting = asyncio.create_task(router.http.post(TEXT, json=body))
        await asyncio.sleep(0.4)  # as a busy scheduler, or a second cell, takes
        fake.refuse_waiting(common_pb2.Error(code=8, message="no room", retry_after_ms=2500))
        answer = await posting
        assert check_error(answer, 429)["message"] == "no room"
        assert answer.headers["retry-after"] == "3"

    run(check)


def test_a_stream_that_waits_long_for_its_row_has_its_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_generate, "HEADERS_WAIT_S", 0.3)

    async def check(router: RunningRouter, fake: Any) -> None:
        fake.is_paused = True
        body = {"prompt": "x", "stream": True}
        async with router.http.stream("POST", TEXT, json=body) as answer:
            assert answer.status_code == 200
            fake.refuse_waiting(common_pb2.Error(code=8, message="no room", retry_after_ms=2500))
            text = (await answer.aread()).decode()
        assert '"message":"no room"' in text
        assert text.endswith("data: [DONE]\n\n")

    run(check)


def test_a_failing_sequence_is_one_error() -> None:
    failure = common_pb2.Error(code=13, message="the worker gave up")

    async def main() -> None:
        fake = byte_scheduler(
            script=lambda _, index: Plan(
                [97, 98], common_pb2.FINISH_REASON_ERROR if index else 2, failure if index else None
            )
        )
        async with running_router(fake) as router:
            body = {"prompt": "x", "n": 2}
            answer = await router.http.post(TEXT, json=body)
            assert check_error(answer, 500)["message"] == "the worker gave up"
            streamed = await router.stream(TEXT, body, 2)
            assert streamed.error is not None
            assert streamed.error["message"] == "the worker gave up"
            assert router.outcomes() == {("completions", "error"): 2}

    asyncio.run(main())


def test_deadline() -> None:
    async def main() -> None:
        fake = byte_scheduler(interval_s=0.01)
        async with running_router(fake, request_timeout_s=0.1) as router:
            body = {"prompt": "x", "max_tokens": 1000}
            answer = await router.http.post(TEXT, json=body)
            assert check_error(answer, 504)["code"] == "deadline_exceeded"
            streamed = await router.stream(TEXT, body)
            assert streamed.error is not None
            assert streamed.error["code"] == "deadline_exceeded"
            assert 0 < fake.submits[0].deadline_ms <= 100
            assert {cancel.reason for cancel in fake.cancels} == {3}
            assert router.outcomes() == {("completions", "deadline"): 2}

    asyncio.run(main())


def test_an_unexpected_failure_is_a_plain_500() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        def broken(*args: Any, **kwargs: Any) -> NoReturn:
            raise ZeroDivisionError("secret detail")

        router.service.pipeline.tokenizer.encode = broken  # type: ignore[method-assign]
        answer = await router.http.post(TEXT, json={"prompt": "x"})
        error = check_error(answer, 500)
        assert "secret" not in error["message"]
        assert answer.headers["access-control-allow-origin"] == "*"
        assert router.outcomes() == {("completions", "error"): 1}

    run(check)
