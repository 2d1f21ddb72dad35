"""octavo.cli.bench_serve against a scripted server: the two loops, failures, records, tables."""

import asyncio
import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octavo.cli import main as run_cli
from octavo.cli.measurement import RequestTiming
from octavo.cli.serve_charts import histogram
from octavo.cli.serve_client import Outcome, Server, send
from octavo.cli.serve_load import Arrival
from octavo.cli.serve_plots import write_plots
from octavo.cli.serve_report import Slo, comparison, make_serve_record, warnings
from octavo.cli.serve_run import LoadResult, Prepared, Progress, run_load
from tests.fakes.openai_server import Body, OpenAiServer, Reply


def _outcome(
    ttft_ms: float = 100.0,
    tpot_ms: float = 10.0,
    num_tokens: int = 11,
    *,
    error: str | None = None,
    lag_s: float = 0.0,
) -> Outcome:
    timing = RequestTiming(50, 1000.0, num_output_tokens=num_tokens)
    timing.frame(1000.0 + ttft_ms / 1e3)
    if num_tokens > 1:
        timing.frame(1000.0 + (ttft_ms + tpot_ms * (num_tokens - 1)) / 1e3)
    return Outcome(timing, lag_s, error)


def _requests(due: Sequence[float | None]) -> list[Prepared]:
    return [Prepared(Arrival(i, due_s, 1, 1), str(i)) for i, due_s in enumerate(due)]


def test_open_arrivals_do_not_wait_for_answers() -> None:
    """No answer comes before all questions were asked: a loop that waits would hang."""

    async def scenario() -> LoadResult:
        all_sent = asyncio.Event()
        sent: list[str] = []

        async def sender(request: Prepared, due_s: float | None) -> Outcome:
            assert due_s is not None
            sent.append(request.body)
            if len(sent) == 20:
                all_sent.set()
            await all_sent.wait()
            return Outcome(RequestTiming(1, due_s))

        async with asyncio.timeout(20):
            result = await run_load(_requests([0.001 * i for i in range(20)]), sender)
        assert sent == [str(i) for i in range(20)]
        return result

    result = asyncio.run(scenario())
    assert result.max_in_flight == 20
    due = sorted(item.timing.submitted_s - result.started_s for item in result.outcomes)
    assert due == pytest.approx([0.001 * i for i in range(20)], abs=1e-6)


def test_nothing_is_sent_before_it_is_due() -> None:
    early_s: list[float] = []

    async def sender(request: Prepared, due_s: float | None) -> Outcome:
        assert due_s is not None
        early_s.append(due_s - time.perf_counter())
        return Outcome(RequestTiming(1, due_s))

    asyncio.run(run_load(_requests([0.03, 0.06, 0.09]), sender))
    assert len(early_s) == 3
    # Timers are exact to a millisecond.
    assert max(early_s) < 0.002


def test_late_requests_count_from_when_they_were_due() -> None:
    """A client that was held up must not make a server look fast."""
    with OpenAiServer() as server:
        target = Server("s", f"{server.url}/v1", "m", is_chat=False)
        due_s = time.perf_counter() - 5.0
        outcome = asyncio.run(send(target, target.body([1, 2], 3, None), 2, due_s))
        now = asyncio.run(send(target, target.body([1, 2], 3, None), 2, None))
    assert outcome.error is now.error is None
    assert outcome.timing.submitted_s == due_s
    assert outcome.lag_s >= 5.0
    assert outcome.ttft_s >= 5.0
    assert outcome.e2e_s >= outcome.ttft_s
    assert (now.lag_s, now.timing.num_prompt_tokens, now.timing.num_output_tokens) == (0.0, 7, 2)


def test_a_closed_loop_keeps_its_number_of_clients_busy() -> None:
    running = most = 0

    async def sender(request: Prepared, due_s: float | None) -> Outcome:
        nonlocal running, most
        assert due_s is None
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return Outcome(RequestTiming(1, 0.0))

    result = asyncio.run(run_load(_requests([None] * 10), sender, concurrency=3))
    assert (len(result.outcomes), most, result.max_in_flight) == (10, 3, 3)


