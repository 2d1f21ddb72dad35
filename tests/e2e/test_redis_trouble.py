"""Redis in every kind of trouble under running streams: no client feels it, no step waits for it.

The services find one another through Redis alone; what it loses they write again.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.keys import FleetKeys, bucket_key
from tests.e2e.generation import Answer, request, run_all
from tests.e2e.redis_faults import FAULTS, Fault, Patient, network_to
from tests.e2e.stack import Stack, total
from tests.redis_servers import RedisServer, redis_binary

NUM_STREAMS, NUM_TOKENS = 16, 300
PROMPTS = [[3 + index, 5, 7, 11] * 5 for index in range(NUM_STREAMS)]
KEYS = FleetKeys("trouble")
NAMES = {KEYS.worker("worker-0"), KEYS.scheduler("s"), KEYS.usage("worker-0")}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    with RedisServer(redis_binary()) as server, network_to(server.port) as network:
        yield Patient(server, network)


@pytest.fixture(scope="module")
def stack(
    patient: Patient, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with finding_each_other(tmp_path_factory.mktemp("trouble"), tiny_folder, patient) as stack:
        yield stack


def finding_each_other(folder: Path, model: Path, patient: Patient) -> Stack:
    """No addresses are given: who is there, Redis says."""
    return Stack(
        folder,
        model=model,
        worker_flags=("--max-num-seqs", str(NUM_STREAMS)),
        scheduler_flags=("--workers", "", "--scheduler-id", "s", "--check-integrity", "true"),
        router_flags=("--schedulers", "", "--tenant-quotas", "*=1000000r/m"),
        redis_url=f"redis://127.0.0.1:{patient.network.port}",
        environ={"OCTAVO_FLEET": KEYS.fleet},
    )


def run_streams(stack: Stack, on_message: Any = None, num_tokens: int = NUM_TOKENS) -> list[Answer]:
    messages = [request(ids, max_tokens=num_tokens, ignore_eos=True) for ids in PROMPTS]
    return run_all(stack.grpc_address, messages, on_message=on_message)


def ids_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def until(condition: Callable[[], bool], stack: Stack) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.05)


def lag_s(stack: Stack) -> float:
    return stack.scheduler_metrics()["octavo_redis_lag_seconds"]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[list[int]]:
    return ids_of(run_streams(stack))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=pytest.mark.slow if fault.is_slow else ())
        for name, fault in FAULTS.items()
    ],
)
def test_no_stream_feels_it(
    stack: Stack, patient: Patient, undisturbed: list[list[int]], fault: Fault
) -> None:
    until(lambda: all_is_there(patient), stack)
    before, led_in = stack.scheduler_metrics(), epoch(patient)
    num_messages = 0

    def cause_early(_: Answer) -> None:
        nonlocal num_messages
        num_messages += 1
        if num_messages == 2 * NUM_STREAMS:
            fault.cause(patient)

    try:
        assert ids_of(run_streams(stack, cause_early)) == undisturbed
        # All of it once more, begun and ended meanwhile.
        assert ids_of(run_streams(stack)) == undisturbed
        if fault.is_felt:
            until(lambda: lag_s(stack) > 0.5, stack)
    finally:
        fault.heal(patient)
    until(lambda: lag_s(stack) == stack.router_metrics()["octavo_redis_lag_seconds"] == 0.0, stack)
    until(lambda: all_is_there(patient), stack)
    after = stack.wait_idle()
    for name in ("octavo_moves_total", "octavo_preemptions_total", "octavo_workers"):
        assert total(after, name) == total(before, name)
    assert epoch(patient) == led_in
    # Of the tenant of those who need no key.
    until(lambda: patient.server.command("EXISTS", bucket_key("")) == 1, stack)


def all_is_there(patient: Patient) -> bool:
    found = {name.decode() for name in patient.server.command("KEYS", "octavo:*")}
    return found >= NAMES


def epoch(patient: Patient) -> bytes:
    """Counts the worker's leaders."""
    return patient.server.command("HGET", KEYS.worker("worker-0"), "epoch")


def test_no_command_belongs_to_a_step(stack: Stack, patient: Patient) -> None:
    """A long stream costs as many commands as the same time without one, and two deals."""
    until(lambda: all_is_there(patient), stack)
    message = request(PROMPTS[0], max_tokens=1000, ignore_eos=True)
    run_streams(stack)
    stack.wait_idle()

    def num_steps() -> float:
        return total(stack.scheduler_metrics(), "octavo_steps_total")

    def commands_during(work: Callable[[], object]) -> tuple[int, float]:
        before = num_steps()
        patient.server.command("CONFIG", "RESETSTAT")
        work()
        return sum(patient.server.call_counts().values()), num_steps() - before

    started = time.monotonic()
    num_busy, num_run = commands_during(lambda: run_all(stack.grpc_address, [message]))
    lasted_s = time.monotonic() - started
    num_idle, _ = commands_during(lambda: time.sleep(lasted_s))
    print(f"commands in {lasted_s:.1f} s: {num_idle} idle, {num_busy} with {num_run:g} steps")
    assert num_run >= 1000
    # Timers may fire once more in one of them; a deal is a script of eight commands.
    assert num_busy <= 1.5 * num_idle + 150


@pytest.mark.slow
def test_redis_may_come_long_after_the_services(tiny_folder: Path, tmp_path: Path) -> None:
    with RedisServer(redis_binary()) as server, network_to(server.port) as network:
        server.kill()
        patient = Patient(server, network)
        stack = finding_each_other(tmp_path, tiny_folder, patient)
        try:
            stack.start_worker().wait_ready()
            scheduler = stack.start_scheduler()
            flags = ("--model", stack.model, "--grpc-port", "0")
            router = stack.spawn("router", *flags)
            stack.routers.append(router)
            router.wait_ready()
            time.sleep(6)
            assert not scheduler.ready_path.exists()
            server.start()
            scheduler.wait_ready()
            stack.wait_http_ready()
            assert all(len(ids) == NUM_TOKENS for ids in ids_of(run_streams(stack)))
        finally:
            stack.close()
