"""Drive `Inference.Generate` with ids in and ids out, many requests at once."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.serving import open_channel
from octavo.streams import ending
from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc

RPC_TIMEOUT_S = 240.0


@dataclass
class Choice:
    """What one of a request's n choices received, message by message."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: int = common_pb2.FINISH_REASON_UNSPECIFIED
    num_messages: int = 0


@dataclass
class Answer:
    choices: dict[int, Choice]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text


def request(prompt_ids: Iterable[int], **fields: Any) -> inference_pb2.InferenceGenerateRequest:
    """A greedy request unless `fields` say otherwise."""
    fields = {"temperature": 0.0, **fields}
    token_ids = inference_pb2.TokenIds(token_ids=list(prompt_ids))
    return inference_pb2.InferenceGenerateRequest(token_ids=token_ids, **fields)


async def generate(
    stub: inference_pb2_grpc.InferenceStub,
    message: inference_pb2.InferenceGenerateRequest,
    *,
    on_message: Any = None,
) -> Answer:
    """Run one request to its end. `on_message(answer)` is called after each message."""
    answer = Answer({})
    with ending(stub.Generate(message, timeout=RPC_TIMEOUT_S)) as call:
        async for response in call:
            if response.HasField("usage"):
                answer.prompt_tokens = response.usage.prompt_tokens
                answer.completion_tokens = response.usage.completion_tokens
                answer.cached_tokens = response.usage.cached_tokens
            choice = answer.choices.setdefault(response.index, Choice())
            choice.num_messages += 1
            choice.text += response.text
            choice.token_ids += response.token_ids
            choice.logprobs += [entry.logprob for entry in response.logprobs]
            if response.finish_reason:
                assert not choice.finish_reason, "a choice finished twice"
                choice.finish_reason = response.finish_reason
            if on_message is not None:
                on_message(answer)
    return answer


def run_all(
    address: str,
    messages: Sequence[inference_pb2.InferenceGenerateRequest],
    *,
    at_once: int | None = None,
    on_message: Any = None,
) -> list[Answer]:
    """Answers in the order of `messages`; at most `at_once` run together (None = all)."""

    async def run() -> list[Answer]:
        async with open_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            gate = asyncio.Semaphore(at_once or len(messages))

            async def one(message: inference_pb2.InferenceGenerateRequest) -> Answer:
                async with gate:
                    return await generate(stub, message, on_message=on_message)

            return await asyncio.gather(*map(one, messages))

    return asyncio.run(run())
