"""octavo.cli.bench and its parts: workloads, limits, measurement, the HTTP load."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from octavo.chrome_trace import read_events
from octavo.cli import main as run_cli
from octavo.cli.bench import _options, _parse
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
from octavo.cli.measurement import RequestTiming, Run, make_record, percentiles
from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.workloads import BenchRequest, load_shapes, load_workloads, make_requests
from octavo.errors import ConfigurationError, OctavoError
from tests.fakes.inference_server import InferenceServer

RECORD_FIELDS = {
    *("date", "commit", "gpu", "torch", "triton", "model", "dtype", "quant", "workload"),
    *("sampled", "path", "routers", "wall_s", "in_tok", "out_tok", "out_tok_s", "in_tok_s"),
    *("ttft_ms", "itl_ms", "limit_fraction"),
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
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\ndata: [DONE]\n\n'
)


def test_http_load_counts_frames_and_reads_the_usage() -> None:
    # Three frames: one event, two at once, one cut in the middle of its mark; then the usage.
    server = CompletionsServer("200 OK", [EVENT, EVENT + EVENT, EVENT[:4], EVENT[4:], USAGE])
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


def test_a_server_that_is_not_there_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_shapes()["llama8b"]))
    for url, protocol in (("http://127.0.0.1:1", "http"), ("127.0.0.1:1", "grpc")):
        assert run_cli(["bench", "--url", url, "--protocol", protocol, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"octavo bench: {url}: ")
        assert error.count("\n") == 1


def test_options_of_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    options = _options(_parse(["--model-shape", "qwen3-0.6b", "--max-num-seqs", "4"]))
    assert options.model == str(tmp_path / "shapes" / "qwen3-0.6b")
    assert options.worker.load_format == "random"
    assert options.worker.max_num_seqs == 4
    # The best of two runs with the same prompts: the second must not find them.
    assert not options.scheduler.enable_prefix_caching
    assert options.router.port == 0
    assert _options(_parse(["--port", "9000"])).router.port == 9000
    with pytest.raises(ConfigurationError, match="not both"):
        _options(_parse(["some/model", "--model-shape", "llama8b"]))
    with pytest.raises(ConfigurationError, match="shows one worker"):
        _options(_parse(["--profile", "trace.json", "--workers", "2"]))
    with pytest.raises(ConfigurationError, match="must be above 0"):
        _options(_parse(["--scale", "0"]))


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
