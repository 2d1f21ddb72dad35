"""The serving shape on real processes: a load at two rates, measured while it goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import REPO

FLAGS = (
    "--backend cpu --num-kv-blocks 2000 --scale 0.02 --capacity 4 --fractions 0.5,0.8 --clients 2 "
    "--seconds 4 --ramp 1 --preset throughput"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_rate_is_recorded_when_it_was_measured(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "tests.bench.serving_shape", *FLAGS.split()]
    ended = subprocess.run(
        [*command, "--record", str(file), str(tiny_folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=REPO,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == file.read_text()
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [record["fraction"] for record in records] == [0.5, 0.8]
    assert [record["rate_req_s"] for record in records] == [2.0, 3.2]
    for record in records:
        assert record["preset"] == "throughput"
        assert record["num_requests"] > 0
        assert record["errors"] == {}
        assert record["ttft_ms"].keys() == {"p50", "p90", "p99"}
        assert record["queue_ms"].keys() == {"p50", "p90", "p99"}
        assert record["cores"].keys() == {"router", "scheduler", "worker"}
