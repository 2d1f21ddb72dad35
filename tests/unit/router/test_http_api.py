"""The HTTP API over a real server, with a scheduler that says exactly what it is told."""

import asyncio
import json
from typing import Any

import pytest

from octavo.v1 import common_pb2
from tests.fakes.byte_tokenizer import EOS
from tests.fakes.fake_scheduler import FakeScheduler, Plan, Script, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until

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


@BOTH
def test_an_answer_streamed_and_whole(path: str, body: dict[str, Any]) -> None:
    fake = byte_scheduler(script=saying("Hello, wörld! 🙂"), num_cached_tokens=16)

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, path, {**body, "max_tokens": 100})
        assert text_of(whole) == "Hello, wörld! 🙂"
        assert whole["choices"][0]["finish_reason"] == "stop"
        num_prompt = len("user:hi\nassistant:") if path == CHAT else 2
        # The ending id is counted, never shown.
        num_answer = len("Hello, wörld! 🙂".encode()) + 1
        assert whole["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        assert whole["model"] == "byte-model"
        assert router.outcomes() == {(router_label(path), "stop"): 2}

    run(fake, check)


def router_label(path: str) -> str:
    return "chat_completions" if path == CHAT else "completions"


@BOTH
def test_characters_of_several_tokens_are_never_cut(path: str, body: dict[str, Any]) -> None:
    text = "한국어 👨‍👩‍👧 naïve\u2028line\u0085sep\x0b\r\n"
    fake = byte_scheduler(script=saying(text))

    async def check(router: RunningRouter) -> None:
        for fake.tokens_per_step in (1, 3, 100):
            assert text_of(await both_ways(router, path, {**body, "max_tokens": 200})) == text

    run(fake, check)


@BOTH
def test_max_tokens_cuts_even_in_a_character(path: str, body: dict[str, Any]) -> None:
    fake = byte_scheduler(script=saying("é" * 50, ends=False))

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, path, {**body, "max_tokens": 3})
        assert text_of(whole) == "é\ufffd"
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 3

    run(fake, check)


def test_defaults_of_max_tokens() -> None:
    fake = byte_scheduler(max_model_len=100)

    async def check(router: RunningRouter) -> None:
        for body in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
            await router.http.post(CHAT, json={"messages": HI, **body})
            assert fake.submits[-1].sampling.max_tokens == 100 - len("user:hi\nassistant:")
        await router.http.post(TEXT, json={"prompt": "hi"})
        assert fake.submits[-1].sampling.max_tokens == 16
        # A default never makes a request fail: it is what is left.
        await router.http.post(TEXT, json={"prompt": "x" * 95})
        assert fake.submits[-1].sampling.max_tokens == 5
        await router.http.post(CHAT, json={"messages": HI, "max_completion_tokens": 7})
        assert fake.submits[-1].sampling.max_tokens == 7

    run(fake, check)


def test_default_fits_into_the_pool() -> None:
    fake = byte_scheduler(max_model_len=1000, max_request_tokens=64)

    async def check(router: RunningRouter) -> None:
        await router.http.post(CHAT, json={"messages": HI})
        assert fake.submits[-1].sampling.max_tokens == 64 - len("user:hi\nassistant:")

    run(fake, check)


def test_context_length() -> None:
    fake = byte_scheduler(max_model_len=100)

    async def check(router: RunningRouter) -> None:
        cases = [("x" * 100, 1), ("x" * 500, None), ("x" * 60, 41), ("x", 2**31 - 1)]
        for prompt, max_tokens in cases:
            answer = await router.http.post(TEXT, json={"prompt": prompt, "max_tokens": max_tokens})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert str(len(prompt)) in error["message"]
            assert "100" in error["message"]
        assert not fake.submits
        answer = await router.http.post(TEXT, json={"prompt": "x" * 60, "max_tokens": 40})
        assert answer.status_code == 200

    run(fake, check)


@BOTH
def test_n_choices(path: str, body: dict[str, Any]) -> None:
    fake = byte_scheduler(tokens_per_step=2)

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, path, {**body, "n": 3, "max_tokens": 5, "seed": 7}, 3)
        assert len({text_of(whole, i) for i in range(3)}) == 3
        assert whole["usage"]["completion_tokens"] == 15
        assert fake.submits[0].num_sequences == 3
        assert fake.submits[0].sampling.seed == 7

    run(fake, check)


