"""The gRPC door: the HTTP API's rules in the protocol's shapes."""

import asyncio
import math
from typing import Any

import grpc
import pytest

from octavo.v1 import common_pb2, inference_pb2
from tests.fakes.byte_tokenizer import EOS
from tests.fakes.fake_scheduler import Plan, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until

Generate = inference_pb2.InferenceGenerateRequest
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def chat(*turns: tuple[str, str]) -> inference_pb2.ChatMessages:
    messages = [inference_pb2.ChatMessage(role=role, content=text) for role, text in turns]
    return inference_pb2.ChatMessages(messages=messages)


async def generate(router: RunningRouter, request: Any, **options: Any) -> list[Any]:
    return [message async for message in router.inference.Generate(request, **options)]


def run(check: Any, script: Any = None, **settings: Any) -> None:
    async def main() -> None:
        fake = byte_scheduler(num_cached_tokens=16, **({"script": script} if script else {}))
        async with running_router(fake, **settings) as router:
            await check(router, fake)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "num_prompt"),
    [
        (Generate(text="abc"), 3),
        (Generate(token_ids=inference_pb2.TokenIds(token_ids=[97, 98, 256])), 3),
        (Generate(chat=chat(("user", "hi"))), len("user:hi\nassistant:")),
    ],
    ids=["text", "ids", "chat"],
)
def test_generate(request_: Any, num_prompt: int) -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        request_.request_id = "r 1"
        request_.max_tokens = 20
        messages = await generate(router, request_)
        assert "".join(message.text for message in messages) == "wörld"
        ids = [token_id for message in messages for token_id in message.token_ids]
        assert ids == [*"wörld".encode(), EOS]
        assert {message.request_id for message in messages} == {"r1"}
        assert [m.finish_reason for m in messages if m.finish_reason] == [STOP]
        usage = [m.usage for m in messages if m.HasField("usage")]
        assert len(usage) == 1
        assert messages[-1].usage == inference_pb2.GenerateUsage(
            prompt_tokens=num_prompt, completion_tokens=7, cached_tokens=16
        )
        assert router.outcomes() == {("grpc_generate", "stop"): 1}

    run(check, lambda *_: Plan([*"wörld".encode(), EOS], STOP))


def test_choices_logprobs_and_stops() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        messages = await generate(
            router, Generate(text="x", n=3, max_tokens=4, logprobs=2, seed=-1)
        )
        assert {message.index for message in messages} == {0, 1, 2}
        assert sorted(m.index for m in messages if m.finish_reason == LENGTH) == [0, 1, 2]
        for message in messages:
            assert len(message.logprobs) == len(message.token_ids)
            for token_id, entry in zip(message.token_ids, message.logprobs, strict=True):
                assert (entry.token_id, entry.logprob) == (token_id, -0.5)
                assert [top.token_id for top in entry.top] == [token_id, token_id + 1]
        assert messages[-1].usage.completion_tokens == 12
        assert fake.submits[0].sampling.seed == 2**64 - 1
        text = "".join(m.text for m in await generate(router, Generate(text="x", max_tokens=9)))
        messages = await generate(router, Generate(text="x", stop=[text[3:5]], max_tokens=9))
        assert "".join(m.text for m in messages) == text[:3]
        assert messages[-1].usage.completion_tokens == 5
        await generate(router, Generate(text="x", stop_token_ids=[5, 6], ignore_eos=True))
        assert ids_of(fake.submits[-1].sampling.stop_token_ids) == [5, 6]
        # Unset is the default, not zero.
        assert fake.submits[-1].sampling.temperature == 1.0
        assert not fake.submits[-1].sampling.HasField("logprobs")
        await generate(router, Generate(text="x", idempotency_key="k"))
        await generate(router, Generate(text="x", idempotency_key="k"))
        assert fake.submits[-1].sampling.seed == fake.submits[-2].sampling.seed

    run(check)


