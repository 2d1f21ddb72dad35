"""octavo.cli.serve, ports and devices: what is asked for, what is refused, what is printed."""

import json
import logging
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.console import Console
from octavo.cli.devices import visible_devices, worker_environments, workers_per_device
from octavo.cli.ports import check_port_is_free, free_ports
from octavo.cli.serve import parse_options, ready_text
from octavo.cli.stack import Endpoints, Stack
from octavo.errors import ConfigurationError
from octavo.logs import setup_logging


def test_the_defaults_serve_the_demo_model() -> None:
    options = parse_options([])
    assert (options.model, options.num_workers) == ("demo", 1)
    assert (options.router.host, options.router.port) == ("127.0.0.1", 8000)
    # Any free one.
    assert options.router.grpc_port == 0


def test_one_namespace_reaches_every_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MIN_CHUNK_TOKENS", "32")
    monkeypatch.setenv("OCTAVO_GRPC_PORT", "9001")
    flags = "org/model --workers 2 --port 9000 --host 0.0.0.0 --max-num-seqs 8 --block-size 32"
    options = parse_options(flags.split())
    assert (options.model, options.num_workers) == ("org/model", 2)
    assert (options.router.host, options.router.port, options.router.grpc_port) == (
        "0.0.0.0",
        9000,
        9001,
    )
    assert options.scheduler.max_num_seqs == options.worker.max_num_seqs == 8
    assert options.worker.block_size == 32
    assert options.scheduler.min_chunk_tokens == 32
    # Only the API is for the outside.
    assert options.scheduler.host == options.worker.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--block-size 24", r"OCTAVO_BLOCK_SIZE=24: must be one of 16, 32"),
        ("--workers 0", r"--workers 0: must be at least 1"),
        ("--max-num-seqs many", r"OCTAVO_MAX_NUM_SEQS='many' is no whole number"),
        ("--ui maybe", r"OCTAVO_UI='maybe' is neither true nor false"),
        ("--itl-target-ms few", r"OCTAVO_ITL_TARGET_MS='few' is no number"),
        ("--preset fast", r"OCTAVO_PRESET='fast': must be one of latency, balanced, throughput"),
    ],
)
def test_mistakes_are_named_before_anything_starts(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_options(flags.split())


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"port {port} .* is taken.*--port {port + 10}"
        ):
            check_port_is_free("127.0.0.1", port, "port")
    check_port_is_free("127.0.0.1", port, "port")
    with pytest.raises(ConfigurationError, match=r"can't listen on 203\.0\.113\.1:1"):
        check_port_is_free("203.0.113.1", 1, "grpc_port")


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        check_port_is_free("127.0.0.1", port, "port")


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("octavo.cli.devices.num_cores", lambda: 8)
    assert worker_environments(3, "cpu") == [{"OMP_NUM_THREADS": "2"}] * 3
    assert worker_environments(9, "cpu") == [{"OMP_NUM_THREADS": "1"}] * 9
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_environments(2, "cpu") == [{}, {}]


