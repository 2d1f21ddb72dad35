"""How every process of Octavo logs: one line per record on stderr, as text or as JSON.

Both forms have the same fields: time, level, service, logger, message, and trace_id and span_id
where a request with a trace is in context: the running task's, or the one that the caller names
with `extra=in_trace(context)`. Prompts and answers are never logged.
Must not know: any service. Entry points: `setup_logging`, `in_trace`.
"""

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from opentelemetry.trace import SpanContext

from octavo import telemetry

_CONTEXT = "octavo_trace_context"
# How often the exporter may say that a collector is away: it would with every batch, as an error.
_SELDOM_S = 60.0


def setup_logging(service: str, level: str, form: str = "text") -> None:
    """Replace whatever handlers there are. `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if form == "json" else TextFormatter(service))
    handler.addFilter(Seldom("opentelemetry.", _SELDOM_S))
    handler.addFilter(is_worth_a_line)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def in_trace(context: SpanContext | None) -> dict[str, Any]:
    """`extra` of a record about a request that the running task doesn't work for."""
    return {_CONTEXT: context}


def _trace_fields(record: logging.LogRecord) -> dict[str, str]:
    context: SpanContext | None = getattr(record, _CONTEXT, None) or telemetry.current()
    if context is None:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for a stream that a stopping server cancelled: gRPC may call that an error."""
    kind = record.exc_info[0] if record.exc_info else None
    is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
    return not (is_cancelled and record.name.startswith("grpc."))


class Seldom(logging.Filter):
    """Lets each logger whose name begins with `prefix` speak once in a while, as a warning."""

    def __init__(self, prefix: str, every_s: float) -> None:
        super().__init__()
        self._prefix = prefix
        self._every_s = every_s
        self._spoke_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._prefix) or record.levelno < logging.WARNING:
            return True
        if record.created - self._spoke_at.get(record.name, 0.0) < self._every_s:
            return False
        self._spoke_at[record.name] = record.created
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


class TextFormatter(logging.Formatter):
    """`12:00:00 INFO    router octavo_router.app: message trace_id=... span_id=...`"""

    def __init__(self, service: str) -> None:
        form = f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s"
        super().__init__(form, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = "".join(f" {key}={value}" for key, value in _trace_fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One JSON object a record; a traceback is its member `exception`. Times in UTC."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_trace_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
