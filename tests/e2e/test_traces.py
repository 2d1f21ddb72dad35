"""Real traces: three processes send their spans to a real OTLP receiver.

Every parent link is asserted: what a client sees as one request is one trace, from its own span
over the router and the scheduler to the worker's step.
"""

import asyncio
import json
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from tokenizers import Tokenizer

from octavo.serving import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.stack import Stack
from tests.fakes.otlp_receiver import ERROR, UNSET, WAIT_S, OtlpReceiver, Span, Trace

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLIENT_SPAN = "b7ad6b7169203331"
# No word of ours has these in it.
MARKER = "zqxjkvprompt"
LONG = f"{MARKER} " * 12
CHAT_BODY = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 12, "temperature": 0.5}
EDGES = {
    ("", "router.request"),
    ("router.request", "router.tokenize"),
    ("router.request", "router.route"),
    ("router.request", "scheduler.queue"),
    ("router.request", "scheduler.prefill"),
    ("router.request", "scheduler.decode"),
    ("scheduler.prefill", "worker.step"),
}
SPANS = [child for _, child in EDGES]
SERVICES = {"router": "octavo-router", "scheduler": "octavo-scheduler", "worker": "octavo-worker"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(
    receiver: OtlpReceiver, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Two workers with small steps: a prompt takes several chunks."""
    with Stack(
        tmp_path_factory.mktemp("traces"),
        model=tiny_folder,
        num_workers=2,
        worker_flags=("--max-num-batched-tokens", "64", "--max-num-seqs", "8"),
        router_flags=("--router-id", "router-a"),
        environ={**receiver.environ, "OCTAVO_LOG_LEVEL": "debug", "OCTAVO_LOG_FORMAT": "json"},
    ) as stack:
        yield stack


def new_trace() -> tuple[str, dict[str, str]]:
    """A client's trace id, and the headers that say it."""
    trace_id = secrets.token_hex(16)
    traceparent = f"00-{trace_id}-{CLIENT_SPAN}-01"
    return trace_id, {"traceparent": traceparent, "tracestate": "vendor=42"}


def post(
    stack: Stack, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    return httpx.post(stack.url + path, json=body, headers=headers, timeout=60)


def check_whole(trace: Trace) -> None:
    """What holds for every trace: who sent what, and nothing ends before it begins."""
    request = trace.one("router.request")
    for span in trace.spans:
        assert span.service == SERVICES[span.name.split(".")[0]]
        assert span.start_ns <= span.end_ns
        assert span.trace_state == ("vendor=42" if request.parent_id else "") or (
            span.service == "octavo-worker"
        )
    queue, prefill = trace.all("scheduler.queue"), trace.all("scheduler.prefill")
    decode = trace.all("scheduler.decode")
    for before, after in zip([*queue, *prefill], [*prefill, *decode], strict=True):
        assert before.end_ns == after.start_ns


def test_one_request_is_one_trace_across_three_processes(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    trace_id, headers = new_trace()
    answer = post(stack, CHAT, CHAT_BODY, {**headers, "X-Request-Id": "seen-in-traces"})
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    trace = receiver.wait_trace(trace_id, *SPANS)
    assert trace.edges() == EDGES
    assert trace.names() == sorted(SPANS)
    check_whole(trace)
    request = trace.one("router.request")
    assert (request.parent_id, request.kind, request.status) == (CLIENT_SPAN, 2, UNSET)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": answer.json()["model"],
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": [answer.json()["choices"][0]["finish_reason"]],
        "http.route": CHAT,
        "http.response.status_code": 200,
        "octavo.request_id": "seen-in-traces",
    }
    assert expected.items() <= request.attributes.items()
    assert 0 < request.attributes["gen_ai.server.time_to_first_token"] < 60
    route = trace.one("router.route").attributes
    assert route["octavo.route.reason"] == "only cell"
    assert route["octavo.route.cells"] == [route["octavo.route.chosen"]]
    prefill, step = trace.one("scheduler.prefill"), trace.one("worker.step")
    assert {event.name for event in prefill.events} == {"chunk"}
    ends = [event.attributes["octavo.end"] for event in prefill.events]
    assert ends == [*range(64, usage["prompt_tokens"], 64), usage["prompt_tokens"]]
    assert step.resource["service.instance.id"] == prefill.attributes["octavo.worker"]
    assert step.attributes["octavo.step.prefill_tokens"] == 64
    assert request.resource["service.instance.id"] == "router-a"
    decode = trace.one("scheduler.decode")
    assert decode.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]


def test_a_later_step_of_a_sampled_row_is_linked_to_its_trace(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    """At most once a second and worker: so the worker's first request has one, at the latest."""
    post(stack, TEXT, {"prompt": "x", "max_tokens": 100, "ignore_eos": True}, new_trace()[1])

    def linked(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.name == "worker.step" and span.links]

    receiver.wait(lambda spans: bool(linked(spans)))
    span = linked(receiver.spans)[0]
    assert span.parent_id == ""
    (linked_trace, linked_span) = span.links[0]
    assert span.trace_id != linked_trace
    receiver.wait(lambda spans: any(other.span_id == linked_span for other in spans))
    assert receiver.trace(linked_trace).one("scheduler.prefill").span_id == linked_span


def test_a_stream_of_two_choices_without_a_clients_span(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    body = {"prompt": LONG, "n": 2, "seed": 1, "max_tokens": 9, "stream": True, "ignore_eos": True}
    answer = post(stack, TEXT, body, {"X-Request-Id": "two-choices"})
    assert answer.text.endswith("data: [DONE]\n\n")

    def mine(spans: list[Span]) -> list[str]:
        return [s.trace_id for s in spans if s.attributes.get("octavo.request_id") == "two-choices"]

    receiver.wait(lambda spans: bool(mine(spans)))
    (trace_id,) = mine(receiver.spans)
    trace = receiver.wait_trace(trace_id, *SPANS, "scheduler.decode")
    assert trace.edges() == EDGES
    request = trace.one("router.request")
    assert request.parent_id == ""
    assert request.attributes["gen_ai.request.choice.count"] == 2
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert request.attributes["gen_ai.request.stream"] is True
    for name in ("scheduler.queue", "scheduler.prefill", "scheduler.decode"):
        indexes = [span.attributes["octavo.sequence.index"] for span in trace.all(name)]
        assert sorted(indexes) == [0, 1]


async def generate(
    stack: Stack, headers: dict[str, str], timeout_s: float = 60, **fields: Any
) -> None:
    message = inference_pb2.InferenceGenerateRequest(**fields)
    async with open_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = list(headers.items())
        async for _ in stub.Generate(message, metadata=metadata, timeout=timeout_s):
            pass


def test_grpc_metadata_carries_the_context_as_headers_do(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    trace_id, headers = new_trace()
    asyncio.run(generate(stack, headers, text=MARKER, max_tokens=5))
    trace = receiver.wait_trace(trace_id, *SPANS)
    assert trace.edges() == EDGES
    check_whole(trace)
    request = trace.one("router.request")
    assert request.parent_id == CLIENT_SPAN
    assert request.attributes["rpc.method"] == "octavo.v1.Inference/Generate"
    assert request.attributes["gen_ai.operation.name"] == "text_completion"


def test_a_request_that_the_router_refuses(stack: Stack, receiver: OtlpReceiver) -> None:
    for body in (
        {"prompt": LONG, "temperature": MARKER},
        {"prompt": LONG, MARKER: MARKER, "max_tokens": 10**6},
    ):
        trace_id, headers = new_trace()
        assert post(stack, TEXT, body, headers).status_code == 400
        trace = receiver.wait_trace(trace_id, "router.request")
        request = trace.one("router.request")
        assert request.attributes["octavo.outcome"] == "rejected"
        assert request.attributes["http.response.status_code"] == 400
        assert "error.type" in request.attributes
        # The client's own mistake: no failure of the server's.
        assert request.status == UNSET


def test_a_request_that_fails_on_the_worker(
    stack: Stack, receiver: OtlpReceiver, tiny_folder: Path
) -> None:
    """Its rules bar every token: the row fails, and every span that waited for it."""
    trace_id, headers = new_trace()
    # The template ends with a new line, behind which the only token allowed makes a bad word.
    newline, letter = Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode("\nz").ids
    assert newline != letter
    body = {**CHAT_BODY, "allowed_token_ids": [letter], "bad_words": ["\nz"]}
    answer = post(stack, CHAT, body, headers)
    assert answer.status_code == 500
    trace = receiver.wait_trace(trace_id, *SPANS)
    request = trace.one("router.request")
    # The row was computed to its end; drawing the first token failed.
    failed = trace.one("scheduler.decode")
    assert failed.status == ERROR
    assert (request.status, request.attributes["octavo.outcome"]) == (ERROR, "error")
    assert request.attributes["http.response.status_code"] == 500
    assert failed.attributes["octavo.outcome"] == "error"
    assert "allowed_token_ids" in failed.message
    assert "allowed_token_ids" in request.message


def test_a_client_that_leaves(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id, headers = new_trace()
    body = {**CHAT_BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", stack.url + CHAT, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        while "content" not in next(lines):
            pass
    trace = receiver.wait_trace(trace_id, *SPANS)
    assert trace.edges() == EDGES
    for span in (trace.one("router.request"), trace.one("scheduler.decode")):
        assert span.status == ERROR
        assert span.message.startswith("cancelled")
        assert span.attributes["octavo.outcome"] == "cancelled"
    request = trace.one("router.request")
    assert 0 < request.attributes["gen_ai.usage.output_tokens"] < 900
    assert request.attributes["http.response.status_code"] == 200


def test_a_request_that_is_too_late(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id, headers = new_trace()
    fields = {"text": MARKER, "max_tokens": 900, "ignore_eos": True}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(generate(stack, headers, timeout_s=0.3, **fields))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    trace = receiver.wait_trace(trace_id, "router.request", "scheduler.queue")
    request = trace.one("router.request")
    assert (request.status, request.attributes["octavo.outcome"]) == (ERROR, "deadline")


def test_an_unsampled_client_leaves_no_span_anywhere(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id, headers = new_trace()
    unsampled = {"traceparent": headers["traceparent"][:-1] + "0"}
    assert post(stack, CHAT, CHAT_BODY, unsampled).status_code == 200
    later, headers = new_trace()
    post(stack, CHAT, CHAT_BODY, headers)
    receiver.wait_trace(later, *SPANS)
    assert receiver.trace(trace_id).spans == []


def test_log_lines_of_a_request_carry_its_trace(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id, headers = new_trace()
    post(stack, CHAT, CHAT_BODY, headers)
    request = receiver.wait_trace(trace_id, "router.request").one("router.request")
    lines = [json.loads(line) for line in stack.routers[0].log().splitlines()]
    mine = [line for line in lines if line.get("trace_id") == trace_id]
    assert mine
    assert {line["span_id"] for line in mine} == {request.span_id}
    assert {line["service"] for line in mine} == {"router"}


def test_latency_histograms_name_the_trace_that_made_them(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    trace_id, headers = new_trace()
    post(stack, CHAT, CHAT_BODY, headers)
    receiver.wait_trace(trace_id, *SPANS)
    exemplar = f'# {{trace_id="{trace_id}"}}'
    openmetrics = {"accept": "application/openmetrics-text; version=1.0.0"}
    ports = stack.schedulers[0].ports["metrics_port"], stack.routers[0].ports["port"]
    scheduler, router = (
        httpx.get(f"http://127.0.0.1:{port}/metrics", headers=openmetrics).text for port in ports
    )
    for text, name in ((router, "time_to_first_token"), (scheduler, "prefill_time")):
        lines = [line for line in text.splitlines() if line.startswith(f"octavo_{name}_seconds_b")]
        assert any(exemplar in line for line in lines), name


def test_a_request_that_moves_to_another_worker(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id, headers = new_trace()
    body = {**CHAT_BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", stack.url + CHAT, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        while "content" not in next(lines):
            pass
        prefill = receiver.wait_trace(trace_id, "scheduler.prefill").one("scheduler.prefill")
        lost = prefill.attributes["octavo.worker"]
        victim = stack.workers[int(lost.removeprefix("worker-"))]
        victim.kill(signal.SIGKILL)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    # The killed worker may have taken its step's span with it.
    trace = receiver.wait_trace(trace_id, "router.request", "scheduler.decode", "worker.step")
    check_whole(trace)
    decode = trace.one("scheduler.decode")
    assert (decode.status, decode.attributes["octavo.moves"]) == (UNSET, 1)
    names = [name for name in decode.event_names() if name != "chunk"]
    assert names == ["moved", "row", "prefilled"]
    moved, row = (next(e for e in decode.events if e.name == name) for name in names[:2])
    assert moved.attributes == {"octavo.worker": lost, "octavo.loss": "crash"}
    assert row.attributes["octavo.worker"] != lost
    # The step in which it went on is a child of the span in which it got the new row.
    again = next(span for span in trace.all("worker.step") if span.parent_id == decode.span_id)
    assert again.resource["service.instance.id"] == row.attributes["octavo.worker"]
    assert trace.one("router.request").attributes["octavo.outcome"] == "length"
    assert trace.one("router.request").attributes["gen_ai.usage.output_tokens"] == 900


def test_no_span_holds_a_prompt_or_an_answer(
    stack: Stack, receiver: OtlpReceiver, tiny_folder: Path
) -> None:
    body = {**CHAT_BODY, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    answer = post(stack, CHAT, body).json()["choices"][0]["message"]["content"]
    assert len(answer) >= 20
    ids = Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode(MARKER).ids[:6]
    listed = ", ".join(map(str, ids))
    assert len(receiver.spans) > 50
    text = repr(receiver.spans)
    for secret in (MARKER, answer[:20], listed, listed.replace(" ", "")):
        assert secret not in text


def test_a_collector_that_goes_away_holds_up_no_request_and_no_drain(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    receiver.__exit__(None, None, None)
    for _ in range(3):
        assert post(stack, CHAT, CHAT_BODY, new_trace()[1]).status_code == 200
    survivors = [w for w in stack.workers if w.process.poll() is None]
    started_at = time.monotonic()
    services = [*stack.routers, *stack.schedulers, *survivors]
    for service in services:
        service.process.terminate()
    assert [service.process.wait(WAIT_S) for service in services] == [0] * len(services)
    # Each waits for its flush for two seconds at most; the SDK alone would for thirty.
    assert time.monotonic() - started_at < WAIT_S
