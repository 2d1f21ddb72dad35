"""Penalties, bias, masks: what passes, and what the scheduler is told, from either door."""

import asyncio
import math
import struct
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo.v1 import common_pb2, inference_pb2
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.prompts import encode_bad_words
from octavo_router.token_rules import NO_RULES, TokenRules, parse_token_rules
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_scheduler import ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

VOCAB = 1000
NAN, INF = math.nan, math.inf
DEFAULTS = GenerationDefaults()
BAD: list[tuple[str, Any]] = [
    *(("presence_penalty", v) for v in (2.01, -2.01, NAN, INF, "1", True, [])),
    *(("frequency_penalty", v) for v in (2.01, -2.01, NAN, -INF, "1", False, {})),
    *(("repetition_penalty", v) for v in (0, -0.0, -1, 0.009, 100.1, NAN, INF, "1", True)),
    *(("logit_bias", v) for v in ([], "x", 5, True, {"": 1}, {"x": 1}, {"-1": 1}, {"1.0": 1})),
    *(("logit_bias", {k: 1}) for k in ("1000", "01", " 1", "1 ", "+1", "1e2", "9" * 30, "\u0661")),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    *(("logit_bias.5", {"5": v}) for v in (100.1, -101, NAN, INF, "1", True, None, [1])),
    *(("allowed_token_ids", v) for v in ([], "5", 5, {}, True, [0] * 1001)),
    *(("allowed_token_ids[1]", [0, v]) for v in (-1, VOCAB, 2**63, 1.0, "1", True, None)),
    *(("bad_words", v) for v in ("x", 5, {}, True, ["x"] * 129)),
    *(("bad_words[1]", ["a", v]) for v in ("", 5, None, ["b"], "x" * 257)),
]


@pytest.mark.parametrize(("param", "value"), BAD, ids=lambda v: repr(v)[:24])
def test_bad_values(param: str, value: Any) -> None:
    field = param.split("[")[0].split(".")[0]
    with pytest.raises(InvalidRequestError) as caught:
        parse_token_rules({field: value}, DEFAULTS, VOCAB)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} must be ")
    assert len(caught.value.message) < 250
    assert caught.value.message.isascii()


@pytest.mark.parametrize(
    ("raw", "rules"),
    [
        ({}, NO_RULES),
        ({"presence_penalty": 0, "frequency_penalty": -0.0, "repetition_penalty": 1}, NO_RULES),
        ({"logit_bias": {}, "bad_words": [], "allowed_token_ids": None}, NO_RULES),
        ({"presence_penalty": -2, "frequency_penalty": 2}, TokenRules(-2.0, 2.0)),
        ({"repetition_penalty": 0.01}, TokenRules(repetition_penalty=0.01)),
        ({"logit_bias": {"999": 100, "0": -100}}, TokenRules(logit_bias=((0, -100), (999, 100)))),
        ({"allowed_token_ids": [999, 0]}, TokenRules(allowed_token_ids=(999, 0))),
        ({"bad_words": ["a", "b c"]}, TokenRules(bad_words=("a", "b c"))),
    ],
)
def test_good_values(raw: dict[str, Any], rules: TokenRules) -> None:
    assert parse_token_rules(raw, DEFAULTS, VOCAB) == rules


@pytest.mark.parametrize("field", sorted({param.split("[")[0].split(".")[0] for param, _ in BAD}))
def test_null_is_absent(field: str) -> None:
    assert parse_token_rules({field: None}, DEFAULTS, VOCAB) is NO_RULES


@given(st.dictionaries(st.text(max_size=6), st.none() | st.integers() | st.floats() | st.text()))
def test_any_bias_is_parsed_or_refused(bias: dict[str, Any]) -> None:
    try:
        rules = parse_token_rules({"logit_bias": bias}, DEFAULTS, VOCAB)
    except InvalidRequestError:
        return
    assert len(rules.logit_bias) == len(bias)
    assert all(0 <= i < VOCAB and -100 <= value <= 100 for i, value in rules.logit_bias)


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    tokenizer = ByteTokenizer()
    assert encode_bad_words(tokenizer, []) == ()
    assert encode_bad_words(tokenizer, ["ab", " ab", "c"]) == (
        tuple(b"ab"),
        tuple(b" ab"),
        tuple(b"c"),
        tuple(b" c"),
    )
    with pytest.raises(InvalidRequestError) as caught:
        encode_bad_words(tokenizer, ["a", "  "])
    assert caught.value.param == "bad_words[1]"