def test_cards_are_dealt_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_devices() == ["2", "5"]
    environments = worker_environments(3, "auto")
    assert [item["CUDA_VISIBLE_DEVICES"] for item in environments] == ["2", "5", "2"]
    assert workers_per_device(environments) == 2
    assert workers_per_device(worker_environments(2, "cuda")) == 1
    assert all("CUDA_VISIBLE_DEVICES" not in item for item in worker_environments(3, "cpu"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_devices() == []


def test_each_rank_gets_a_card_and_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("octavo.cli.devices.num_cores", lambda: 8)
    environments = worker_environments(3, "cuda", num_ranks=2)
    assert [item["CUDA_VISIBLE_DEVICES"] for item in environments] == ["0,1", "2,3", "0,1"]
    assert workers_per_device(environments) == 2
    assert environments[0]["OMP_NUM_THREADS"] == "1"
    assert worker_environments(1, "cuda", num_ranks=8)[0]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_the_closing_block_has_a_command_that_a_shell_reads_back() -> None:
    endpoints = Endpoints("http://127.0.0.1:8000", "127.0.0.1:8001", 'it\'s "quoted"')
    text = ready_text(endpoints, needs_key=False)
    command = shlex.split(text.strip().splitlines()[-1])
    assert command[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(command[command.index("-d") + 1])
    assert body == {
        "model": 'it\'s "quoted"',
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    assert "127.0.0.1:8001" in text
    assert " chat --url http://127.0.0.1:8000\n" in text
    assert "  page  http://127.0.0.1:8000/ui\n" in text
    assert "/ui" not in ready_text(endpoints, needs_key=False, has_page=False)
    assert "Authorization" not in text
    assert "Bearer $OCTAVO_API_KEY" in ready_text(endpoints, needs_key=True)


@pytest.fixture
def root_logger() -> Iterator[None]:
    """`setup_logging` replaces the root logger's handlers: put them back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _logged(capsys: pytest.CaptureFixture[str], *, is_quiet: bool) -> list[str]:
    """What the console prints of records that the services' own logging wrote."""
    setup_logging("worker", "debug")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("octavo_worker.kv_cache").log(level, "100 [blocks] fit")
    records = capsys.readouterr().err.splitlines()
    console = Console(is_quiet=is_quiet)
    for line in (*records, "Traceback (most recent call last):"):
        console.log("worker-0", line)
    # The time is whatever it is.
    return [
        re.sub(r"\d\d:\d\d:\d\d", "TIME", line) for line in capsys.readouterr().err.splitlines()
    ]


@pytest.mark.usefixtures("root_logger")
def test_the_log_has_one_prefix_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert _logged(capsys, is_quiet=False) == [
        "worker-0  │ TIME 100 [blocks] fit",
        "worker-0  │ TIME WARNING worker octavo_worker.kv_cache: 100 [blocks] fit",
        "worker-0  │ TIME ERROR   worker octavo_worker.kv_cache: 100 [blocks] fit",
        "worker-0  │ Traceback (most recent call last):",
    ]
    quiet = _logged(capsys, is_quiet=True)
    assert [line.split()[3] for line in quiet] == ["WARNING", "ERROR"]


def test_a_json_log_stays_json_and_so_does_what_isnt(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(is_json=True)
    record = '{"time": "x", "level": "info", "message": "ready"}'
    console.log("router", record)
    console.log("worker-0", "Traceback (most recent call last):")
    console.say("router ended", is_bad=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == record
    others = [json.loads(line) for line in lines[1:]]
    assert all(list(r) == ["time", "level", "service", "logger", "message"] for r in others)
    assert [(r["level"], r["service"], r["message"]) for r in others] == [
        ("info", "worker-0", "Traceback (most recent call last):"),
        ("error", "octavo", "router ended"),
    ]


def test_children_get_their_secrets_by_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("zq-key:acme\n")
    for name, value in (
        ("API_KEYS_FILE", str(keys)),
        ("INTERNAL_TOKEN", "zq-token"),
        ("REDIS_URL", "redis://:zq-password@127.0.0.1:1"),
    ):
        monkeypatch.setenv(f"OCTAVO_{name}", value)
    stack = Stack(parse_options(["--workers", "2"]), Console())
    stack._run_folder = tmp_path
    stack._make_children("redis://:zq-password@127.0.0.1:1")
    assert [child.spec.name for child in stack.children] == [
        *("router", "scheduler", "worker-0", "worker-1")
    ]
    for child in stack.children:
        assert "zq-" not in " ".join(child.spec.command)
        environ = child.spec.environment
        assert environ["OCTAVO_INTERNAL_TOKEN"] == "zq-token"
        assert environ["OCTAVO_REDIS_URL"] == "redis://:zq-password@127.0.0.1:1"
    router = stack.children[0].spec.environment
    # The file, so that the router sees it change.
    assert (router["OCTAVO_API_KEYS"], router["OCTAVO_API_KEYS_FILE"]) == ("", str(keys))
