"""One terminal outcome per request received, and the times a client feels.

Must not know: HTTP, protos, text. Entry point: `RequestRecord`.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from octavo.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OctavoError,
    RateLimitError,
)
from octavo.logs import in_trace
from octavo.metric_kinds import Exemplar
from octavo.metrics import ANSWERED, RouterMetrics
from octavo_router.flights import Finish
from octavo_router.request_trace import RequestTrace
from octavo_router.requests import Endpoint

log = logging.getLogger(__name__)
_SERVER_ERROR = 500


def outcome_of(error: BaseException) -> str:
    """The outcome that an error stands for (octavo.metrics.OUTCOMES)."""
    match error:
        case CancelledError():
            return "cancelled"
        case DeadlineError():
            return "deadline"
        case InvalidRequestError():
            return "rejected"
        case OctavoError() if error.kind.http_status < _SERVER_ERROR or error.retry_after_ms:
            return "rejected"
        case OctavoError() | Exception():
            return "error"
        case _:
            # The task was cancelled: its client is gone.
            return "cancelled"


class RequestRecord(AbstractContextManager["RequestRecord"]):
    """Counts one request from its arrival to its only outcome.

    As a context manager it ends the record when an exception passes; a request that goes on
    past the block ends it itself, with `end`. `exemplar`: of its trace, set while that is sampled.
    """

    __slots__ = (
        *("_endpoint", "_is_ended", "_last_at", "_metrics", "_num_tokens", "_started_at"),
        *("exemplar", "request_id", "trace"),
    )

    def __init__(
        self, metrics: RouterMetrics, endpoint: Endpoint, trace: RequestTrace | None = None
    ) -> None:
        # Known once the request was read.
        self.request_id = ""
        self.trace = trace
        self._metrics = metrics
        self._endpoint = endpoint
        self._started_at = time.perf_counter()
        self._last_at = 0.0
        self._num_tokens = 0
        self._is_ended = False
        self.exemplar: Exemplar = None if trace is None else trace.exemplar
        metrics.in_flight.inc()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.fail(exc)

    def prompt(self, num_tokens: int, tokenize_s: float) -> None:
        """The prompts were rendered and tokenized."""
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.request_prompt_tokens.observe(num_tokens, self.exemplar)
        self._metrics.tokenize_time.observe(tokenize_s)

    def cached(self, num_tokens: int) -> None:
        if self.trace is not None:
            self.trace.cached(num_tokens)
        self._metrics.cached_tokens.inc(num_tokens)

    def tokens(self, num_tokens: int, num_sequences: int) -> None:
        """News of `num_sequences` sequences, `num_tokens` ids in all."""
        now = time.perf_counter()
        if self._num_tokens == 0:
            self._metrics.time_to_first_token.observe(now - self._started_at, self.exemplar)
            if self.trace is not None and num_tokens:
                self.trace.first_token()
        elif num_tokens:
            gap = now - self._last_at
            self._metrics.inter_token.observe(gap * num_sequences / num_tokens, self.exemplar)
        self._num_tokens += num_tokens
        self._last_at = now

    def finish(self, finishes: list[Finish]) -> None:
        """Every sequence ended well; one that ran into its length decides."""
        outcome = "length" if Finish.LENGTH in finishes else "stop"
        self.end(outcome, finish_reasons=[finish.value for finish in finishes])

    def fail(self, error: BaseException) -> None:
        if isinstance(error, RateLimitError) and not self._is_ended:
            self._metrics.quota_refusals.inc()
        self.end(outcome_of(error), error)

    def end(
        self,
        outcome: str,
        error: BaseException | None = None,
        finish_reasons: Sequence[str] = (),
    ) -> None:
        """The outcome; only the first call counts."""
        if self._is_ended:
            return
        self._is_ended = True
        metrics = self._metrics
        metrics.in_flight.dec()
        metrics.generation_tokens.inc(self._num_tokens)
        if outcome in ANSWERED:
            latency_s = time.perf_counter() - self._started_at
            metrics.request_latency.observe(latency_s, self.exemplar)
            metrics.request_generation_tokens.observe(self._num_tokens, self.exemplar)
        metrics.requests.labels(self._endpoint.value, outcome).inc()
        if self.trace is not None:
            self.trace.end(outcome, self._num_tokens, finish_reasons, error)
        level = logging.WARNING if outcome == "error" else logging.DEBUG
        if log.isEnabledFor(level):
            extra = in_trace(self.trace.context if self.trace is not None else None)
            log.log(
                level,
                "request %s ended: %s after %.3f s, %d tokens",
                *(self.request_id or "-", outcome, time.perf_counter() - self._started_at),
                self._num_tokens,
                extra=extra,
            )
