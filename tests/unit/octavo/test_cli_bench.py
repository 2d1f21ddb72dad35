"""octavo.cli.bench and its parts: workloads, limits, measurement, the HTTP load."""

import asyncio
import json
import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from octavo.chrome_trace import read_events
from octavo.cli import main as run_cli
from octavo.cli.bench_cases import Case, Measured, warm_ups, with_fresh_ids
from octavo.cli.bench_options import parse_bench_options
from octavo.cli.bench_report import BenchReport
from octavo.cli.bench_table import HEAD, row_of
from octavo.cli.grpc_load import run_grpc
from octavo.cli.http_load import run_http
from octavo.cli.limits import (
    knows_weights,
    kv_bytes_per_token,
    limit_s,
    matmul_params,
    quant_method,
    read_params,
    weight_bytes,
)
from octavo.cli.load_clients import Answers, _collect
from octavo.cli.measurement import RequestTiming, Run, make_record
from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.percentiles import percentiles
from octavo.cli.service_readings import read_histograms
from octavo.cli.step_report import (
    OF_SCHEDULERS,
    OF_WORKERS,
    Histogram,
    StepReport,
)
from octavo.cli.workloads import BenchRequest, load_shapes, load_workloads, make_requests
from octavo.errors import ConfigurationError, OctavoError
from octavo.metrics import SchedulerMetrics, WorkerMetrics
from octavo.metrics_http import exposition
from tests.fakes.inference_server import InferenceServer

RECORD_FIELDS = {
    *("date", "commit", "gpu", "torch", "triton", "model", "dtype", "quant", "workload"),
    *("sampled", "path", "routers", "wall_s", "in_tok", "out_tok", "out_tok_s", "in_tok_s"),
    *("ttft_ms", "itl_ms", "limit_fraction", "num_steps", "step_ms", "idle_fraction", "runs_s"),
}


def test_requests_are_fixed_and_follow_the_workload() -> None:
    workloads = load_workloads()
    assert set(workloads) == {"bs1", "bs8", "decode128", "mixed", "prefill"}
    mixed = make_requests(workloads["mixed"], 128256)
    assert mixed == make_requests(workloads["mixed"], 128256)
    assert len(mixed) == 256
    assert all(100 <= len(item.token_ids) <= 1024 for item in mixed)
    assert all(100 <= item.num_output_tokens <= 1024 for item in mixed)
    ids = [token_id for item in mixed for token_id in item.token_ids]
    assert (min(ids), max(ids)) == (10, 29_999)
    # The generator's order: prompt length, output length, then the ids.
    source = random.Random(0)
    lengths = (source.randint(100, 1024), source.randint(100, 1024))
    assert (len(mixed[0].token_ids), mixed[0].num_output_tokens) == lengths
    assert mixed[0].token_ids[0] == source.randrange(10, 30_000)
    small = make_requests(workloads["mixed"], 300)
    assert max(token_id for item in small for token_id in item.token_ids) < 300


def test_scaling_shrinks_requests_and_lengths() -> None:
    scaled = load_workloads()["mixed"].scaled(0.1)
    assert (scaled.num_requests, scaled.prompt_tokens, scaled.output_tokens) == (
        26,
        (10, 102),
        (10, 102),
    )
    tiny = load_workloads()["prefill"].scaled(0.001)
    assert (tiny.num_requests, tiny.prompt_tokens, tiny.output_tokens) == (1, (4, 4), (1, 1))
    runs = {name: workload.num_runs for name, workload in load_workloads().items()}
    assert runs == {"bs1": 2, "bs8": 2, "decode128": 2, "mixed": 1, "prefill": 2}


