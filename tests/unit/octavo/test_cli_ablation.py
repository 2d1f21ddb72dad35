"""octavo.cli.ablation: the command, its record and its tables."""

import json
import math
from pathlib import Path

import pytest

import octavo
from octavo.cli import ablation
from octavo.cli.ablation import ON_CARD, ON_CPU, _parse
from octavo.cli.ablation_tables import gains_table, runs_table
from octavo.errors import ConfigurationError

TWINS = ("static, max", "continuous, max", "continuous, pow2", "continuous, oracle")


@pytest.mark.timeout(300)
def test_all_twins_are_run_recorded_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    record_file = tmp_path / "records.jsonl"
    flags = "--requests 8 --dialogues 3 --scale 0.05 --memory 3 --rounds 2 --backend cpu"
    assert ablation.main([*flags.split(), "--record", str(record_file)]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    *runs, last = record_file.read_text().splitlines(keepends=True)
    assert last == captured.out
    # As soon as each was over, twice for each twin: what a command keeps that is cut short.
    recorded = [json.loads(line) for line in runs]
    assert {run["bench"] for run in recorded} == {"ablation run"}
    assert [run["twin"] for run in recorded[:5]] == [*TWINS, "continuous, paged"]
    assert len(recorded) == 2 * 7
    assert [(run["workload"], run["twin"]) for run in record["runs"]] == [
        *(("mixed", name) for name in (*TWINS, "continuous, paged")),
        *(("shared", name) for name in ("continuous, paged", "paged, prefix cache")),
    ]
    assert (record["model"], record["backend"], record["rounds"]) == ("tiny", "cpu", 2)
    # The same requests for all, in the same memory: three of the longest, 102 tokens in blocks.
    assert {run["useful_tok"] for run in record["runs"][:5]} == {record["runs"][0]["useful_tok"]}
    assert (record["max_model_len"], record["kv_slots"]) == (112, 3 * 112)
    assert [run["requests"] for run in record["runs"]] == [8] * 5 + [9] * 2
    gains = [value for ratio in record["ratios"].values() for value in ratio.values()]
    assert all(value > 0 and math.isfinite(value) for value in gains)
    # Every run is announced twice, one of each gets its row, and each ratio.
    assert [captured.err.count(f"{name}:") for name in TWINS] == [2] * 4
    assert "96.3 %" in captured.err
    assert "KV memory for 336 tokens" in captured.err
    assert runs_table(record).row_count == 7
    assert gains_table(record).row_count == len(record["ratios"]) == 6


def test_the_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "gpu_name", lambda: "Some Card")
    on_card, on_cpu = _parse([]), _parse(["--backend", "cpu"])
    for arguments, usual in ((on_card, ON_CARD), (on_cpu, ON_CPU)):
        names = ("model_shape", "requests", "dialogues", "scale", "memory", "rounds")
        assert tuple(getattr(arguments, name) for name in names) == usual
    monkeypatch.setenv("OCTAVO_BACKEND", "cpu")
    assert _parse([]).model_shape == "tiny"
    monkeypatch.delenv("OCTAVO_BACKEND")
    monkeypatch.setattr(ablation, "gpu_name", lambda: None)
    assert _parse([]).model_shape == "tiny"
    assert _parse(["--requests", "5"]).requests == 5
    given = _parse(["some/model"])
    assert (given.model, given.model_shape) == ("some/model", None)


@pytest.mark.parametrize("name", ["requests", "dialogues", "memory", "rounds", "scale"])
def test_sizes_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name} .*must be above 0"):
        _parse([f"--{name}", "0"])


def test_a_model_or_a_shape() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        _parse(["some/model", "--model-shape", "llama8b"])


def test_without_the_sources_it_says_where_the_twins_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "octavo" / "__init__.py"
    monkeypatch.setattr(octavo, "__file__", str(package))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="tests/bench of Octavo's source tree"):
        ablation.main(["--backend", "cpu"])