def test_after_the_duration_nothing_new_is_sent() -> None:
    told: list[int] = []

    async def sender(request: Prepared, due_s: float | None) -> Outcome:
        await asyncio.sleep(0.02)
        return Outcome(RequestTiming(1, 0.0))

    async def scenario() -> tuple[LoadResult, LoadResult]:
        opened = await run_load(_requests([0.0, 0.01, 99.0, 99.1]), sender, duration_s=0.05)
        closed = await run_load(
            _requests([None] * 1000),
            sender,
            concurrency=2,
            duration_s=0.05,
            progress=Progress(lambda p: told.append(p.num_ended)),
        )
        return opened, closed

    opened, closed = asyncio.run(scenario())
    assert len(opened.outcomes) == 2
    # What runs may end.
    assert 2 <= len(closed.outcomes) < 100
    assert told[-1] == len(closed.outcomes)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(status=429, body={"error": {"message": "full"}}), "http 429"),
        (Reply(status=500), "http 500"),
        (Reply(raw_end=b""), "broken off"),
        (Reply(raw_end=b"", is_cut=False), "broken off"),
        (Reply(raw_end=b'data: {"error": {"message": "gone"}}\n\n'), "failed in mid-stream"),
        (Reply(raw_end=b"data: {\n\n"), "bad answer"),
        (Reply(raw_end=b"data: 1\n\n"), "bad answer"),
        (Reply(pieces=("", "")), "empty answer"),
        (Reply(before_piece=lambda: time.sleep(0.4)), "timeout"),
        (Reply(), None),
        (Reply(usage=None, chunk_bytes=7), None),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_failures_are_outcomes_by_kind(reply: Reply, error: str | None, is_chat: bool) -> None:
    timeout_s = 0.2 if error == "timeout" else 20.0
    with OpenAiServer(lambda _: reply) as server:
        target = Server("s", f"{server.url}/v1", "m", is_chat, timeout_s=timeout_s)
        outcome = asyncio.run(send(target, target.body("hi", 3, 9), 1, None))
    assert outcome.error == error
    if error is None:
        # Without usage: as many as the events with text.
        assert outcome.timing.num_output_tokens == 2
    assert server.paths == ["/v1/chat/completions" if is_chat else "/v1/completions"]
    assert server.bodies[0]["seed"] == 9


def test_a_server_that_is_not_there_is_an_outcome_too() -> None:
    target = Server("s", "http://127.0.0.1:1/v1", "m", is_chat=False)
    assert asyncio.run(send(target, "{}", 1, None)).error == "connect"


def test_goodput_counts_what_kept_every_limit() -> None:
    slo = Slo(ttft_ms=100.001, tpot_ms=20.0)
    kept = [_outcome(), _outcome(tpot_ms=999.0, num_tokens=1)]
    missed = [_outcome(ttft_ms=101.0), _outcome(tpot_ms=21.0), _outcome(error="timeout")]
    assert [slo.is_kept(item) for item in kept + missed] == [True, True, False, False, False]
    assert not Slo(e2e_ms=199.0).is_kept(_outcome())
    assert Slo(e2e_ms=201.0).is_kept(_outcome())
    result = LoadResult((*kept, *missed), 1000.0, 2.0, 5, 0.1)
    record = make_serve_record(result, {"label": "a"}, slo)
    assert record["slo"] == {"ttft_ms": 100.001, "tpot_ms": 20.0}
    assert record["good_fraction"] == 0.4
    assert record["goodput_req_s"] == pytest.approx(2 / record["wall_s"], rel=1e-3)
    assert (record["num_requests"], record["num_ok"], record["errors"]) == (5, 4, {"timeout": 1})
    assert record["tpot_ms"] == {"p50": 10.0, "p90": 21.0, "p99": 21.0}
    assert record["ttft_ms"]["p50"] == 100.0
    assert record["e2e_ms"] == {"p50": 200.0, "p90": 310.0, "p99": 310.0}


