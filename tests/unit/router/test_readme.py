"""The written tables of fields and values, tried against the code on both doors."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from octavo.v1 import inference_pb2
from octavo_router.openai_schema import ChatRequest, CompletionRequest
from octavo_router.unsupported import CHAT_ONLY, COMPLETIONS_ONLY, NEUTRAL_VALUES
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router
from tests.sse_parser import parse

README = (Path(__file__).parents[3] / "router" / "README.md").read_text(encoding="utf-8")
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}], "seed": 1},
    "completions": {"prompt": "x", "seed": 1},
}
HEADERS = {"Idempotency-Key"}
Generate = inference_pb2.InferenceGenerateRequest


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[1:]]


def codes(cell: str) -> list[Any]:
    return [json.loads(code) for code in re.findall(r"`([^`]+)`", cell)]


def names(column: int) -> set[str]:
    found: set[str] = set()
    for row in rows("Served"):
        cell = row[column]
        found |= set() if cell == "–" else {name.strip() for name in cell.split(",")}
    return found


def test_served_fields_are_the_documents() -> None:
    assert names(2) == set(ChatRequest.model_fields)
    assert names(3) == set(CompletionRequest.model_fields)
    assert names(4) == set(Generate.DESCRIPTOR.fields_by_name)
    listed = {row[0] for row in rows("Served")}
    assert listed - HEADERS == names(2) | names(3)


def test_refused_fields_are_the_tables() -> None:
    listed = {(row[0], row[2]): codes(row[1]) for row in rows("Refused")}
    assert listed == {
        **{(name, "both"): list(values) for name, values in NEUTRAL_VALUES.items()},
        **{(name, "completions"): list(values) for name, values in CHAT_ONLY.items()},
        **{(name, "chat"): list(values) for name, values in COMPLETIONS_ONLY.items()},
    }


class Case(NamedTuple):
    endpoint: str
    request: dict[str, Any]
    same_as: dict[str, Any] | None
    param: str | None


def cases() -> list[Case]:
    found: list[Case] = []
    for where, request, outcome in rows("Values"):
        (body,) = codes(request)
        same_as = codes(outcome)[0] if outcome.startswith("as ") else None
        param = outcome.split("`")[1] if outcome.startswith("400 ") else None
        assert same_as is not None or param is not None or outcome == "200", outcome
        for endpoint in PATHS if where == "both" else (where,):
            found.append(Case(endpoint, body, same_as, param))
    return found


class Seen(NamedTuple):
    """What became of a request: equal for requests that mean the same."""

    status: int
    param: str | None
    submits: list[Any]
    answer: Any


async def over_http(router: RunningRouter, fake: Any, endpoint: str, body: Any) -> Seen:
    fake.submits.clear()
    answer = await router.http.post(PATHS[endpoint], json={**BASE[endpoint], **body})
    if answer.status_code != 200:
        return Seen(answer.status_code, answer.json()["error"]["param"], [], None)
    if body.get("stream"):
        # Which ids share a frame is a matter of timing.
        stream = parse(answer.content)
        has_usage = any("usage" in chunk for chunk in stream.chunks)
        return Seen(200, None, plain_submits(fake), (stream.text(), stream.finish(), has_usage))
    said = re.sub(r'"(id|created)":("[^"]*"|\d+)', "", answer.text)
    return Seen(200, None, plain_submits(fake), said)


async def over_grpc(router: RunningRouter, fake: Any, endpoint: str, body: Any) -> Seen | None:
    """None for what the protocol can't say."""
    request = to_grpc(endpoint, {**BASE[endpoint], **body})
    if request is None:
        return None
    fake.submits.clear()
    try:
        messages = [m async for m in router.inference.Generate(request)]
    except grpc.RpcError as error:
        failure: Any = error
        assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
        return Seen(400, dict(failure.trailing_metadata()).get("octavo-param"), [], None)
    for message in messages:
        message.request_id = ""
    joined = "".join(m.text for m in messages if not m.index)
    return Seen(200, None, plain_submits(fake), (joined, messages[-1].usage))


def to_grpc(endpoint: str, body: dict[str, Any]) -> Any:
    if any(value is None for value in body.values()):
        return None
    if endpoint == "chat":
        # The default of max_tokens is the chat's.
        chat = [dict(message) for message in body.pop("messages")]
        if any(not isinstance(message.get("content"), str) for message in chat):
            return None
        body["chat"] = inference_pb2.ChatMessages(
            messages=[inference_pb2.ChatMessage(**message) for message in chat]
        )
    else:
        prompt = body.pop("prompt")
        if not isinstance(prompt, str) or "max_tokens" not in body:
            return None
        body["text"] = prompt
    if "logit_bias" in body:
        body["logit_bias"] = {int(key): value for key, value in body["logit_bias"].items()}
    if "chat_template_kwargs" in body:
        body["chat_template_kwargs_json"] = json.dumps(body.pop("chat_template_kwargs"))
    if not body.keys() <= set(Generate.DESCRIPTOR.fields_by_name):
        return None
    if any(isinstance(value, bool) for value in (body.get("temperature"), body.get("logprobs"))):
        return None
    # Lists have no presence there: empty is absent. Floats have 24 bits.
    if body.get("allowed_token_ids") == [] or body.get("top_p") == 1.0000001:
        return None
    try:
        return Generate(**body)
    except (TypeError, ValueError):
        return None


def plain_submits(fake: Any) -> list[Any]:
    for submit in fake.submits:
        submit.handle, submit.request_id = 0, ""
    return [submit.SerializeToString(deterministic=True) for submit in fake.submits]


@pytest.mark.parametrize("door", [over_http, over_grpc], ids=["http", "grpc"])
def test_values_mean_what_is_written(door: Any) -> None:
    async def main() -> None:
        num_tried = 0
        fake = byte_scheduler(tokens_per_step=1000)
        async with running_router(fake) as router:
            for case in cases():
                seen = await door(router, fake, case.endpoint, case.request)
                if seen is None:
                    continue
                num_tried += 1
                assert (seen.status, seen.param) == (
                    (200, None) if case.param is None else (400, case.param)
                ), case
                if case.same_as is not None:
                    same = await door(router, fake, case.endpoint, case.same_as)
                    assert same is None or seen == same, case
        assert num_tried >= (100 if door is over_http else 40)

    asyncio.run(main())


def test_unknown_fields_are_ignored() -> None:
    async def main() -> None:
        fake = byte_scheduler()
        listed = re.findall(r"`(\w+)`", section("Ignored"))
        assert len(listed) > 8
        async with running_router(fake) as router:
            for endpoint in PATHS:
                body = {"max_tokens": 3}
                plain = await over_http(router, fake, endpoint, body)
                noisy = {name: {"x": [1]} for name in (*listed, "no_such_field")}
                assert await over_http(router, fake, endpoint, {**body, **noisy}) == plain

    asyncio.run(main())