def test_limits_are_the_cards() -> None:
    """Against numbers worked out by hand from the shapes (in GB, KiB, tokens/s)."""
    shapes = load_shapes()
    assert matmul_params(shapes["llama8b"]) == pytest.approx(7.50e9, rel=1e-2)
    assert kv_bytes_per_token(shapes["llama8b"], "bfloat16") == 128 << 10
    assert kv_bytes_per_token(shapes["llama2-7b"], "bfloat16") == 512 << 10
    assert kv_bytes_per_token(shapes["qwen3-0.6b"], "bfloat16") == 112 << 10

    def rate(batch: int) -> float:
        # A thousand steps around a context of 1,024.
        requests = [BenchRequest((1,) * 524, 1001)] * batch
        prefill_only = [BenchRequest((1,) * 524, 1)] * batch
        seconds = limit_s(shapes["llama8b"], "bfloat16", requests)
        return batch * 1000 / (seconds - limit_s(shapes["llama8b"], "bfloat16", prefill_only))

    assert rate(1) == pytest.approx(278, rel=0.01)
    assert rate(32) == pytest.approx(7_000, rel=0.02)
    assert rate(128) == pytest.approx(16_700, rel=0.01)
    assert rate(256) == pytest.approx(18_500, rel=0.01)
    prefill = [BenchRequest((1,) * 4000, 1)] * 64
    seconds = limit_s(shapes["llama8b"], "bfloat16", prefill)
    assert 64 * 4000 / seconds == pytest.approx(46_000, rel=0.01)


def test_limits_of_quantised_shapes() -> None:
    """4 bits and a group's 20 more for 6.98e9 weights, the head of 0.525e9 in 16 bits: 4.68 GB."""
    shape = load_shapes()["llama8b-awq"]
    assert quant_method(shape) == "awq"
    assert weight_bytes(shape, "float16") == pytest.approx(4.68e9, rel=0.005)
    assert weight_bytes(load_shapes()["llama8b"], "float16") == pytest.approx(15.0e9, rel=0.005)
    gptq = {**shape, "quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}
    assert weight_bytes(gptq, "float16") == pytest.approx(8.03e9, rel=0.005)
    other = {**shape, "quantization_config": {"quant_method": "compressed-tensors"}}
    assert [knows_weights(config) for config in (shape, gptq, other)] == [True, True, False]


def test_limits_of_experts_are_those_that_are_hit() -> None:
    shape = load_shapes()["qwen3-30b-a3b"]
    # 30.5e9 parameters and 3.3e9 active ones, less the embedding's 0.31e9.
    assert matmul_params(shape) == pytest.approx(3.04e9, rel=1e-2)
    assert read_params(shape, 1) == pytest.approx(matmul_params(shape))
    assert read_params(shape, 32) == pytest.approx(1.23e9 + 0.873 * 28.99e9, rel=1e-2)
    assert weight_bytes(shape, "bfloat16", 32) == 2 * read_params(shape, 32)
    assert read_params(shape, 4096) == pytest.approx(30.2e9, rel=1e-2)
    mixtral = {**load_shapes()["llama8b"], "num_local_experts": 8, "num_experts_per_tok": 2}
    # Llama's shape with two of eight MLPs.
    assert matmul_params(mixtral) == pytest.approx(
        matmul_params(load_shapes()["llama8b"]) + 5.64e9, rel=1e-2
    )
    assert read_params(load_shapes()["llama8b"], 8) == matmul_params(load_shapes()["llama8b"])


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) == {}
    assert percentiles([5.0]) == {"p50": 5.0, "p90": 5.0, "p99": 5.0}
    values = [float(value) for value in range(1, 101)]
    random.Random(1).shuffle(values)
    assert percentiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def _run_of_two() -> Run:
    first = RequestTiming(10, 100.0)
    for now in (100.5, 100.6, 101.0):
        first.frame(now)
    first.num_output_tokens = 4
    second = RequestTiming(20, 100.0, num_output_tokens=1, num_cached_tokens=16)
    second.frame(102.0)
    return Run((first, second))


