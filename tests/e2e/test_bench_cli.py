"""`octavo bench` on real processes: the bare loop, then a stack with more than one router."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = "--path both --workload bs8,mixed --protocol all --scale 0.03 --routers 2 --clients 2"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_paths_are_measured_on_one_start_each(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "octavo", "bench", *FLAGS.split(), "--backend", "cpu"]
    ended = subprocess.run(
        [*command, "--num-kv-blocks", "200", "--record", str(file), str(tiny_folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == file.read_text()
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    names = [(record["workload"], record["protocol"]) for record in records]
    assert names == [
        *(("bs8", None), ("mixed", None)),
        *(("bs8", "http"), ("bs8", "grpc"), ("mixed", "http"), ("mixed", "grpc")),
    ]
    for workload in ("bs8", "mixed"):
        bare, *through = [record for record in records if record["workload"] == workload]
        for record in through:
            assert (record["in_tok"], record["out_tok"]) == (bare["in_tok"], bare["out_tok"])
            assert (record["routers"], record["clients"], record["cached_tok"]) == (2, 2, 0)
            ratio = bare["wall_s"] / record["wall_s"]
            assert record["split_ratio"] == pytest.approx(ratio, rel=0.1)
            assert record["cores"].keys() == {"client", "router", "scheduler", "worker"}
            assert record["num_steps"] > 0
            assert record["scheduler_ms"] > 0
            assert record["plan_launch_ms"].keys() == {"p50", "p90", "p99"}