def test_lists_of_prompts_are_prompt_major() -> None:
    fake = byte_scheduler(
        script=lambda submit, index: Plan([ids_of(submit.prompt_token_ids)[0], 48 + index])
    )

    async def check(router: RunningRouter) -> None:
        body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2}
        whole = await both_ways(router, TEXT, body, 4)
        assert [text_of(whole, i) for i in range(4)] == ["a0", "a1", "c0", "c1"]
        assert whole["usage"]["prompt_tokens"] == 4
        ids = {"prompt": [[97, 98], [99]], "max_tokens": 2}
        whole = await both_ways(router, TEXT, ids, 2)
        assert [text_of(whole, i) for i in range(2)] == ["a0", "c0"]
        whole = await both_ways(router, TEXT, {"prompt": [100, 101], "max_tokens": 2})
        assert text_of(whole) == "d0"

    run(fake, check)


STOPS: list[tuple[Any, str, int, str]] = [
    ("e t", " th", 6, "stop"),
    (["e tx", "zzz"], " the the the the", 16, "length"),
    ("e the the the", " th", 16, "stop"),
    (" the the the the the", " the the the the", 16, "length"),
    (["he", " th"], "", 3, "stop"),
    # Never looks into the prompt.
    ("hi", " the the the the", 16, "length"),
]


@BOTH
def test_stop_strings(path: str, body: dict[str, Any]) -> None:
    fake = byte_scheduler(script=saying(" the" * 20, ends=False))

    async def check(router: RunningRouter) -> None:
        for fake.tokens_per_step in (1, 4, 100):
            for stop, text, num_tokens, reason in STOPS:
                asked = {"stop": stop, "max_tokens": 16, "logprobs": _some(path)}
                whole = await both_ways(router, path, {**body, **asked})
                assert text_of(whole) == text
                assert whole["choices"][0]["finish_reason"] == reason
                assert whole["usage"]["completion_tokens"] == num_tokens
                logprobs = whole["choices"][0]["logprobs"]
                assert len(logprobs.get("content") or logprobs.get("tokens")) == num_tokens

    run(fake, check)


def _some(path: str) -> Any:
    return True if path == CHAT else 1


def test_a_stop_string_cancels_the_rest_at_the_scheduler() -> None:
    fake = byte_scheduler(script=saying(" the" * 100, ends=False), interval_s=0.001)

    async def check(router: RunningRouter) -> None:
        await router.http.post(TEXT, json={"prompt": "x", "stop": "e t", "max_tokens": 400})
        await until(lambda: bool(fake.cancels))
        (cancel,) = fake.cancels
        assert cancel.reason == 2  # STOP
        assert (cancel.sequence_index, cancel.num_kept_tokens) == (0, 6)
        assert fake.num_live == 0

    run(fake, check)


def test_stop_token_ids_end_and_are_hidden() -> None:
    def script(submit: Any, index: int) -> Plan:
        stops = ids_of(submit.sampling.stop_token_ids)
        ids = [*b"abc;def"]
        end = next((i + 1 for i, t in enumerate(ids) if t in stops), len(ids))
        return Plan(ids[:end], STOP)

    fake = byte_scheduler(script=script)

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, TEXT, {"prompt": "x", "stop_token_ids": [ord(";")]})
        assert text_of(whole) == "abc"
        assert whole["usage"]["completion_tokens"] == 4
        assert ids_of(fake.submits[0].sampling.stop_token_ids) == [ord(";"), EOS]
        await router.http.post(TEXT, json={"prompt": "x", "ignore_eos": True})
        assert ids_of(fake.submits[-1].sampling.stop_token_ids) == []

    run(fake, check)


@pytest.mark.parametrize(("vocab_size", "expected"), [(257, [10, EOS]), (256, [10])])
def test_the_tokenizers_ending_ids_end_answers_too(vocab_size: int, expected: list[int]) -> None:
    fake = FakeScheduler(script=saying("a"), vocab_size=vocab_size, eos_token_ids=(10,))

    async def check(router: RunningRouter) -> None:
        await router.http.post(TEXT, json={"prompt": "x"})
        assert ids_of(fake.submits[-1].sampling.stop_token_ids) == expected

    run(fake, check)