def test_a_run_is_timed_from_first_submit_to_last_token() -> None:
    run = _run_of_two()
    assert run.wall_s == pytest.approx(2.0)
    assert (run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens) == (30, 5, 16)
    assert run.ttft_ms == {"p50": 500.0, "p90": 2000.0, "p99": 2000.0}
    assert run.itl_ms == {"p50": 100.0, "p90": 400.0, "p99": 400.0}
    record = make_record(run, {"workload": "bs1"}, 1.0)
    assert (record["out_tok_s"], record["in_tok_s"]) == (2.5, 15.0)
    assert record["limit_fraction"] == 0.5
    assert make_record(run, {}, None)["limit_fraction"] is None
    assert json.loads(json.dumps(record)) == record


def test_shapes_become_folders_with_a_whole_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    config = {**load_shapes()["llama2-7b"], "vocab_size": 5000}
    folder = ensure_shape_folder("small", config)
    assert ensure_shape_folder("small", config) == folder
    assert [path.name for path in (tmp_path / "shapes").iterdir()] == ["small"]
    written = json.loads((folder / "config.json").read_text())
    assert (written["dtype"], written["hidden_size"]) == ("bfloat16", 4096)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    text = "héllo\n 你好"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    words = [tokenizer.decode([token_id]) for token_id in range(259, 5000)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(" ") for word in words)


class CompletionsServer:
    """Answers POST /v1/completions with SSE frames as given, each written on its own."""

    def __init__(self, status: str, writes: list[bytes]) -> None:
        self._head = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
        self._writes = writes
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(self._head)
        for data in self._writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()


def _load(server: CompletionsServer, count: int, told: Callable[[int], None]) -> Run:
    requests = [BenchRequest((11, 12, 13), 5)] * count

    async def scenario() -> Run:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            return await run_http(
                f"http://127.0.0.1:{port}", "m", requests, {"temperature": 0.0}, told, "key"
            )

    return asyncio.run(scenario())


EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
USAGE = (
    b'data: {"choices": [], "usage": {"completion_tokens": 5, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "usage",
    [
        (USAGE + DONE,),
        (USAGE, DONE),
        (USAGE[:19], USAGE[19:] + DONE),
        (USAGE.replace(b'": ', b'":'), DONE),
    ],
)
def test_http_load_counts_frames_and_reads_the_usage(usage: tuple[bytes, ...]) -> None:
    # Three frames: one event, two at once, one cut in the middle of its mark. The usage is none,
    # however it arrives.
    frames = [EVENT, EVENT + EVENT, EVENT[:4], EVENT[4:]]
    server = CompletionsServer("200 OK", [*frames, *usage])
    told: list[int] = []
    run = _load(server, 3, told.append)
    assert len(server.bodies) == 3
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [11, 12, 13],
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    assert b"Authorization: Bearer key\r\n" in server.heads[0]
    assert run.num_output_tokens == 15
    assert run.num_cached_tokens == 6
    assert [len(timing.gaps_s) for timing in run.timings] == [2, 2, 2]
    # The bar ends where it should although events held more than one token.
    assert sum(told) == 15


def test_http_load_raises_what_the_server_says() -> None:
    refused = CompletionsServer("429 Too Many Requests", [b'{"error": "full"}'])
    with pytest.raises(ExceptionGroup) as group:
        _load(refused, 1, lambda _: None)
    assert group.group_contains(OctavoError, match=r"429 Too Many Requests: .*full")
    cut = CompletionsServer("200 OK", [EVENT])
    with pytest.raises(ExceptionGroup) as group:
        _load(cut, 1, lambda _: None)
    assert group.group_contains(OctavoError, match="ended without usage")


def test_grpc_load_counts_ids() -> None:
    told: list[int] = []
    requests = [BenchRequest((65, 66, 67), 3)] * 4
    with InferenceServer() as server:
        run = asyncio.run(run_grpc(server.address, requests, {"temperature": 0.0}, told.append))
    assert (run.num_output_tokens, sum(told)) == (12, 12)
    assert [len(timing.gaps_s) for timing in run.timings] == [2] * 4
    assert server.servicer.requests[0].ignore_eos


