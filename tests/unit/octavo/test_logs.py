"""Log lines: one a record, as text or JSON with the same fields, under the trace in context."""

import asyncio
import json
import logging
import subprocess
import sys

import pytest

from octavo.logs import Seldom, is_worth_a_line

_GUARD_S = 30
_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_PROGRAM = f"""
import asyncio, logging, sys
from octavo import telemetry
from octavo.logs import in_trace, setup_logging

setup_logging("router", "info", sys.argv[1])
log = logging.getLogger("octavo_router.app")
context = telemetry.parse_traceparent("00-{_TRACE}-{_SPAN}-01")

async def request():
    telemetry.set_current(context)
    log.info("within")
    await asyncio.create_task(child())

async def child():
    log.warning("within a task of it")

async def main():
    await asyncio.create_task(request())
    log.info("outside: %s", "x")
    log.info("named", extra=in_trace(context))
    log.debug("not shown")
    try:
        raise ValueError("two\\nlines")
    except ValueError:
        log.exception("failed")

asyncio.run(main())
"""


def lines_of(form: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, form],
        capture_output=True,
        text=True,
        check=True,
        timeout=_GUARD_S,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text_has_time_level_service_logger_message_and_trace() -> None:
    lines = lines_of("text")
    assert all(line[2] == line[5] == ":" for line in lines[:4])
    ids = f"trace_id={_TRACE} span_id={_SPAN}"
    assert [line[9:] for line in lines[:5]] == [
        f"INFO    router octavo_router.app: within {ids}",
        f"WARNING router octavo_router.app: within a task of it {ids}",
        "INFO    router octavo_router.app: outside: x",
        f"INFO    router octavo_router.app: named {ids}",
        "ERROR   router octavo_router.app: failed",
    ]
    assert lines[5].startswith("Traceback")


def test_json_has_the_same_fields_one_object_a_line() -> None:
    records = [json.loads(line) for line in lines_of("json")]
    assert [record["message"] for record in records] == [
        *("within", "within a task of it", "outside: x", "named", "failed"),
    ]
    fields = ["time", "level", "service", "logger", "message"]
    ids = ["trace_id", "span_id"]
    assert list(records[0]) == [*fields, *ids]
    assert list(records[2]) == fields
    assert list(records[4]) == [*fields, "exception"]
    assert records[1]["level"] == "warning"
    assert (records[3]["trace_id"], records[3]["span_id"]) == (_TRACE, _SPAN)
    assert all(record["service"] == "router" for record in records)
    assert records[0]["time"].endswith("Z")
    assert "two\nlines" in records[4]["exception"]


def test_a_library_that_repeats_itself_is_heard_seldom() -> None:
    seldom = Seldom("opentelemetry.", 60.0)

    def heard(name: str, level: int, at: float) -> tuple[bool, str]:
        record = logging.LogRecord(name, level, "", 0, "away", None, None)
        record.created = at
        return seldom.filter(record), record.levelname

    exporter = "opentelemetry.exporter"
    assert heard(exporter, logging.ERROR, 1000.0) == (True, "WARNING")
    assert heard(exporter, logging.WARNING, 1059.0)[0] is False
    assert heard("opentelemetry.sdk", logging.WARNING, 1059.0)[0] is True
    assert heard(exporter, logging.INFO, 1059.0) == (True, "INFO")
    assert heard("octavo_router", logging.ERROR, 1059.0) == (True, "ERROR")
    assert heard(exporter, logging.ERROR, 1061.0) == (True, "WARNING")


@pytest.mark.parametrize(
    ("name", "error", "is_shown"),
    [
        ("grpc._cython.cygrpc", asyncio.CancelledError(), False),
        ("grpc._cython.cygrpc", ValueError(), True),
        ("grpc._cython.cygrpc", None, True),
        ("octavo_router", asyncio.CancelledError(), True),
    ],
)
def test_a_stream_that_a_stopping_server_ends_is_no_error(
    name: str, error: BaseException | None, is_shown: bool
) -> None:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord(name, logging.ERROR, "", 0, "not handled", None, info)
    assert is_worth_a_line(record) is is_shown


@pytest.mark.parametrize("service", ["router", "scheduler", "worker"])
def test_every_service_takes_the_form_from_its_settings(service: str) -> None:
    """A mistake in it is refused at start, by name."""
    command = [sys.executable, "-m", "octavo", service, "--log-format", "xml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "OCTAVO_LOG_FORMAT" in done.stderr
