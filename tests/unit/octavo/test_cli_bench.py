"""`octavo bench`: a bare worker is measured, and what was measured is recorded and shown."""

import json
from pathlib import Path

import pytest

from octavo.chrome_trace import read_events
from octavo.cli import main as run_cli
from octavo.cli.bench_cases import Measured
from octavo.cli.bench_options import parse_bench_options
from octavo.cli.bench_report import BenchReport
from octavo.cli.bench_table import HEAD, row_of
from octavo.cli.limits import quant_method
from octavo.cli.measurement import RequestTiming, Run
from octavo.cli.workloads import load_shapes, load_workloads, make_requests
from tests.unit.octavo.test_cli_bench_options import model_folder
from tests.unit.octavo.test_cli_measurement import run_of_two

RECORD_FIELDS = {
    *("date", "commit", "gpu", "torch", "triton", "model", "dtype", "quant", "workload"),
    *("sampled", "path", "routers", "wall_s", "in_tok", "out_tok", "out_tok_s", "in_tok_s"),
    *("ttft_ms", "itl_ms", "limit_fraction", "num_steps", "step_ms", "idle_fraction", "runs_s"),
}


def test_what_is_measured_is_recorded_at_once_with_the_split_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    flags = [model_folder(tmp_path), "--path", "both", "--sampling", "both", "--record", str(file)]
    options = parse_bench_options(flags)
    greedy, sampled = options.cases
    report = BenchReport(options)
    run, cores = run_of_two(), {"client": 0.3, "router": 0.5, "scheduler": 0.2, "worker": 1.1}
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
    assert title == "some-model float32 on CPU"
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