def test_a_clients_process_says_what_failed() -> None:
    here, there = multiprocessing.Pipe()
    answers = Answers((RequestTiming(1, 0.0),), 0.5)
    for item in (3, 4, answers, "no such model"):
        there.send(item)
    there.close()
    told: list[int] = []
    assert _collect(here, told.append) == answers
    assert told == [3, 4]
    with pytest.raises(OctavoError, match="no such model"):
        _collect(here, told.append)
    with pytest.raises(OctavoError, match="ended before its requests did"):
        _collect(here, told.append)
    here.close()


def test_a_server_that_is_not_there_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_shapes()["llama8b"]))
    for url, protocol in (("http://127.0.0.1:1", "http"), ("127.0.0.1:1", "grpc")):
        assert run_cli(["bench", "--url", url, "--protocol", protocol, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"octavo bench: {url}: ")
        assert error.count("\n") == 1


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with no more than a configuration."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_shapes()["qwen3-0.6b"]))
    return str(folder)


def test_options_of_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    options = parse_bench_options(["--model-shape", "qwen3-0.6b", "--max-num-seqs", "4"])
    assert options.stack.model == str(tmp_path / "shapes" / "qwen3-0.6b")
    assert options.stack.worker.load_format == "random"
    assert options.stack.worker.max_num_seqs == 4
    # Every run has the same prompts: none may find those of the one before.
    assert not options.stack.scheduler.enable_prefix_caching
    assert options.stack.router.port == 0
    assert (options.paths, options.protocols) == (("stack",), ("http",))
    with pytest.raises(ConfigurationError, match="not both"):
        parse_bench_options(["some/model", "--model-shape", "llama8b"])


def test_one_start_measures_a_list(model: str) -> None:
    flags = "--workload all --sampling both --protocol grpc,http --path both --routers 3"
    options = parse_bench_options([model, "--scale", "0.01", "--port", "9000", *flags.split()])
    assert options.stack.router.port == 9000
    names = [case.name for case in options.cases]
    assert names[:3] == ["bs1 greedy", "bs1 sampled", "bs8 greedy"]
    assert len(names) == len(set(names)) == 10
    assert options.paths == ("worker", "stack")
    assert options.protocols == ("grpc", "http")
    assert options.num_measurements == 30
    assert options.stack.num_routers == 3
    # A client keeps to one router, so each has one.
    assert options.num_clients >= 3
    assert [case.num_runs for case in options.cases] == [2, 2, 2, 2, 2, 2, 1, 1, 2, 2]
    flags = "--scale 0.01 --workload bs8,bs1,bs8 --sampled --runs 1"
    once = parse_bench_options([model, *flags.split()])
    assert [(case.name, case.num_runs) for case in once.cases] == [
        ("bs8 sampled", 1),
        ("bs1 sampled", 1),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--scale 0", "must be above 0"),
        ("--runs 0", "--runs 0: must be at least 1"),
        ("--routers 0", "--routers 0: must be at least 1"),
        ("--workload bs1,bs2", "--workload 'bs2': must be of bs1, bs8"),
        ("--workload ,", "--workload: names nothing"),
        ("--protocol quic", "--protocol 'quic': must be of http, grpc"),
        ("--sampled --sampling both", "give one of them"),
        ("--url http://h:1 --path both", "--url measures a running server"),
        ("--profile trace.json --workers 2", "shows one worker"),
        ("--profile trace.json --sampling both", "shows one worker"),
    ],
)
def test_mistakes_are_named_before_anything_starts(flags: str, message: str, model: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_bench_options([model, *flags.split()])


def _case(name: str, *, is_sampled: bool = False) -> Case:
    workload = load_workloads()[name]
    return Case(workload, is_sampled, tuple(make_requests(workload, 300)), 1, 300)


def test_warm_ups_are_as_wide_as_what_is_measured_and_share_no_prefix() -> None:
    cases = [_case("bs1"), _case("prefill"), _case("bs1", is_sampled=True)]
    greedy, wide, sampled, short = warm_ups(cases)
    assert [len(item.token_ids) for item in wide.requests] == [4000, 4000]
    assert [len(item.token_ids) for item in short.requests] == [128]
    assert [len(item.requests) for item in (greedy, sampled)] == [1, 1]
    assert (wide.sampling["temperature"], short.sampling["temperature"]) == (0.0, 1.0)
    measured = {request.token_ids[:16] for case in cases for request in case.requests}
    for warm_up in (greedy, wide, sampled, short):
        assert not measured & {request.token_ids[:16] for request in warm_up.requests}


def test_fresh_ids_keep_the_lengths() -> None:
    requests = _case("mixed").requests
    fresh = with_fresh_ids(requests, 300, 1)
    assert with_fresh_ids(requests, 300, 0) == requests
    assert fresh == with_fresh_ids(requests, 300, 1) != with_fresh_ids(requests, 300, 2)
    for one, other in zip(requests, fresh, strict=True):
        assert len(one.token_ids) == len(other.token_ids)
        assert one.num_output_tokens == other.num_output_tokens
        assert one.token_ids != other.token_ids
    assert max(token_id for item in fresh for token_id in item.token_ids) < 300


def test_a_quantile_is_found_between_bounds() -> None:
    """As Prometheus does it: ten values, of which eight are in (1, 2] and one above 4."""
    values = Histogram((1.0, 2.0, 4.0, float("inf")), (1, 8, 0, 1), 25.0)
    assert values.quantile(0.5) == 1 + 4 / 8
    assert values.quantile(0.9) == 2.0
    # What lies above all bounds is at least the last one.
    assert values.quantile(0.99) == 4.0
    assert values.with_others([values]).quantile(0.5) == 1.5
    assert values.with_others([values]).since(values) == values


def test_steps_are_reported_alike_from_each_and_from_histograms() -> None:
    assert StepReport.of_steps([1000, 3000], [0, 1000], [50, 7000]).to_record() == {
        "num_steps": 2,
        "step_ms": {"mean": 2.0, "p50": 1.0, "p90": 3.0, "p99": 3.0},
        "idle_fraction": 0.2,
        "plan_launch_ms": {},
        "worst_launch_ms": 7.0,
        "scheduler_ms": None,
    }
    metrics = WorkerMetrics(CollectorRegistry())
    scheduler = SchedulerMetrics(CollectorRegistry())

    def read() -> dict[str, Histogram]:
        pages = [exposition(item.registry, "")[0].decode() for item in (metrics, scheduler)]
        of_workers = read_histograms(pages[0], OF_WORKERS)
        return of_workers | read_histograms(pages[1], OF_SCHEDULERS)

    metrics.step_time.observe(9.0)
    before = read()
    for step_s, gap_s in ((0.001, 0.0), (0.003, 0.001)):
        metrics.step_time.observe(step_s)
        metrics.step_gap.observe(gap_s)
    for _ in range(200):
        metrics.plan_launch.observe(0.00006)
    metrics.plan_launch.observe(0.03)
    metrics.step_launch.observe(0.0003)
    metrics.step_launch.observe(0.07)
    scheduler.plan_time.observe(0.0002)
    scheduler.result_time.observe(0.0004)
    assert read().keys() == {*OF_WORKERS, *OF_SCHEDULERS}
    report = StepReport.of_histograms({n: h.since(before[n]) for n, h in read().items()})
    assert (report.num_steps, report.step_ms, report.idle_fraction) == (2, {"mean": 2.0}, 0.2)
    assert report.scheduler_ms == 0.3
    # All but one in 201 within the first bucket, which ends at a tenth of a millisecond.
    assert report.plan_launch_ms["p99"] <= 0.1
    # Where a bucket ends in which the longest launch lies.
    assert report.worst_launch_ms == 100.0
    nothing = StepReport.of_histograms({n: h.since(read()[n]) for n, h in read().items()})
    assert nothing == StepReport(0, {}, 0.0)


def test_what_is_measured_is_recorded_at_once_with_the_split_cost(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    flags = [model, "--path", "both", "--sampling", "both", "--record", str(file)]
    options = parse_bench_options(flags)
    greedy, sampled = options.cases
    report = BenchReport(options)
    run, cores = _run_of_two(), {"client": 0.3, "router": 0.5, "scheduler": 0.2, "worker": 1.1}
    slow = Run((RequestTiming(10, 0.0, 5, 0, 1.0, 2.5, [1.5]),), cores=cores)
    report.add(Measured(greedy, None, (slow, run)))
    assert len(file.read_text().splitlines()) == 1
    report.add(Measured(greedy, "http", (slow,)))
    # Nothing to hold it against.
    report.add(Measured(sampled, "grpc", (slow,)))
    bare, http, grpc = [json.loads(line) for line in file.read_text().splitlines()]
    captured = capsys.readouterr()
    assert captured.out == file.read_text()
    assert (bare["path"], bare["protocol"], bare["routers"], bare["clients"]) == (
        *("worker", None, 0, 0),
    )
    assert (http["path"], http["protocol"], http["routers"]) == ("stack", "http", 1)
    assert (bare["wall_s"], bare["runs_s"], http["runs_s"]) == (2.0, [2.5, 2.0], [2.5])
    assert (bare["sampled"], http["sampled"], grpc["sampled"]) == (False, False, True)
    assert http["split_ratio"] == 0.8
    assert "split_ratio" not in bare.keys() | grpc.keys()
    title, *rows = captured.err.splitlines()
    assert title == "some-model float32 on None"
    assert rows == [HEAD, row_of(bare), row_of(http), row_of(grpc)]
    assert rows[2].split()[:6] == ["bs1", "greedy", "http", "2.0", "2.50", "0.800"]
    assert rows[2].endswith(" 0.30 0.50 0.20 1.10")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sampled", "shape"), [(False, "llama8b-awq"), (True, "llama8b")])
def test_a_bare_worker_is_measured_and_recorded(
    sampled: bool, shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More requests than rows, prompts longer than a step, a cache that not all fit into."""
    config = {
        **load_shapes()[shape],
        **{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300},
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    record_file = tmp_path / "records.jsonl"
    flags = "--path worker --workload mixed --scale 0.03 --load-format random --max-num-seqs 3"
    flags += " --max-num-batched-tokens 16 --num-kv-blocks 9 --backend cpu --max-model-len 256"
    trace = tmp_path / "trace.json"
    arguments = ["bench", *flags.split(), "--record", str(record_file), "--profile", str(trace)]
    arguments.append(str(folder))
    assert run_cli([*arguments, "--sampled"] if sampled else arguments) == 0
    line = capsys.readouterr().out
    record = json.loads(line)
    assert record_file.read_text() == line
    assert record.keys() >= RECORD_FIELDS
    requests = make_requests(load_workloads()["mixed"].scaled(0.03), 300)
    assert record["in_tok"] == sum(len(item.token_ids) for item in requests)
    assert record["out_tok"] == sum(item.num_output_tokens for item in requests)
    assert (record["path"], record["sampled"], record["routers"]) == ("worker", sampled, 0)
    assert record["dtype"] == "float32"
    assert record["quant"] == quant_method(config)
    processes = [e["args"]["name"] for e in read_events(trace) if e["name"] == "process_name"]
    assert processes == ["bare worker", "client"]
    # No step draws more than one token a row, and there are three rows.
    assert record["num_steps"] >= record["out_tok"] / 3
    assert record["limit_fraction"] is None
