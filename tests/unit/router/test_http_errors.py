"""Bad requests over HTTP: each has its status, names its field, and reaches no scheduler."""

import json
from typing import Any

import pytest

from tests.fakes.router_process import RunningRouter
from tests.unit.router.http_errors import check_error, run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
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
