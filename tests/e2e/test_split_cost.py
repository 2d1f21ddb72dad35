"""The split's cost is measured with real processes, all of which are gone afterwards."""

import json
from pathlib import Path

import pytest

from tests.bench import split_cost


def test_every_batch_is_measured_by_both_protocols(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[split_cost.PacedStack] = []
    begin = split_cost.PacedStack.__enter__

    def remember(stack: split_cost.PacedStack) -> split_cost.PacedStack:
        stacks.append(stack)
        return begin(stack)

    monkeypatch.setattr(split_cost.PacedStack, "__enter__", remember)
    record_file = tmp_path / "records.jsonl"
    flags = "--step-ms 3 --batch 1,5 --seconds 0.3 --rounds 1"
    assert split_cost.main([*flags.split(), "--record", str(record_file)]) == 0
    record = json.loads(record_file.read_text())
    measured = [(cost["batch"], cost["protocol"]) for cost in record["costs"]]
    assert measured == [(1, "http"), (1, "grpc"), (5, "http"), (5, "grpc")]
    for cost in record["costs"]:
        assert 0 < cost["whole"] < 2
        assert 0 < cost["steady"] < 2
        assert cost["cpu"].keys() == {"client", "router", "scheduler", "worker"}
    assert capfd.readouterr().out.count(" grpc ") == 2
    assert len(stacks) == 2
    for stack in stacks:
        assert all(service.process.poll() is not None for service in stack.services)
