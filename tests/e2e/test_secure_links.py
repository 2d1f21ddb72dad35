"""A whole stack with mutual TLS and a token: it works, moves and re-dials; strangers stay out."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.security import OPEN, Security
from octavo.serving import open_channel
from octavo.settings import SchedulerSettings, load
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.certificates import Authority, CertificateFiles
from tests.e2e.generation import Answer, generate, request, run_all
from tests.e2e.stack import Service, Stack, total

TOKEN = "zqxjkv-the-fleets-own-word"
AUTHORITY = Authority()
PROMPTS = [[index + 3, 5, 7, 11, 13] for index in range(6)]
NUM_TOKENS = 150
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return AUTHORITY.issue(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stack(
    tls: CertificateFiles, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    token_file = tls.cert.with_name("token")
    token_file.write_text(f"{TOKEN}\n")
    environ = {f"OCTAVO_TLS_{name.upper()}": str(path) for name, path in tls._asdict().items()}
    environ |= {"OCTAVO_INTERNAL_TOKEN_FILE": str(token_file), "OCTAVO_LOG_LEVEL": "debug"}
    folder = tmp_path_factory.mktemp("secure-stack")
    with Stack(
        folder,
        model=tiny_folder,
        num_workers=2,
        worker_flags=("--max-num-seqs", "8"),
        scheduler_flags=("--check-integrity", "true"),
        environ=environ,
    ) as stack:
        yield stack


def security(files: CertificateFiles | None, token: str) -> Security:
    flags: dict[str, str] = {"internal_token": token}
    if files is not None:
        flags |= {f"tls_{name}": str(path) for name, path in files._asdict().items()}
    return Security.of(load(SchedulerSettings, flags, {}))


def messages() -> list[Any]:
    return [request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]


def ids_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def restart(stack: Stack, kind: str, old: Service, *flags: str) -> Service:
    """The same service on the same port."""
    old.kill()
    old.process.wait(20)
    started = stack.spawn(kind, *flags, "--port", str(old.ports["port"]))
    started.wait_ready()
    return started


def wait_for_workers(stack: Stack, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while stack.scheduler_metrics()["octavo_workers"] != count:
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.05)


def test_streams_survive_a_kill_and_new_certificates(stack: Stack, tls: CertificateFiles) -> None:
    undisturbed = ids_of(run_all(stack.grpc_address, messages()))
    num_moves = total(stack.scheduler_metrics(), "octavo_moves_total")
    victim = stack.workers[0]
    is_killed = False

    def renew_and_kill(answer: Answer) -> None:
        nonlocal is_killed
        if not is_killed and len(answer.ids) >= 20:
            is_killed = True
            AUTHORITY.issue(tls.cert.parent)
            victim.kill()

    disturbed = run_all(stack.grpc_address, messages(), on_message=renew_and_kill)
    assert ids_of(disturbed) == undisturbed
    assert total(stack.scheduler_metrics(), "octavo_moves_total") > num_moves
    # The scheduler dials it again, each with the new certificate.
    flags = ("--model", stack.model, "--worker-id", "worker-0", "--max-num-seqs", "8")
    stack.workers[0] = restart(stack, "worker", victim, *flags)
    wait_for_workers(stack, 2)
    assert ids_of(run_all(stack.grpc_address, messages())) == undisturbed
    stack.wait_idle()


def test_routers_dial_a_killed_scheduler_again(stack: Stack) -> None:
    undisturbed = ids_of(run_all(stack.grpc_address, messages()))
    addresses = ",".join(worker.address for worker in stack.workers)
    metrics = str(stack.schedulers[0].ports["metrics_port"])
    flags = ("--workers", addresses, "--metrics-port", metrics, "--check-integrity", "true")
    stack.schedulers[0] = restart(stack, "scheduler", stack.schedulers[0], *flags)
    stack.wait_http_ready()
    assert ids_of(run_all(stack.grpc_address, messages())) == undisturbed
    stack.wait_idle()


async def knock(stack: Stack, means: Security) -> list[grpc.StatusCode]:
    """How scheduler and worker answer one who has these means; every kind of call."""
    codes: list[grpc.StatusCode] = []
    async with (
        open_channel(stack.schedulers[0].address, means) as to_scheduler,
        open_channel(stack.workers[1].address, means) as to_worker,
    ):
        scheduler = scheduler_pb2_grpc.SchedulerStub(to_scheduler)
        worker = worker_pb2_grpc.WorkerStub(to_worker)
        calls: list[Any] = [
            scheduler.Describe(scheduler_pb2.SchedulerDescribeRequest(), timeout=TIMEOUT_S),
            scheduler.Drain(scheduler_pb2.SchedulerDrainRequest(), timeout=TIMEOUT_S),
            scheduler.Watch(scheduler_pb2.SchedulerWatchRequest(), timeout=TIMEOUT_S),
            scheduler.Session(timeout=TIMEOUT_S),
            worker.Describe(worker_pb2.WorkerDescribeRequest(), timeout=TIMEOUT_S),
            worker.Attach(worker_pb2.WorkerAttachRequest(), timeout=TIMEOUT_S),
            worker.Steps(timeout=TIMEOUT_S),
        ]
        for call in calls:
            codes.append(await call.code())
    return codes


def test_strangers_are_refused_and_counted_nowhere(
    stack: Stack, tls: CertificateFiles, tmp_path: Path
) -> None:
    stack.wait_idle()
    before = stack.scheduler_metrics()
    foreign = Authority("foreign").issue(tmp_path)
    closed, unknown = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED
    for means, code in (
        (OPEN, closed),
        (security(None, TOKEN), closed),
        (security(foreign, TOKEN), closed),
        (security(tls, ""), unknown),
        (security(tls, f"{TOKEN}x"), unknown),
    ):
        assert set(asyncio.run(knock(stack, means))) == {code}
    after = stack.scheduler_metrics()
    for name in ("octavo_sequence_outcomes_total", "octavo_workers", "octavo_num_requests_waiting"):
        assert total(after, name) == total(before, name)
    assert len(asyncio.run(ask(stack)).ids) == 5


async def ask(stack: Stack) -> Answer:
    from octavo.v1 import inference_pb2_grpc

    async with open_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await generate(stub, request(PROMPTS[0], max_tokens=5, ignore_eos=True))


def test_top_watches_with_the_services_means(stack: Stack) -> None:
    command = [sys.executable, "-m", "octavo", "top", "--once", "--schedulers"]
    for environ, status in ((stack.environ, 0), ({}, 1)):
        ended = subprocess.run(
            [*command, stack.schedulers[0].address],
            check=False,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert bool(ended.returncode) == bool(status), ended.stdout + ended.stderr
        assert ("worker-1" in ended.stdout) == (status == 0)


def test_a_router_with_a_wrong_token_says_so_and_isnt_ready(stack: Stack) -> None:
    address = stack.schedulers[0].address
    flags = ("--model", stack.model, "--schedulers", address, "--grpc-port", "0")
    environ = stack.environ
    stack.environ = {**environ, "OCTAVO_INTERNAL_TOKEN_FILE": "", "OCTAVO_INTERNAL_TOKEN": "wrong"}
    try:
        router = stack.spawn("router", *flags)
    finally:
        stack.environ = environ
    router.wait_ready()

    with contextlib.ExitStack() as cleanup:
        cleanup.callback(router.stop)
        deadline = time.monotonic() + TIMEOUT_S
        while "UNAUTHENTICATED: the internal token is missing or wrong" not in router.log():
            assert time.monotonic() < deadline, router.log()
            time.sleep(0.05)
        assert "session lost" not in router.log()


def test_the_token_is_in_no_log_and_on_no_command_line(stack: Stack) -> None:
    services = [*stack.workers, *stack.schedulers, *stack.routers]
    for service in services:
        line = Path(f"/proc/{service.process.pid}/cmdline").read_bytes()
        assert TOKEN.encode() not in line
    logs = "".join(path.read_text(errors="replace") for path in stack.folder.glob("*.log"))
    assert " DEBUG " in logs
    assert TOKEN not in logs
    assert "PRIVATE KEY" not in logs
