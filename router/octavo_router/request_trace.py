"""A request's spans in the router: router.request, and within it tokenize and route.

    (the client's span) -> router.request -> router.tokenize, router.route, scheduler.*

`router.request` is sent when the request's record ends; the scheduler learns its context from
Submit. Attributes follow OpenTelemetry's GenAI conventions; ours begin with "octavo.". Of errors
that a client caused only the kind is told: their texts may quote a prompt. Texts and token ids
never get here. Must not know: HTTP, protos. Entry points: `begin_trace`, `RequestTrace`.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from opentelemetry.trace import SpanContext, SpanKind

from octavo import telemetry
from octavo.errors import OctavoError
from octavo.telemetry import Attributes, FinishedSpan, SpanEvent, Tracer, Value
from octavo_router.cells import Cell, CellChoice
from octavo_router.flights import ResolvedSampling
from octavo_router.requests import ChatPrompt, Endpoint, GenerateRequest

# A request may have very many prompts; the first ones say enough.
MAX_PROMPTS_TRACED = 8
_MAX_EVENTS = 64
_MAX_INT64 = 1 << 63
_SERVER_ERROR = 500
_DOORS: dict[Endpoint, Attributes] = {
    Endpoint.CHAT: {"http.request.method": "POST", "http.route": "/v1/chat/completions"},
    Endpoint.COMPLETIONS: {"http.request.method": "POST", "http.route": "/v1/completions"},
    Endpoint.GRPC: {"rpc.system": "grpc", "rpc.method": "octavo.v1.Inference/Generate"},
}


class PromptTimes(NamedTuple):
    """When a prompt was rendered, tokenized and hashed, and when its cell was chosen; ns."""

    started_ns: int
    tokenized_ns: int
    routed_ns: int


def begin_trace(
    tracer: Tracer | None, endpoint: Endpoint, header: Callable[[str], str | None]
) -> "RequestTrace | None":
    """The trace of a request that just came in; None if tracing is off.

    `header`: looks up one of the request's headers, or metadata. The running task logs under the
    span from here on.
    """
    if tracer is None:
        return None
    parent = telemetry.parse_traceparent(header("traceparent"), header("tracestate"))
    trace = RequestTrace(tracer, endpoint, parent)
    telemetry.set_current(trace.context)
    return trace


class RequestTrace:
    """One request's. `context` is router.request's; without `is_sampled` all else is void."""

    __slots__ = (
        *("_attributes", "_endpoint", "_events", "_num_dropped", "_parent", "_started_ns"),
        *("_tracer", "context", "has_answered", "is_sampled"),
    )

    def __init__(self, tracer: Tracer, endpoint: Endpoint, parent: SpanContext | None) -> None:
        self._tracer = tracer
        self._endpoint = endpoint
        self._parent = parent
        self._started_ns = time.time_ns()
        self._attributes: dict[str, Value] = {}
        self._events: list[SpanEvent] = []
        self._num_dropped = 0
        self.context = tracer.start("router.request", parent)
        self.is_sampled = self.context.trace_flags.sampled
        # The status went out before the answer: what fails later doesn't change it.
        self.has_answered = False

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Labels for a histogram's observation of this request."""
        return telemetry.exemplar_of(self.context)

    def request(self, request: GenerateRequest) -> None:
        """The request is valid; this is what it asks for."""
        if not self.is_sampled:
            return
        is_chat = any(isinstance(prompt, ChatPrompt) for prompt in request.fields.prompts)
        self._attributes |= {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": request.model_name,
            "gen_ai.response.model": request.model_name,
            "gen_ai.request.stream": request.is_stream,
            "octavo.request_id": request.request_id,
        }
        if request.tenant:
            self._attributes["octavo.tenant"] = request.tenant
        num_choices = len(request.fields.prompts) * request.fields.sampling.n
        if num_choices > 1:
            self._attributes["gen_ai.request.choice.count"] = num_choices

    def sampling(self, sampling: ResolvedSampling, num_prompt_tokens: int) -> None:
        """The prompts are tokenized and nothing of the sampling is left open."""
        if not self.is_sampled:
            return
        self._attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.usage.input_tokens": num_prompt_tokens,
        }
        if sampling.seed < _MAX_INT64:
            self._attributes["gen_ai.request.seed"] = sampling.seed
        rules = sampling.rules
        if rules.frequency_penalty:
            self._attributes["gen_ai.request.frequency_penalty"] = rules.frequency_penalty
        if rules.presence_penalty:
            self._attributes["gen_ai.request.presence_penalty"] = rules.presence_penalty

    def prepared(
        self,
        position: int,
        times: PromptTimes,
        num_tokens: int,
        block_hashes: Sequence[bytes],
        cells: Sequence[Cell],
        choice: CellChoice | None,
    ) -> None:
        """The spans of a prompt that has its ids and its cell. From any thread."""
        if not self.is_sampled or position >= MAX_PROMPTS_TRACED:
            return
        tokenize: Attributes = {
            "octavo.prompt.index": position,
            "octavo.prompt.tokens": num_tokens,
            "octavo.prompt.blocks": len(block_hashes),
        }
        self._child("router.tokenize", times.started_ns, times.tokenized_ns, tokenize)
        route = {"octavo.prompt.index": position, **route_scores(cells, block_hashes, choice)}
        self._child("router.route", times.tokenized_ns, times.routed_ns, route)

    def _child(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        context = telemetry.child_of(self.context)
        self._tracer.finish(FinishedSpan(name, context, self.context, start_ns, end_ns, attributes))

    def event(self, name: str, **attributes: Value) -> None:
        """Something happened to the request; `attributes` get the prefix "octavo."."""
        if not self.is_sampled:
            return
        if len(self._events) >= _MAX_EVENTS:
            self._num_dropped += 1
            return
        named = {f"octavo.{key}": value for key, value in attributes.items()}
        self._events.append(SpanEvent(name, time.time_ns(), named))

    def first_token(self) -> None:
        """The first id of any choice is here."""
        if self.is_sampled:
            elapsed_s = (time.time_ns() - self._started_ns) / 1e9
            self._attributes["gen_ai.server.time_to_first_token"] = elapsed_s
            self.event("first token")

    def cached(self, num_tokens: int) -> None:
        self._attributes["gen_ai.usage.cache_read.input_tokens"] = num_tokens

    def end(
        self,
        outcome: str,
        num_tokens: int,
        finish_reasons: Sequence[str] = (),
        error: BaseException | None = None,
    ) -> None:
        """The request's only outcome (octavo.metrics.OUTCOMES): router.request is complete."""
        if not self.is_sampled:
            return
        attributes = {**_DOORS[self._endpoint], **self._attributes}
        attributes["octavo.outcome"] = outcome
        attributes["gen_ai.usage.output_tokens"] = num_tokens
        if finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = list(finish_reasons)
        is_good = outcome in ("stop", "length")
        if not is_good:
            attributes["error.type"] = _type_of(outcome, error)
        status = self._http_status(error, is_good=is_good)
        if status:
            attributes["http.response.status_code"] = status
        self._tracer.finish(
            FinishedSpan(
                name="router.request",
                context=self.context,
                parent=self._parent,
                start_ns=self._started_ns,
                end_ns=time.time_ns(),
                attributes=attributes,
                kind=SpanKind.SERVER,
                events=self._events,
                num_dropped_events=self._num_dropped,
                error=None if is_good else _status_text(outcome, error),
            )
        )

    def _http_status(self, error: BaseException | None, *, is_good: bool) -> int:
        """What the client was told; 0 = nothing, or not over HTTP."""
        if self._endpoint is Endpoint.GRPC:
            return 0
        if is_good or self.has_answered:
            return 200
        if isinstance(error, OctavoError):
            return error.kind.http_status
        return _SERVER_ERROR if isinstance(error, Exception) else 0


def _type_of(outcome: str, error: BaseException | None) -> str:
    if isinstance(error, OctavoError):
        return error.kind.code or error.kind.type
    return outcome if error is None or outcome == "cancelled" else type(error).__name__


def _status_text(outcome: str, error: BaseException | None) -> str | None:
    """Why the span counts as failed; None if it is the client's own doing (a status of 4xx).

    A client that left is neither's fault, but its answer is incomplete: it counts.
    """
    if outcome == "cancelled":
        return "cancelled: the client left"
    if not isinstance(error, OctavoError):
        # What it says may quote a prompt.
        return outcome if error is None else f"{outcome}: {type(error).__name__}"
    if error.kind.http_status < _SERVER_ERROR:
        return None
    return f"{outcome}: {error.message}"


def route_scores(
    cells: Sequence[Cell], block_hashes: Sequence[bytes], choice: CellChoice | None
) -> dict[str, Value]:
    """What the choice was made from, a column each, and why it fell as it did."""
    candidates = [cell for cell in cells if not cell.is_draining]
    hits = [
        0 if cell.leading_run is None else cell.leading_run(block_hashes) for cell in candidates
    ]
    return {
        "octavo.route.cells": [cell.cell_id for cell in candidates],
        "octavo.route.hit_blocks": hits,
        "octavo.route.backlog_tokens": [cell.backlog_tokens for cell in candidates],
        "octavo.route.chosen": "" if choice is None else choice.cell_id,
        "octavo.route.reason": _reason(candidates, block_hashes, choice),
    }


def _reason(
    candidates: Sequence[Cell], block_hashes: Sequence[bytes], choice: CellChoice | None
) -> str:
    if choice is None:
        return "no cell takes requests"
    if len(candidates) == 1:
        return "only cell"
    if choice.is_spilled:
        return "spilled past a fuller cell"
    if not block_hashes:
        return "least backlog"
    return "longest cached prefix" if choice.hit_blocks else "rendezvous"
