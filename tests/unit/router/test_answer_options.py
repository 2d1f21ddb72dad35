"""What stands in an answer: stops, special tokens, ids, counts in every chunk, request ids."""

import asyncio
import json
from typing import Any

import pytest

from octavo.v1 import common_pb2, inference_pb2
from tests.fakes.byte_tokenizer import EOS
from tests.fakes.fake_scheduler import FakeScheduler, Plan, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
STOP = common_pb2.FINISH_REASON_STOP
BOTH = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})], ids=["chat", "text"]
)


def run(fake: FakeScheduler, check: Any) -> None:
    async def main() -> None:
        async with running_router(fake) as router:
            await check(router)

    asyncio.run(main())


def forcing(*token_ids: int) -> Any:
    """As a scheduler does: ends at the first ending id, or at max_tokens."""

    def script(submit: Any, _: int) -> Plan:
        budget, stops = submit.sampling.max_tokens, ids_of(submit.sampling.stop_token_ids)
        for count, token_id in enumerate(token_ids[:budget], start=1):
            if token_id in stops:
                return Plan(token_ids[:count], STOP)
        return Plan(token_ids[:budget])

    return script


def text_of(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


async def both_ways(router: RunningRouter, path: str, body: dict[str, Any]) -> dict[str, Any]:
    whole = (await router.http.post(path, json=body)).json()
    streamed = await router.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert streamed.text() == text_of(whole)
    assert streamed.finish() == whole["choices"][0]["finish_reason"]
    assert streamed.usage == whole["usage"]
    ids = [i for choice in streamed.choices for i in choice.get("token_ids", ())]
    assert ids == whole["choices"][0].get("token_ids", [])
    return whole


THE = [*(" the" * 30).encode()]
# Stop, whether it is shown, text, tokens, reason; over " the the the ...".
STOPS: list[tuple[Any, bool, str, int, str]] = [
    ("e t", False, " th", 6, "stop"),
    ("e t", True, " the t", 6, "stop"),
    ("e tx", True, " the the the the", 16, "length"),
    (["the", "e t"], True, " the", 4, "stop"),
    (["the", " the"], True, " the", 4, "stop"),
    ("x" * 1000, True, " the the the the", 16, "length"),
]


@BOTH
def test_a_stop_string_may_be_part_of_the_text(path: str, body: dict[str, Any]) -> None:
    fake = byte_scheduler(script=forcing(*THE))

    async def check(router: RunningRouter) -> None:
        for fake.tokens_per_step in (1, 5):
            for stop, is_shown, text, num_tokens, reason in STOPS:
                asked = {
                    "stop": stop,
                    "max_tokens": 16,
                    "include_stop_str_in_output": is_shown,
                    "return_token_ids": True,
                }
                whole = await both_ways(router, path, {**body, **asked})
                assert text_of(whole) == text
                assert whole["choices"][0]["finish_reason"] == reason
                # Text, ids and counts end at the same place.
                assert whole["usage"]["completion_tokens"] == num_tokens
                assert whole["choices"][0]["token_ids"] == THE[:num_tokens]

    run(fake, check)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "ab"),
        ({"include_stop_str_in_output": True}, "ab;"),
        ({"skip_special_tokens": False}, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab;"),
    ],
)
def test_an_ending_id_is_shown_with_the_stops(asked: dict[str, Any], text: str) -> None:
    fake = byte_scheduler(script=forcing(97, 98, ord(";"), 99))

    async def check(router: RunningRouter) -> None:
        body = {"prompt": "x", "stop_token_ids": [ord(";")], "logprobs": 0, **asked}
        whole = await both_ways(router, TEXT, body)
        assert text_of(whole) == text
        assert whole["usage"]["completion_tokens"] == 3
        chat = {"messages": HI, "stop_token_ids": [ord(";")], "logprobs": True, **asked}
        content = (await router.http.post(CHAT, json=chat)).json()["choices"][0]["logprobs"]
        assert bytes(b for entry in content["content"] for b in entry["bytes"]).decode() == text

    run(fake, check)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": True}, "ab"),
        ({"skip_special_tokens": False}, "a<eos>b"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "a<eos>b"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "a<eos>b"),
        ({"skip_special_tokens": False, "stop": "os>"}, "a<e"),
    ],
)
def test_special_tokens_in_the_text(asked: dict[str, Any], text: str) -> None:
    fake = byte_scheduler(script=forcing(97, EOS, 98))

    async def check(router: RunningRouter) -> None:
        body = {"prompt": "x", "ignore_eos": True, "max_tokens": 3, "logprobs": 0, **asked}
        whole = await both_ways(router, TEXT, body)
        assert text_of(whole) == text
        offsets = whole["choices"][0]["logprobs"]["text_offset"]
        if "stop" not in asked:
            assert offsets == [0, 1, len(text) - 1]
        chat = {**body, "messages": HI, "logprobs": True}
        del chat["prompt"]
        content = (await router.http.post(CHAT, json=chat)).json()["choices"][0]["logprobs"]
        joined = bytes(b for entry in content["content"] for b in entry["bytes"]).decode()
        assert joined.startswith(text)

    run(fake, check)