BAD: list[tuple[Any, str | None]] = [
    (Generate(), None),
    (Generate(text=""), "prompt"),
    (Generate(token_ids=inference_pb2.TokenIds()), "prompt"),
    (Generate(token_ids=inference_pb2.TokenIds(token_ids=[257])), "token_ids[0]"),
    (Generate(token_ids=inference_pb2.TokenIds(token_ids=[1, 2**32 - 1])), "token_ids[1]"),
    (Generate(chat=chat()), "messages"),
    (Generate(chat=chat(("robot", "x"))), "messages[0].role"),
    (Generate(chat=chat(("tool", "x"))), "messages"),
    (Generate(text="x", temperature=math.nan), "temperature"),
    (Generate(text="x", temperature=math.inf), "temperature"),
    (Generate(text="x", temperature=-1), "temperature"),
    (Generate(text="x", top_p=1.5), "top_p"),
    (Generate(text="x", top_p=math.nan), "top_p"),
    (Generate(text="x", top_k=-2), "top_k"),
    (Generate(text="x", min_p=-math.inf), "min_p"),
    (Generate(text="x", max_tokens=0), "max_tokens"),
    (Generate(text="x", max_tokens=2**32 - 1), "max_tokens"),
    (Generate(text="x", max_tokens=2048), "max_tokens"),
    (Generate(text="x", n=0), "n"),
    (Generate(text="x", n=129), "n"),
    (Generate(text="x", logprobs=21), "logprobs"),
    (Generate(text="x", stop=[""]), "stop[0]"),
    (Generate(text="x", stop=["x"] * 17), "stop"),
    (Generate(text="x", stop_token_ids=[300]), "stop_token_ids[0]"),
    (Generate(text="x", idempotency_key="k" * 257), "Idempotency-Key"),
]


def test_bad_requests() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        for request, param in BAD:
            with pytest.raises(grpc.RpcError) as caught:
                await generate(router, request)
            error: Any = caught.value
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (request, error.details())
            trailers = dict(error.trailing_metadata())
            assert trailers.get("octavo-param") == param, request
            assert error.details()
        assert not fake.submits
        assert router.outcomes() == {("grpc_generate", "rejected"): len(BAD)}
        with pytest.raises(grpc.RpcError) as caught:
            await generate(router, Generate(text="x", model="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]

    run(check)


def test_refusals_say_when_to_come_back() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        fake.reject = common_pb2.Error(code=8, message="full", retry_after_ms=1500)
        with pytest.raises(grpc.RpcError) as caught:
            await generate(router, Generate(text="x"))
        error: Any = caught.value
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert dict(error.trailing_metadata())["octavo-retry-after-ms"] == "1500"

    run(check)


def test_deadline() -> None:
    async def main() -> None:
        fake = byte_scheduler(interval_s=0.01)
        async with running_router(fake) as router:
            with pytest.raises(grpc.RpcError) as caught:
                await generate(router, Generate(text="x", max_tokens=1500), timeout=1.0)
            error: Any = caught.value
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            # gRPC rounds a time-out up on its way.
            assert 0 < fake.submits[0].deadline_ms <= 1100
            await until(lambda: router.outcomes() == {("grpc_generate", "deadline"): 1})
            await until(lambda: fake.num_live == 0)
            assert {cancel.reason for cancel in fake.cancels} == {3}

    asyncio.run(main())


def test_api_keys() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        stub = router.inference
        calls = [
            lambda m: generate(router, Generate(text="x"), metadata=m),
            lambda m: stub.Tokenize(inference_pb2.InferenceTokenizeRequest(text="x"), metadata=m),
            lambda m: stub.Detokenize(
                inference_pb2.InferenceDetokenizeRequest(token_ids=[97]), metadata=m
            ),
            lambda m: stub.ListModels(inference_pb2.InferenceListModelsRequest(), metadata=m),
        ]
        good = (("authorization", "Bearer k1"),)
        wrong = [(), (("authorization", "Bearer k"),), (("authorization", "k1"),), good * 2]
        for call in calls:
            for metadata in wrong:
                with pytest.raises(grpc.RpcError) as caught:
                    await call(metadata)
                error: Any = caught.value
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            await call(good)
        assert [submit.tenant for submit in fake.submits] == ["acme"]

    run(check, api_keys="k1:acme")


def test_tokenize_detokenize_list() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        stub = router.inference
        request = inference_pb2.InferenceTokenizeRequest(text="aé")
        answer = await stub.Tokenize(request)
        assert (list(answer.token_ids), answer.max_model_len) == ([97, 195, 169], 2048)
        request = inference_pb2.InferenceTokenizeRequest(chat=chat(("user", "hi")))
        assert bytes((await stub.Tokenize(request)).token_ids) == b"user:hi\nassistant:"
        detokenize = inference_pb2.InferenceDetokenizeRequest(token_ids=[97, EOS])
        assert (await stub.Detokenize(detokenize)).text == "a<eos>"
        models = (await stub.ListModels(inference_pb2.InferenceListModelsRequest())).models
        assert [(m.id, m.max_model_len) for m in models] == [("byte-model", 2048)]
        for call, bad in [
            (stub.Tokenize, inference_pb2.InferenceTokenizeRequest()),
            (stub.Detokenize, inference_pb2.InferenceDetokenizeRequest(token_ids=[257])),
        ]:
            with pytest.raises(grpc.RpcError) as caught:
                await call(bad)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]

    run(check)
