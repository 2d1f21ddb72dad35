"""octavo.cli.simulate: the command, its record, its tables and plots."""

import json
from pathlib import Path

import pytest

import octavo
from octavo.cli import simulate
from octavo.errors import ConfigurationError


def test_a_short_run_is_recorded_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_file, plots = tmp_path / "records.jsonl", tmp_path / "plots"
    flags = ["--workload", "chats", "--share", "0.02", "--no-flood"]
    assert simulate.main([*flags, "--plot", str(plots), "--record", str(record_file)]) == 0
    captured = capsys.readouterr()
    assert record_file.read_text() == captured.out
    record = json.loads(captured.out)
    shapes = [(run["policy"], run["routers"], run["cells"]) for run in record["runs"]]
    assert shapes[:2] == [("octavo", 1, 1), ("octavo", 4, 1)]
    assert len(set(shapes)) == len(shapes) == 12
    assert all(0 < run["hit_share"] < 1 and run["ttft_p99_s"] > 0 for run in record["runs"])
    for policy in {policy for policy, _, _ in shapes}:
        assert policy in captured.err
    assert (plots / "simulate_chats.png").stat().st_size > 10_000
    assert record["floods"] == {}


@pytest.mark.parametrize("share", ["0", "1.5", "-1"])
def test_shares_are_checked(share: str) -> None:
    with pytest.raises(ConfigurationError, match="--share"):
        simulate.main(["--share", share])


def test_without_the_sources_it_says_where_the_simulator_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "octavo" / "__init__.py"
    monkeypatch.setattr(octavo, "__file__", str(package))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="tests/bench of Octavo's source tree"):
        simulate.main([])
