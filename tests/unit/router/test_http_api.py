"""The HTTP API over a real server, with a scheduler that says exactly what it is told."""

from typing import Any

from tests.fakes.fake_scheduler import Plan, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler
from tests.unit.router.http_answers import BOTH, CHAT, HI, TEXT, both_ways, run, saying, text_of


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