def test_nothing_ends_an_answer_before_min_tokens() -> None:
    fake = byte_scheduler(script=forcing(*b"abcabcabc"))

    async def check(router: RunningRouter) -> None:
        for fake.tokens_per_step in (1, 4):
            for least, text, num_tokens in [
                (0, "a", 3),
                (1, "a", 3),
                # "bc" lies across the border: its beginning isn't looked at.
                (2, "abca", 6),
                (3, "abca", 6),
                (7, "abcabca", 9),
                (8, "abcabcabc", 9),
            ]:
                body = {"prompt": "x", "stop": "bc", "min_tokens": least, "max_tokens": 9}
                whole = await both_ways(router, TEXT, body)
                assert (text_of(whole), whole["usage"]["completion_tokens"]) == (text, num_tokens)
                assert fake.submits[-1].sampling.min_tokens == least

    run(fake, check)


@BOTH
def test_ids_of_prompt_and_answer(path: str, body: dict[str, Any]) -> None:
    fake = byte_scheduler(script=forcing(*"é!".encode(), EOS))

    async def check(router: RunningRouter) -> None:
        asked = {**body, "return_token_ids": True, "n": 2}
        whole = (await router.http.post(path, json=asked)).json()
        prompt = [*b"user:hi\nassistant:"] if path == CHAT else [*b"hi"]
        for choice in whole["choices"]:
            # The ending id is one of the answer's.
            assert choice["token_ids"] == [*"é!".encode(), EOS]
            assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
        streamed = await router.stream(path, asked, 2)
        for index in range(2):
            parts = [c for c in streamed.choices if c["index"] == index]
            assert [i for part in parts for i in part.get("token_ids", ())] == [
                *"é!".encode(),
                EOS,
            ]
            if path == TEXT:
                assert [p["prompt_token_ids"] for p in parts if "prompt_token_ids" in p] == [prompt]
        if path == CHAT:
            said = [c["prompt_token_ids"] for c in streamed.chunks if "prompt_token_ids" in c]
            assert said == [prompt, prompt]
        whole = (await router.http.post(path, json=body)).json()
        assert "token_ids" not in whole["choices"][0]

    run(fake, check)


@pytest.mark.parametrize("n", [1, 3])
@BOTH
def test_counts_in_every_chunk(path: str, body: dict[str, Any], n: int) -> None:
    fake = byte_scheduler(script=forcing(*b"hello world"), num_cached_tokens=16)

    async def check(router: RunningRouter) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {**body, "n": n, "stop": "wo", "stream": True, "stream_options": options}
        answer = await router.http.post(path, json=asked)
        events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
        chunks = [json.loads(event) for event in events]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == 8 * n
        assert chunks[-1]["choices"] == []
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        # Without include_usage it asks for nothing.
        asked["stream_options"] = {"continuous_usage_stats": True}
        answer = await router.http.post(path, json=asked)
        assert '"usage"' not in answer.text

    run(fake, check)


def test_a_model_named_like_the_counts_is_no_trap() -> None:
    name = 'x"usage":null'
    fake = byte_scheduler(script=forcing(*b"ab"))

    async def main() -> None:
        async with running_router(fake, served_model_name=(name,)) as router:
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"prompt": "x", "stream": True, "stream_options": options}
            answer = await router.http.post(TEXT, json=body)
            chunks = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e[6:7] == "{"]
            assert {chunk["model"] for chunk in chunks} == {name}
            assert all(isinstance(chunk["usage"], dict) for chunk in chunks)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("header", "field", "said"),
    [
        ("from-header", None, "from-header"),
        ("from-header", "from-body", "from-header"),
        (None, "from-body", "from-body"),
        (None, "with\r\nbreak ü", "withbreak"),
        (None, "x" * 1000, "x" * 128),
    ],
)
def test_the_headers_request_id_comes_first(
    header: str | None, field: str | None, said: str
) -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        headers = {"X-Request-Id": header} if header else {}
        for is_stream in (False, True):
            body = {"prompt": "x", "request_id": field, "stream": is_stream}
            answer = await router.http.post(TEXT, json=body, headers=headers)
            assert answer.headers["x-request-id"] == said
            assert fake.submits[-1].request_id == said

    run(fake, check)


def test_the_same_over_grpc() -> None:
    fake = byte_scheduler(script=forcing(97, EOS, ord(";"), 98))

    async def check(router: RunningRouter) -> None:
        async def text(**fields: Any) -> str:
            request = inference_pb2.InferenceGenerateRequest(
                text="x", ignore_eos=True, max_tokens=4, **fields
            )
            return "".join([m.text async for m in router.inference.Generate(request)])

        assert await text() == "a;b"
        assert await text(skip_special_tokens=False) == "a<eos>;b"
        assert await text(stop=[";"]) == "a"
        assert await text(stop=[";"], include_stop_str_in_output=True) == "a;"
        assert await text(stop_token_ids=[ord(";")], include_stop_str_in_output=True) == "a;"
        assert await text(stop=["a", ";"], min_tokens=1) == "a"

    run(fake, check)
