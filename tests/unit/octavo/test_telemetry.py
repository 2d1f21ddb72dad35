"""Whether tracing is on, W3C contexts, sampling, and a collector that is away."""

import json
import subprocess
import sys
import time

import pytest

from octavo import telemetry
from octavo.telemetry import FinishedSpan, Tracer
from tests.fakes.span_memory import SpanMemory, memory_tracer

_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


class Hanging(SpanMemory):
    """A pipeline that can't send what it has."""

    def close(self) -> None:
        time.sleep(60)


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        (_ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({**_ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
        ({**_ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({**_ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
        ({**_ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**_ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_an_endpoint_turns_tracing_on(environ: dict[str, str], is_on: bool) -> None:
    assert telemetry.is_wanted(environ) is is_on


def test_contexts_go_from_process_to_process() -> None:
    context = telemetry.parse_traceparent(_TRACEPARENT, "vendor=1,other=2")
    assert context is not None
    assert context.is_remote
    assert telemetry.traceparent_of(context) == _TRACEPARENT
    assert telemetry.tracestate_of(context) == "vendor=1,other=2"
    child = telemetry.child_of(context)
    assert (child.trace_id, child.trace_flags) == (context.trace_id, context.trace_flags)
    assert child.span_id != context.span_id
    assert telemetry.tracestate_of(child) == "vendor=1,other=2"
    again = telemetry.parse_traceparent(telemetry.traceparent_of(child))
    assert again is not None
    assert again.span_id == child.span_id


@pytest.mark.parametrize(
    "header",
    [
        *("", "nonsense", "00-0-0-01", _TRACEPARENT[:-1], f"ff{_TRACEPARENT[2:]}"),
        *(f"00-{'0' * 32}-b7ad6b7169203331-01", _TRACEPARENT + "-" + "x" * 600, "\x00" * 55),
    ],
)
def test_a_malformed_context_is_as_good_as_none(header: str) -> None:
    assert telemetry.parse_traceparent(header) is None


def test_an_oversized_tracestate_is_left_behind() -> None:
    context = telemetry.parse_traceparent(_TRACEPARENT, "a=" + "x" * 600)
    assert context is not None
    assert telemetry.tracestate_of(context) == ""


def test_only_sampled_spans_are_exported_and_only_their_traces_are_exemplars() -> None:
    tracer, memory = memory_tracer()
    sampled = tracer.start("a", None)
    unsampled = tracer.start("b", telemetry.parse_traceparent(_TRACEPARENT[:-1] + "0"))
    for context in (sampled, unsampled):
        tracer.finish(FinishedSpan("x", context, None, 1, 2, {}))
    assert [span.context for span in memory.spans] == [sampled]
    assert telemetry.exemplar_of(sampled) == {"trace_id": f"{sampled.trace_id:032x}"}
    assert telemetry.exemplar_of(unsampled) is None
    assert telemetry.exemplar_of(None) is None


def test_a_flush_that_hangs_is_left_behind() -> None:
    started_at = time.monotonic()
    Tracer(Hanging()).close(timeout_s=0.05)
    assert time.monotonic() - started_at < 30


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path), **environ},
    )


def test_nothing_of_the_sdk_is_loaded_while_tracing_is_off() -> None:
    code = (
        "import sys; from octavo.telemetry import open_tracer\n"
        "assert open_tracer('router', 'r') is None\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'grpc'))])"
    )
    assert run(code).stdout == "[]\n"


SAMPLING_PROGRAM = """
import json, sys
from octavo.telemetry import open_tracer, parse_traceparent
tracer = open_tracer("router", "r1")
parents = [None, parse_traceparent(sys.argv[1]), parse_traceparent(sys.argv[1][:-1] + "0")]
shares = [
    sum(tracer.start("router.request", parent).trace_flags.sampled for _ in range(2000)) / 2000
    for parent in parents
]
print(json.dumps(shares))
"""


@pytest.mark.parametrize(
    ("environ", "least", "most", "follows_parent"),
    [
        ({}, 1.0, 1.0, True),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.15, 0.35, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, 1.0, 1.0, True),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0.0, 0.0, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0.0, 0.0, True),
        ({"OTEL_TRACES_SAMPLER_ARG": "lots"}, 1.0, 1.0, True),
        ({"OTEL_TRACES_SAMPLER": "", "OTEL_TRACES_SAMPLER_ARG": ""}, 1.0, 1.0, True),
    ],
)
def test_the_standard_variables_choose_the_sampler(
    environ: dict[str, str], least: float, most: float, follows_parent: bool
) -> None:
    code = SAMPLING_PROGRAM.replace("sys.argv[1]", repr(_TRACEPARENT))
    done = run(code, **_ENDPOINT, **environ)
    new, sampled, unsampled = json.loads(done.stdout)
    assert least <= new <= most
    if follows_parent:
        assert (sampled, unsampled) == (1.0, 0.0)


LOST_PROGRAM = """
import logging, time
from octavo.logs import setup_logging
from octavo.telemetry import FinishedSpan, open_tracer
setup_logging("router", "info")
tracer = open_tracer("router", "r1")
for _ in range(5000):
    tracer.finish(FinishedSpan("x", tracer.start("x", None), None, 1, 2, {"octavo.n": 1}))
print("finished", flush=True)
tracer.close(timeout_s=0.5)
print("closed")
"""


def test_a_collector_that_is_away_holds_nobody_up() -> None:
    done = run(LOST_PROGRAM, **_ENDPOINT, OTEL_EXPORTER_OTLP_TIMEOUT="300")
    assert done.stdout == "finished\nclosed\n"
    assert "traces go to http://127.0.0.1:1" in done.stderr
    # It is said, once, and not as an error.
    assert [line[9:17] for line in done.stderr.splitlines() if "UNAVAILABLE" in line] == [
        "WARNING "
    ]


def test_a_missing_sdk_costs_the_traces_and_nothing_else() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.grpc'] = None\n"
        "from octavo.logs import setup_logging; setup_logging('router', 'info')\n"
        "from octavo.telemetry import open_tracer; print(open_tracer('router', 'r1'))\n"
    )
    done = run(code, **_ENDPOINT)
    assert done.stdout == "None\n"
    assert "octavo[telemetry]" in done.stderr
