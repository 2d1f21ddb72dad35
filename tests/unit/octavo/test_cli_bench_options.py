"""octavo.cli.bench_options and bench_cases: what a command line measures."""

import json
from pathlib import Path

import pytest

from octavo.cli.bench_cases import Case, warm_ups, with_fresh_ids
from octavo.cli.bench_options import parse_bench_options
from octavo.cli.workloads import load_shapes, load_workloads, make_requests
from octavo.errors import ConfigurationError


def model_folder(tmp_path: Path) -> str:
    """A folder with no more than a configuration."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_shapes()["qwen3-0.6b"]))
    return str(folder)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_folder(tmp_path)


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