def test_the_measuring_client_is_doubted_where_it_should_be() -> None:
    def said(cpu: float, cached: int, *outcomes: Outcome) -> str:
        for outcome in outcomes:
            outcome.timing.num_cached_tokens = cached
        result = LoadResult(outcomes, 1000.0, 2.0, 1, cpu)
        return "\n".join(warnings(make_serve_record(result, {}, Slo()), result))

    assert said(0.3, 0, _outcome()) == ""
    assert "this client used 95 % of a CPU" in said(0.95, 0, _outcome())
    assert "were sent 30 ms late or more" in said(0.3, 0, _outcome(lag_s=0.03))
    assert "40 of 50 prompt tokens came from a prefix cache" in said(0.3, 40, _outcome())
    failed = _outcome(error="http 429")
    failed.detail = "429: slow\ndown"
    assert said(0.3, 0, failed) == "http 429: 429: slow down"


def _table_of(records: list[dict[str, Any]]) -> str:
    out = Console(file=io.StringIO(), width=150)
    out.print(comparison("t", records))
    return out.file.getvalue()


def test_the_table_compares_with_the_first_server() -> None:
    slow = LoadResult((_outcome(), _outcome()), 1000.0, 2.0, 2, 0.1)
    fast = LoadResult((_outcome(50.0, 5.0), _outcome(50.0, 5.0)), 1000.0, 2.0, 2, 0.1)
    dead = LoadResult((_outcome(error="connect"),), 1000.0, 2.0, 1, 0.1)
    slo = Slo(tpot_ms=7.0)
    records = [
        make_serve_record(result, {"label": label}, slo)
        for label, result in (("slow", slow), ("fast", fast), ("dead", dead))
    ]
    rows = _rows(_table_of(records))
    assert rows["first token (TTFT) p50"] == ["100.0 ms", "50.0 ms", "0.50×", "-", ""]
    assert rows["output tokens/s"] == ["110.0", "220.0", "2.00×", "-", ""]
    assert rows["kept the SLOs"] == ["0.0 %", "100.0 %", "", "0.0 %", ""]
    assert rows["failed"] == ["0", "0", "", "1", ""]
    assert "kept the SLOs" not in _table_of([make_serve_record(slow, {"label": "a"}, Slo())])


def _rows(table: str) -> dict[str, list[str]]:
    lines = [line.split("│")[1:-1] for line in table.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_histograms_hold_every_value() -> None:
    values = [1.0] * 50 + [math.exp(k / 10) for k in range(50)] + [0.0]
    lines = histogram("t", values).splitlines()
    assert lines[0] == "t (101)"
    assert len(lines) == 13
    counts = [int(line.split("│")[2].split()[0]) for line in lines[1:]]
    assert sum(counts) == 101
    assert lines[-1].endswith("100.0 %")
    assert all("│" in line and (count == 0) == (line.split("│")[1].strip() == "")
               for line, count in zip(lines[1:], counts, strict=True))  # fmt: skip
    assert histogram("t", [5.0, 5.0]).splitlines()[1].endswith("2 100.0 %")
    assert histogram("t", []) == "t: nothing measured"


def test_plots_of_nothing_are_plots(tmp_path: Path) -> None:
    """All failed, or answers of one token: no distribution, no pace."""
    results = {
        "dead": LoadResult((_outcome(error="connect"),), 1000.0, 2.0, 1, 0.1),
        "short": LoadResult((_outcome(num_tokens=1),), 1000.0, 2.0, 1, 0.1),
    }
    paths = write_plots(tmp_path, results, Slo(e2e_ms=9.0))
    assert [path.name for path in paths] == ["latency.png", "timeline.png"]


def test_two_servers_are_compared_recorded_and_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plots = tmp_path / "records.jsonl", tmp_path / "plots"
    flags = ["--num-requests", "6", "--rate", "200", "--prompt-tokens", "4:8"]
    flags += ["--output-tokens", "2", "--ignore-eos", "--slo-ttft-ms", "60000", "--histogram"]
    with OpenAiServer() as first, OpenAiServer(models=["other"]) as second:
        urls = ["--url", f"first={first.url}", "--url", f"second={second.url}"]
        out = [*urls, "--record", str(file), "--plot", str(plots)]
        assert run_cli(["bench", "serve", *flags, *out]) == 0
    text, table = capsys.readouterr()
    assert file.read_text() == text
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["label"] for record in records] == ["first", "second"]
    assert [record["model"] for record in records] == ["m", "other"]
    assert records[0]["arrivals"] == "poisson 200/s"
    assert records[0]["num_ok"] == records[1]["num_ok"] == 6
    assert (records[0]["in_tok"], records[0]["out_tok"], records[0]["good_fraction"]) == (42, 12, 1)
    # The same requests for both, after one probe each.
    assert len(first.bodies) == 7
    prompts = [[body["prompt"] for body in server.bodies] for server in (first, second)]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert all(body["ignore_eos"] and body["max_tokens"] == 2 for body in first.bodies)
    assert "ratio" in table
    assert "first: first token (6)" in table
    for name in ("latency.png", "timeline.png"):
        assert (plots / name).read_bytes().startswith(b"\x89PNG")


