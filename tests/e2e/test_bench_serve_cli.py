"""`octavo bench serve` against the real services: counts are the server's and exact."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack

COMMAND = [sys.executable, "-m", "octavo", "bench", "serve"]


def _bench(stack: Stack, *flags: str) -> dict[str, Any]:
    ended = subprocess.run(
        [*COMMAND, "--url", stack.url, "--output-tokens", "4", "--ignore-eos", *flags],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("arrivals", [("--rate", "20"), ("--concurrency", "3")])
def test_ids_are_counted_exactly(arrivals: tuple[str, str], demo_stack: Stack) -> None:
    flags = ("--num-requests", "6", "--prompt-tokens", "20:40", "--slo-e2e-ms", "80000")
    record = _bench(demo_stack, *arrivals, *flags, "--seed", arrivals[1])
    assert (record["num_ok"], record["errors"], record["prompts"]) == (6, {}, "ids")
    assert record["out_tok"] == 24
    assert 120 <= record["in_tok"] <= 240
    assert record["cached_tok"] == 0
    assert record["good_fraction"] == 1.0
    assert all(record[key].keys() == {"p50", "p90", "p99"} for key in ("ttft_ms", "e2e_ms"))


def test_chat_prompts_are_words_of_about_the_asked_length(demo_stack: Stack) -> None:
    flags = ("--api", "chat", "--num-requests", "4", "--prompt-tokens", "150", "--sampled")
    record = _bench(demo_stack, *flags)
    assert (record["num_ok"], record["out_tok"], record["prompts"]) == (4, 16, "words")
    assert record["in_tok"] == pytest.approx(600, rel=0.05)


def test_a_traces_shared_blocks_are_found_in_the_cache(demo_stack: Stack, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000 * i, "input_length": 514 + i, "output_length": 2, "hash_ids": [5]}
        for i in range(2)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    record = _bench(demo_stack, "--trace", str(trace), "--trace-speed", "2")
    assert (record["num_ok"], record["in_tok"], record["out_tok"]) == (2, 1029, 4)
    assert record["cached_tok"] == 512
