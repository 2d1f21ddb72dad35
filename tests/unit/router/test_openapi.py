"""The API's document says what the validation does, and what answers look like."""

import asyncio
import re
from typing import Any

import pytest
from pydantic import ValidationError

from octavo.errors import InvalidRequestError
from octavo_router.chat import parse_chat
from octavo_router.completions import parse_completion
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.openai_schema import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    ModelList,
)
from octavo_router.requests import RequestRules
from octavo_router.unsupported import CHAT_ONLY, COMPLETIONS_ONLY, NEUTRAL_VALUES
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

RULES = RequestRules(GenerationDefaults(), 1000, allows_chat_template=True)
HI = [{"role": "user", "content": "hi"}]


def run(check: Any) -> None:
    async def main() -> None:
        async with running_router(byte_scheduler()) as router:
            await check(router)

    asyncio.run(main())


def test_the_document() -> None:
    async def check(router: RunningRouter) -> None:
        document = (await router.http.get("/openapi.json")).json()
        assert document["info"]["title"] == "Octavo"
        paths = document["paths"]
        for path, model in [
            ("/v1/chat/completions", "ChatRequest"),
            ("/v1/completions", "CompletionRequest"),
            ("/tokenize", "TokenizeRequest"),
            ("/detokenize", "DetokenizeRequest"),
        ]:
            schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{model}"}
            assert {"200", "400", "401", "429"} <= set(paths[path]["post"]["responses"])
        assert {"/v1/models", "/health", "/livez", "/readyz", "/metrics", "/version"} <= set(paths)
        answers = [operation["responses"] for its in paths.values() for operation in its.values()]
        assert not any("422" in statuses for statuses in answers)
        names = set(document["components"]["schemas"])
        assert "HTTPValidationError" not in names
        for reference in references(document):
            assert reference.removeprefix("#/components/schemas/") in names

    run(check)


def test_the_documents_page_needs_no_other_host() -> None:
    async def check(router: RunningRouter) -> None:
        page = (await router.http.get("/docs")).text
        places = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']+)""", page)
        assert "/openapi.json" in places
        assert len(places) >= 4
        for place in places:
            assert place.startswith("/"), place
            assert (await router.http.get(place)).status_code == 200
        files = [(await router.http.get(place)) for place in places if "/files/" in place]
        kinds = {file.headers["content-type"].partition(";")[0] for file in files}
        assert kinds == {"text/javascript", "text/css", "image/png"}
        assert (await router.http.get("/docs/files/none.js")).status_code == 404

    run(check)


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def test_answers_are_as_documented() -> None:
    async def check(router: RunningRouter) -> None:
        http = router.http
        chat = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
        ChatCompletion.model_validate_json(
            (await http.post("/v1/chat/completions", json=chat)).text
        )
        text = {"prompt": "x", "logprobs": 1}
        Completion.model_validate_json((await http.post("/v1/completions", json=text)).text)
        ModelList.model_validate_json((await http.get("/v1/models")).text)
        for answer in (await http.get("/nope"), await http.post("/tokenize", json={})):
            ErrorBody.model_validate_json(answer.text)

    run(check)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_no_documented_field_is_refused_as_unsupported(model: Any) -> None:
    elsewhere = COMPLETIONS_ONLY if model is ChatRequest else CHAT_ONLY
    assert not set(model.model_fields) & {*NEUTRAL_VALUES, *elsewhere}


LIMITS: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 2, 2.1, -1, 1.5]),
    ("top_p", [0, 1, 1.1, -0.1]),
    ("top_k", [-2, -1, 0, 2**31 - 1, 2**31]),
    ("min_p", [0, 1, 1.5]),
    ("seed", [-(2**63), 2**63 - 1, 2**63]),
    ("n", [0, 1, 128, 129]),
    ("max_tokens", [0, 1, 2**31 - 1, 2**31]),
    ("stop_token_ids", [[0], [0] * 128, [0] * 129]),
    ("ignore_eos", [True, False]),
    ("min_tokens", [-1, 0, 2**31 - 1, 2**31]),
    ("presence_penalty", [-2, 2, 2.1, -2.1]),
    ("frequency_penalty", [-2, 2, 2.1, -2.1]),
    ("repetition_penalty", [0, 0.01, 1, 100, 101]),
    ("logit_bias", [{}, {"5": 1}, {str(i): 0 for i in range(1000)}]),
    ("allowed_token_ids", [[], [0]]),
    ("bad_words", [[], ["x"] * 128, ["x"] * 129]),
    ("prompt_logprobs", [-1, 0, 20, 21]),
    ("include_stop_str_in_output", [True, False, 1]),
    ("skip_special_tokens", [True, False, 1]),
    ("return_token_ids", [True, False, 1]),
    ("truncate_prompt_tokens", [-2, -1, 1, 2**31]),
    ("cache_salt", ["", "x", "x" * 256, "x" * 257]),
    ("user", ["", "x" * 1024, "x" * 1025]),
    ("priority", [-(2**31), -1, 0, 2**31]),
]


@pytest.mark.parametrize(("field", "values"), LIMITS)
def test_documented_limits_are_the_enforced_ones(field: str, values: list[Any]) -> None:
    for value in values:
        chat, text = {"messages": HI, field: value}, {"prompt": "x", "echo": True, field: value}
        for model, parse, body in [
            (ChatRequest, parse_chat, chat),
            (CompletionRequest, parse_completion, text),
        ]:
            assert accepts_model(model, body) == accepts_parse(parse, body), (field, value)


def accepts_model(model: Any, body: dict[str, Any]) -> bool:
    try:
        model.model_validate(body, strict=True)
    except ValidationError:
        return False
    return True


def accepts_parse(parse: Any, body: dict[str, Any]) -> bool:
    try:
        parse(body, RULES)
    except InvalidRequestError:
        return False
    return True