def test_servers_without_ids_get_words_of_the_right_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """This one counts two tokens a word and 11 of its own."""

    def reply(body: Body) -> Reply:
        if not isinstance(body["prompt"], str):
            return Reply(status=400, body={"error": {"message": "text only"}})
        return Reply(usage=(2 * len(body["prompt"].split()) + 11, 2))

    flags = ["--num-requests", "3", "--concurrency", "2", "--prompt-tokens", "111", "--sampled"]
    with OpenAiServer(reply) as server:
        assert run_cli(["bench", "serve", "--url", server.url, *flags]) == 0
    text, shown = capsys.readouterr()
    record = json.loads(text)
    assert (record["prompts"], record["in_tok"]) == ("words", 333)
    assert "takes no ids, so it gets words" in " ".join(shown.split())
    assert sorted(body["seed"] for body in server.bodies[3:]) == [0, 1, 2]
    assert server.bodies[-1]["temperature"] == 1.0
    assert "ignore_eos" not in server.bodies[-1]


def test_failed_requests_are_shown_and_fail_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replies = iter([Reply(), Reply(), *[Reply(status=503, body={"e": "full"})] * 9])
    with OpenAiServer(lambda _: next(replies)) as server:
        flags = ["--api", "chat", "--num-requests", "4"]
        assert run_cli(["bench", "serve", "--url", server.url, *flags]) == 1
    text, shown = capsys.readouterr()
    record = json.loads(text)
    assert (record["num_ok"], record["errors"]) == (0, {"http 503": 4})
    assert "http 503" in shown
    with OpenAiServer(lambda _: Reply(status=401, body={})) as server:
        assert run_cli(["bench", "serve", "--url", server.url]) == 2
    assert "octavo bench serve: " in capsys.readouterr().err


def test_the_clients_run_without_the_services_packages() -> None:
    """The extra `client` brings neither tensors nor gRPC, and plots are another."""
    code = "import sys, octavo.cli.chat, octavo.cli.bench_serve; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "httpx" in loaded
    heavy = {"torch", "grpc", "numpy", "redis", "huggingface_hub", "tokenizers", "matplotlib"}
    assert heavy.isdisjoint(loaded)


def test_what_is_missing_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_cli(["bench", "serve", "--url", "127.0.0.1:1"]) == 2
    assert "no server answers at http://127.0.0.1:1/v1" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run_cli(["bench", "serve", "--plot", str(tmp_path / "p")]) == 2
    assert "pip install 'octavo[plot]'" in capsys.readouterr().err
