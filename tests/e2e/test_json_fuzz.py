"""Random JSON bodies: whatever is sent, the router answers, and is the same afterwards."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.edge import AUTHORIZATION, CHAT, TEXT, full_logs, resident_mib
from tests.e2e.stack import Stack, total
from tests.sse_parser import parse

# What the router may grow by: pools and caches that fill once.
MAX_GROWTH_MIB = 64
PATHS = (CHAT, TEXT, "/tokenize", "/detokenize")
NAMES = (
    *("model", "messages", "prompt", "tokens", "max_tokens", "max_completion_tokens", "stream"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "user"),
    *("logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "echo", "prompt_logprobs", "allowed_token_ids"),
    *("bad_words", "stream_options", "response_format", "tools", "tool_choice", "best_of"),
    *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "priority"),
    *("add_generation_prompt", "continue_final_message", "chat_template", "cache_salt"),
    *("chat_template_kwargs", "return_token_ids", "ignore_eos", "add_special_tokens"),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 20),
    st.floats(),
    st.floats(0, 2),
    st.text(max_size=20),
    st.sampled_from(["the cat", "", "\x00", "\ud83d", "\u2028", "user", "text", "{{ 1/0 }}"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "5", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": VALUES},
        optional={"name": SCALARS, "tool_calls": VALUES, "tool_call_id": SCALARS},
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.just([{"role": "user", "content": "hi"}]) | MESSAGES | VALUES,
        "prompt": st.just("the cat") | VALUES,
    },
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: mostly near to a good one, sometimes cut or with a byte turned."""
    body: dict[str, Any] = {"max_tokens": 4, **draw(BODIES)}
    body |= draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
    data = bytearray(json.dumps(body).encode())
    match draw(st.integers(0, 9)):
        case 0:
            del data[draw(st.integers(0, len(data))) :]
        case 1:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        case 2:
            data = bytearray(draw(st.binary(max_size=60)))
        case _:
            pass
    return draw(st.sampled_from(PATHS)), bytes(data)


def check_answer(status: int, kind: str, content: bytes) -> None:
    """A whole stream without an error, a JSON answer, or an OpenAI error that isn't ours."""
    assert status < 500, content
    if kind.startswith("text/event-stream"):
        stream = parse(content, num_choices=None)
        assert stream.error is None, stream.error
        return
    body = json.loads(content)
    if status != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert len(body["error"]["message"]) < 500


def fuzz(stack: Stack, num_examples: int) -> None:
    with httpx.Client(base_url=stack.url, timeout=30, headers=AUTHORIZATION) as client:

        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(requests())
        def send(request: tuple[str, bytes]) -> None:
            path, data = request
            headers = {"content-type": "application/json"}
            answer = client.post(path, content=data, headers=headers)
            check_answer(answer.status_code, answer.headers["content-type"], answer.content)

        # Once for what is loaded lazily, so that only growth is measured.
        client.post(TEXT, json={"prompt": "x", "max_tokens": 1})
        process_id = stack.routers[0].process.pid
        before_mib = resident_mib(process_id)
        send()
    stack.wait_idle()
    assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0
    assert resident_mib(process_id) - before_mib < MAX_GROWTH_MIB
    assert "Traceback" not in full_logs(stack)
    assert " failed: " not in stack.routers[0].log()


def test_random_bodies(edge_stack: Stack) -> None:
    fuzz(edge_stack, 150)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_bodies(edge_stack: Stack) -> None:
    fuzz(edge_stack, 2000)
