"""What ends an answer: stop strings, stop ids, the tokenizer's own."""

from typing import Any

import pytest

from tests.fakes.byte_tokenizer import EOS
from tests.fakes.fake_scheduler import FakeScheduler, Plan, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, until
from tests.unit.router.http_answers import BOTH, CHAT, STOP, TEXT, both_ways, run, saying, text_of

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