RULES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "allowed_token_ids": [97, 98, 256],
    "bad_words": ["ab"],
    "min_tokens": 2,
}


def check_rules(sampling: common_pb2.SamplingParams) -> None:
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.5)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.25, 2)
    assert ids_of(sampling.logit_bias_ids) == [5, 256]
    assert struct.unpack("<2f", sampling.logit_bias_values) == (-100.0, 1.5)
    assert ids_of(sampling.allowed_token_ids) == [97, 98, 256]
    assert [ids_of(word) for word in sampling.bad_words] == [[*b"ab"], [*b" ab"]]


def test_what_the_scheduler_is_told() -> None:
    async def main() -> None:
        fake = byte_scheduler()
        async with running_router(fake) as router:
            bias = {"5": -100, "256": 1.5}
            for path, body in [
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ]:
                answer = await router.http.post(path, json={**body, **RULES, "logit_bias": bias})
                assert answer.status_code == 200, answer.text
                check_rules(fake.submits[-1].sampling)
            await generate(router, **RULES, logit_bias={5: -100, 256: 1.5})
            check_rules(fake.submits[-1].sampling)
            # Requests without rules carry none.
            await generate(router, presence_penalty=0, repetition_penalty=1)
            sampling = fake.submits[-1].sampling
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
                assert not sampling.HasField(name)
            assert not sampling.logit_bias_ids
            assert not sampling.bad_words

    asyncio.run(main())


async def generate(router: RunningRouter, **fields: Any) -> None:
    request = inference_pb2.InferenceGenerateRequest(text="x", max_tokens=4, **fields)
    async for _ in router.inference.Generate(request):
        pass


GRPC_BAD: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": math.nan}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ({"logit_bias": {257: 1}}, "logit_bias"),
    ({"logit_bias": {5: 101}}, "logit_bias.5"),
    ({"logit_bias": {5: math.nan}}, "logit_bias.5"),
    ({"allowed_token_ids": [257]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"min_tokens": 2**32 - 1}, "min_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"priority": -(2**31)}, "priority"),
    ({"user": "x" * 1025}, "user"),
]


def test_rules_that_bar_every_token() -> None:
    """Ids 97, 98 and 32 are a, b and a space; 256 ends an answer."""
    barred: list[dict[str, Any]] = [
        {"allowed_token_ids": [256], "min_tokens": 1},
        {"allowed_token_ids": [97, 256], "stop_token_ids": [97], "min_tokens": 2},
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [98, 97, 97], "bad_words": ["b", "a"]},
        {"allowed_token_ids": [97, 256], "bad_words": ["a"], "min_tokens": 1},
    ]
    drawable: list[dict[str, Any]] = [
        {"allowed_token_ids": [256]},
        {"allowed_token_ids": [256], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [97, 256], "bad_words": ["a"]},
        {"allowed_token_ids": [97, 98], "bad_words": ["a", "b c"], "min_tokens": 2},
        {"allowed_token_ids": [97], "bad_words": ["aa"]},
    ]

    async def main() -> None:
        fake = byte_scheduler()
        async with running_router(fake) as router:
            for fields in barred:
                body = {"prompt": "x", "max_tokens": 4, **fields}
                answer = await router.http.post("/v1/completions", json=body)
                assert answer.status_code == 400, fields
                error = answer.json()["error"]
                assert error["param"] == "allowed_token_ids"
                assert "bad_words and min_tokens" in error["message"]
            assert not fake.submits
            for fields in drawable:
                body = {"prompt": "x", "max_tokens": 4, **fields}
                answer = await router.http.post("/v1/completions", json=body)
                assert answer.status_code == 200, fields

    asyncio.run(main())


def test_bad_values_over_grpc() -> None:
    async def main() -> None:
        fake = byte_scheduler()
        async with running_router(fake) as router:
            for fields, param in GRPC_BAD:
                with pytest.raises(grpc.RpcError) as caught:
                    await generate(router, **fields)
                error: Any = caught.value
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
                assert dict(error.trailing_metadata())["octavo-param"] == param
            assert not fake.submits

    asyncio.run(main())
