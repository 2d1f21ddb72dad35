"""The client's options on the wire, and a prompt's part of an answer back from it."""

import json

import pytest

from octavo.client_messages import (
    GenerationBuilder,
    Logprob,
    Options,
    Prompt,
    delta_of,
    generate_request,
)
from octavo.errors import InvalidRequestError
from octavo.v1 import common_pb2, inference_pb2

# Named or shaped otherwise in a message.
RESHAPED = {"chat_template_kwargs": "chat_template_kwargs_json"}
INPUTS = {"text", "token_ids", "chat", "spaces_between_special_tokens"}


def test_the_client_offers_every_field() -> None:
    offered = {RESHAPED.get(name, name) for name in Options.__annotations__}
    fields = set(inference_pb2.InferenceGenerateRequest.DESCRIPTOR.fields_by_name)
    assert offered == fields - INPUTS


def test_options_reach_the_message() -> None:
    request = generate_request(
        "x",
        None,
        None,
        {
            "logit_bias": {5: -1.5, 7: 100},
            "allowed_token_ids": (1, 2),
            "bad_words": ["a", "b"],
            "echo": True,
            "prompt_logprobs": 0,
            "min_tokens": 0,
            "repetition_penalty": 1.5,
            "truncate_prompt_tokens": -1,
            "skip_special_tokens": False,
            "chat_template_kwargs": {"thinking": True},
            "cache_salt": "s",
            "priority": -2,
        },
    )
    assert dict(request.logit_bias) == {5: -1.5, 7: 100}
    assert (list(request.allowed_token_ids), list(request.bad_words)) == ([1, 2], ["a", "b"])
    assert request.HasField("prompt_logprobs")
    assert request.HasField("min_tokens")
    assert request.HasField("skip_special_tokens")
    assert json.loads(request.chat_template_kwargs_json) == {"thinking": True}
    assert (request.repetition_penalty, request.truncate_prompt_tokens) == (1.5, -1)
    assert (request.cache_salt, request.priority) == ("s", -2)
    assert not request.HasField("presence_penalty")


def test_calls_in_a_history_are_in_openais_shape() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    request = generate_request(None, messages, None, {})
    first, second = request.chat.messages
    assert not first.HasField("content")
    assert (first.tool_calls[0].id, first.tool_calls[0].name) == ("1", "f")
    assert json.loads(first.tool_calls[0].arguments_json) == {"a": 1}
    assert (second.content, second.tool_call_id) == ("42", "1")


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"x": 1}},
        {"logit_bias": {-1: 1}},
        {"allowed_token_ids": [2**32]},
        {"chat_template_kwargs": {"x": object()}},
        {"no_such": 1},
    ],
)
def test_what_no_message_can_hold_is_refused(options: Options) -> None:
    with pytest.raises(InvalidRequestError):
        generate_request("x", None, None, options)


def test_the_prompts_part_comes_with_the_first_delta() -> None:
    entry = inference_pb2.GenerateLogprob
    first = inference_pb2.InferenceGenerateResponse(
        text="a",
        token_ids=[97],
        prompt=inference_pb2.GeneratePrompt(
            text="hi", token_ids=[104, 105], logprobs=[entry(token_id=104), entry(token_id=105)]
        ),
    )
    first.prompt.logprobs[1].logprob = -0.5
    last = inference_pb2.InferenceGenerateResponse(finish_reason=common_pb2.FINISH_REASON_LENGTH)
    builder = GenerationBuilder()
    for message in (first, last):
        builder.add(delta_of(message))
    (choice,) = builder.build(None).choices
    assert choice.prompt == Prompt("hi", (104, 105), (None, Logprob(105, -0.5, ())))
    assert (choice.text, choice.finish_reason) == ("a", "length")
    assert delta_of(last).prompt is None