def test_chat_logprobs() -> None:
    fake = byte_scheduler(script=saying("é!"))

    async def check(router: RunningRouter) -> None:
        body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
        whole = await both_ways(router, CHAT, body)
        content = whole["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21], []]
        assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd", "!", "<eos>"]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == "é!"
        assert content[2]["top_logprobs"] == [
            {"token": "!", "logprob": -0.5, "bytes": [0x21]},
            {"token": '"', "logprob": -1.5, "bytes": [0x22]},
        ]
        for absent in ({}, {"top_logprobs": 0}, {"top_logprobs": None}):
            whole = await both_ways(router, CHAT, {"messages": HI, "logprobs": True, **absent})
            content = whole["choices"][0]["logprobs"]["content"]
            assert [entry["top_logprobs"] for entry in content] == [[]] * 4
        whole = await both_ways(router, CHAT, {"messages": HI, "logprobs": False})
        assert whole["choices"][0]["logprobs"] is None

    run(fake, check)


def test_completion_logprobs() -> None:
    fake = byte_scheduler(script=saying("aéb"))

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, TEXT, {"prompt": "x", "logprobs": 1})
        assert whole["choices"][0]["logprobs"] == {
            "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<eos>"],
            "token_logprobs": [-0.5] * 5,
            "top_logprobs": [
                {"a": -0.5},
                {"bytes:\\xc3": -0.5},
                {"bytes:\\xa9": -0.5},
                {"b": -0.5},
                {"<eos>": -0.5},
            ],
            "text_offset": [0, 1, 1, 2, 3],
        }
        # 0: the chosen token still has its own.
        whole = await both_ways(router, TEXT, {"prompt": "x", "logprobs": 0})
        assert whole["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}

    run(fake, check)


def test_what_the_scheduler_is_told() -> None:
    fake = byte_scheduler(block_size=16)

    async def check(router: RunningRouter) -> None:
        body = {
            "prompt": "0123456789abcdefX",
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 5,
            "min_p": 0.125,
            "seed": -1,
            "max_tokens": 3,
        }
        await router.http.post(TEXT, json=body, headers={"X-Request-Id": "abc-1"})
        submit = fake.submits[0]
        sampling = submit.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
        assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 2**64 - 1, 3)
        assert not sampling.HasField("logprobs")
        assert sampling.HasField("min_tokens")
        assert submit.request_id == "abc-1"
        assert bytes(ids_of(submit.prompt_token_ids)) == b"0123456789abcdefX"
        assert (len(submit.root_hash), len(submit.block_hashes)) == (16, 16)
        assert not submit.HasField("deadline_ms")
        await router.http.post(TEXT, json={"prompt": "x"})
        sampling = fake.submits[1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        assert fake.submits[1].handle != submit.handle

    run(fake, check)


def test_seeds() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        async def seeds(headers: dict[str, str], **body: Any) -> list[int]:
            before = len(fake.submits)
            await router.http.post(TEXT, json={"prompt": ["a", "b"], **body}, headers=headers)
            return [submit.sampling.seed for submit in fake.submits[before:]]

        key = {"Idempotency-Key": "order-7"}
        first = await seeds(key)
        assert await seeds(key) == first
        assert first[0] != first[1]
        assert await seeds({"Idempotency-Key": "order-8"}) != first
        assert await seeds({}) != await seeds({})
        # A given seed holds for every prompt: each draws what it would draw alone.
        assert await seeds(key, seed=5) == [5, 5]

    run(fake, check)


def test_models_and_names() -> None:
    fake = byte_scheduler(max_model_len=512)

    async def check(router: RunningRouter) -> None:
        listed = (await router.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["org/main", "alias"]
        assert listed["data"][0]["max_model_len"] == 512
        assert (await router.http.get("/v1/models/org/main")).json()["id"] == "org/main"
        answer = await router.http.get("/v1/models/other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        for given, said in [("alias", "alias"), (None, "org/main"), ("", "org/main")]:
            body = (await router.http.post(TEXT, json={"prompt": "x", "model": given})).json()
            assert body["model"] == said
        answer = await router.http.post(TEXT, json={"prompt": "x", "model": "gpt"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")

    run(fake, check, served_model_name=("org/main", "alias"))


def test_tokenize_and_detokenize() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        answer = await router.http.post("/tokenize", json={"prompt": "aé"})
        assert answer.json() == {"count": 3, "max_model_len": 2048, "tokens": [97, 195, 169]}
        answer = await router.http.post("/tokenize", json={"messages": HI})
        assert bytes(answer.json()["tokens"]) == b"user:hi\nassistant:"
        answer = await router.http.post("/detokenize", json={"tokens": [97, 195, 169, EOS]})
        assert answer.json() == {"prompt": "aé<eos>"}
        assert (await router.http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": HI}),
            ("/tokenize", {"prompt": 5}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": "a"}),
            ("/detokenize", {"tokens": [257]}),
            ("/detokenize", {"tokens": [True]}),
        ]:
            assert (await router.http.post(path, json=body)).status_code == 400

    run(fake, check)


def test_probes_and_version() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        for path in ("/livez", "/readyz", "/health"):
            answer = await router.http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert (await router.http.get("/version")).json()["version"]
        metrics = (await router.http.get("/metrics")).text
        assert "octavo_requests_in_flight 0.0" in metrics
        assert "octavo_router_sessions 1.0" in metrics
        router.service.is_draining = True
        assert (await router.http.get("/livez")).status_code == 200
        assert (await router.http.get("/readyz")).status_code == 503
        answer = await router.http.post(TEXT, json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    run(fake, check)


def test_not_ready_without_a_scheduler() -> None:
    async def main() -> None:
        async with running_router(redial_ms=1) as router:
            assert (await router.http.get("/health")).status_code == 503
            assert (await router.http.get("/livez")).status_code == 200
            answer = await router.http.post(CHAT, json={"messages": HI})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "unavailable"
            # Text work needs no scheduler.
            answer = await router.http.post("/tokenize", json={"prompt": "a"})
            assert answer.json() == {"count": 1, "max_model_len": None, "tokens": [97]}

    asyncio.run(main())


def test_stream_headers() -> None:
    fake = byte_scheduler(script=saying("x"))

    async def check(router: RunningRouter) -> None:
        answer = await router.http.post(CHAT, json={"messages": HI, "stream": True})
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        assert answer.headers["x-request-id"].startswith("req-")

    run(fake, check)


def test_one_event_per_write() -> None:
    """As chunks of the transfer encoding show: each holds one event."""
    fake = byte_scheduler(script=saying("abc"), interval_s=0.002)

    async def check(router: RunningRouter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        events: list[bytes] = []
        while size := int(await reader.readline(), 16):
            events.append(await reader.readexactly(size))
            await reader.readline()
        assert all(e.endswith(b"\n\n") and e.count(b"\n\n") == 1 for e in events)
        assert len(events) == 6  # role, a, b, c, finish, [DONE]
        writer.close()
        await writer.wait_closed()

    run(fake, check)


def test_equal_request_ids_are_strangers() -> None:
    fake = byte_scheduler(interval_s=0.002)

    async def check(router: RunningRouter) -> None:
        async def ask(prompt: str) -> str:
            answer = await router.http.post(
                TEXT, json={"prompt": prompt, "max_tokens": 8}, headers={"X-Request-Id": "same"}
            )
            assert answer.headers["x-request-id"] == "same"
            return text_of(answer.json())

        alone = [await ask("a"), await ask("b")]
        assert list(await asyncio.gather(ask("a"), ask("b"))) == alone

    run(fake, check)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [(b"a b\tc", "abc"), (b"x" * 10_000, "x" * 128), ("ü-1".encode(), "-1"), (b"", None)],
)
def test_request_ids_are_cleaned(given: bytes, echoed: str | None) -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        answer = await router.http.post(
            TEXT, json={"prompt": "x"}, headers=[(b"x-request-id", given)]
        )
        said = answer.headers["x-request-id"]
        assert said == echoed if echoed is not None else said.startswith("req-")
        assert fake.submits[0].request_id == said

    run(fake, check)
