"""Servers and channels for real: health, reflection, limits, errors, keep-alive, readiness."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo import serving
from octavo.errors import InvalidRequestError, OctavoError, OverloadedError, UnavailableError
from octavo.serving import (
    CHANNEL_OPTIONS,
    KEEPALIVE_MS,
    LIVE,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    GrpcServer,
    abort,
    announce_ready,
    error_from_rpc,
    open_channel,
    reachable_host,
)
from octavo.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2, worker_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_GUARD_S = 30


class Inference(inference_pb2_grpc.InferenceServicer):
    """Answers Tokenize with the text's length, or raises what it was told to."""

    def __init__(self) -> None:
        self.error: OctavoError | None = None

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        if self.error is not None:
            await abort(context, self.error)
        return inference_pb2.InferenceTokenizeResponse(token_ids=[len(request.text)])


class Running:
    """A server and a channel to it."""

    def __init__(self, server: GrpcServer, servicer: Inference, port: int) -> None:
        self.server = server
        self.servicer = servicer
        self.port = port
        self.channel = open_channel(f"127.0.0.1:{port}")
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    async def tokenize(self, text: str) -> int:
        request = inference_pb2.InferenceTokenizeRequest(text=text)
        return (await self.stub.Tokenize(request, timeout=_GUARD_S)).token_ids[0]


@asynccontextmanager
async def running() -> AsyncGenerator[Running]:
    server, servicer = GrpcServer(), Inference()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1", 0, inference_pb2.DESCRIPTOR)
    started = Running(server, servicer, port)
    try:
        yield started
    finally:
        await started.channel.close()
        await server.stop(0)


def test_a_server_serves_only_once_it_says_so_and_no_more_when_it_stops() -> None:
    async def run() -> None:
        async with running() as it:
            health = health_pb2_grpc.HealthStub(it.channel)

            async def status(service: str) -> int:
                request = health_pb2.HealthCheckRequest(service=service)
                return (await health.Check(request, timeout=_GUARD_S)).status

            names = ("", "octavo.v1.Inference")
            assert [await status(name) for name in names] == [NOT_SERVING, NOT_SERVING]
            assert await status(LIVE) == SERVING
            await it.server.set_serving(True)
            assert [await status(name) for name in names] == [SERVING, SERVING]
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=_GUARD_S)
            assert (await watch.read()).status == SERVING
            stopping = asyncio.create_task(it.server.stop(5))
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
            await stopping
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status("")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_drained_server_is_alive_and_not_ready() -> None:
    async def run() -> None:
        async with running() as it:
            health = health_pb2_grpc.HealthStub(it.channel)
            await it.server.set_serving(True)
            await it.server.set_serving(False)
            asked = [
                await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=_GUARD_S)
                for name in (LIVE, "")
            ]
            assert [answer.status for answer in asked] == [SERVING, NOT_SERVING]

    asyncio.run(run())


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_is_announced_as_this_machines_address(host: str) -> None:
    assert reachable_host("10.1.2.3") == "10.1.2.3"
    assert reachable_host("worker.example") == "worker.example"
    address = reachable_host(host)
    # An address, not a name that others can't resolve.
    assert socket.inet_aton(address) != socket.inet_aton("0.0.0.0")


def test_a_machine_that_does_not_know_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise socket.gaierror(8, "nodename nor servname provided, or not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "laptop.local")
    monkeypatch.setattr(socket, "gethostbyname", fail)
    assert reachable_host("0.0.0.0") == "laptop.local"


def test_reflection_lists_our_services() -> None:
    async def run() -> None:
        async with running() as it:
            stub = reflection_pb2_grpc.ServerReflectionStub(it.channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(
                    file_containing_symbol="octavo.v1.Inference"
                ),
            ]
            call = stub.ServerReflectionInfo(iter(requests), timeout=_GUARD_S)
            listed, found = [answer async for answer in call]
            assert {service.name for service in listed.list_services_response.service} == {
                "octavo.v1.Inference",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            assert len(found.file_descriptor_response.file_descriptor_proto) >= 1

    asyncio.run(run())


def test_both_ends_take_a_message_of_the_limit_and_no_larger() -> None:
    async def run() -> None:
        async with running() as it:
            # Far beyond gRPC's own 4 MiB; the field's header takes a few bytes.
            fits = MAX_MESSAGE_BYTES - 16
            assert await it.tokenize("x" * fits) == fits
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.tokenize("x" * (MAX_MESSAGE_BYTES + 1))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await it.tokenize("after it") == 8

    asyncio.run(run())


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("n=9: must be at most 8", param="n"),
        OverloadedError("the queue is full", retry_after_ms=1500),
        UnavailableError("draining: try another", retry_after_ms=0),
        OctavoError("beyond ASCII: ü 名 \n second line, 100 %"),
        InvalidRequestError(""),
    ],
)
def test_an_error_arrives_as_it_was_raised(error: OctavoError) -> None:
    async def run() -> None:
        async with running() as it:
            it.servicer.error = error
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.tokenize("x")
            arrived = error_from_rpc(caught.value)
            assert type(arrived) is type(error)
            assert arrived.message == error.message
            assert (arrived.param, arrived.retry_after_ms) == (error.param, error.retry_after_ms)

    asyncio.run(run())


def test_a_peer_that_isnt_there_is_unavailable() -> None:
    async def run() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            async with open_channel(f"127.0.0.1:{unused.getsockname()[1]}") as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Tokenize(inference_pb2.InferenceTokenizeRequest(), timeout=_GUARD_S)
        assert isinstance(error_from_rpc(caught.value), UnavailableError)

    asyncio.run(run())


def test_a_taken_port_is_named() -> None:
    async def run() -> None:
        async with running() as it:
            second = GrpcServer()
            with pytest.raises(OctavoError, match=f"127.0.0.1:{it.port}"):
                await second.start("127.0.0.1", it.port, inference_pb2.DESCRIPTOR)
            await second.stop(0)

    asyncio.run(run())


def test_no_server_answers_our_own_pings_with_goaway() -> None:
    server, channel = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert channel["grpc.keepalive_permit_without_calls"] == 1
    assert channel["grpc.keepalive_time_ms"] == KEEPALIVE_MS
    # A client of another make may ping every ten seconds (field case C39).
    for name in ("recv_ping_interval_without_data_ms", "ping_interval_without_data_ms"):
        assert server[f"grpc.http2.min_{name}"] <= min(KEEPALIVE_MS, 10_000)
    assert server["grpc.http2.max_ping_strikes"] == 0
    for options in (server, channel):
        assert options["grpc.http2.max_pings_without_data"] == 0
        for name in ("send", "receive"):
            assert options[f"grpc.max_{name}_message_length"] == MAX_MESSAGE_BYTES


@pytest.mark.slow
def test_an_idle_channel_that_pings_keeps_its_connection() -> None:
    async def run() -> None:
        async with running() as it:
            assert await it.tokenize("x") == 1
            state = it.channel.get_state()
            assert state is grpc.ChannelConnectivity.READY
            # Four pings without a call; gRPC's own rules would end it at the third.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(4.5 * KEEPALIVE_MS / 1000):
                    await it.channel.wait_for_state_change(state)
            assert it.channel.get_state() is state
            assert await it.tokenize("xy") == 2

    asyncio.run(run())


def test_readiness_is_announced_whole_and_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OCTAVO_READY_FILE", raising=False)
    announce_ready(port=1)
    path = tmp_path / "ready.json"
    monkeypatch.setenv("OCTAVO_READY_FILE", str(path))
    announce_ready(port=1, grpc_port=2)
    assert json.loads(path.read_text()) == {"port": 1, "grpc_port": 2, "pid": os.getpid()}
    assert list(tmp_path.iterdir()) == [path]


SIGNAL_PROGRAM = """
import asyncio, sys, time
from octavo.serving import wait_for_signal

async def main():
    waiting = asyncio.create_task(wait_for_signal())
    await asyncio.sleep(0)
    print("waiting", flush=True)
    await waiting
    print("draining", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_second_ends(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SIGNAL_PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(number)
            assert process.stdout.readline() == "draining\n"
            process.send_signal(number)
            assert process.wait(_GUARD_S) == 130
        finally:
            process.kill()


def test_every_service_has_a_descriptor_to_start_with() -> None:
    for module, service in (
        (inference_pb2, "Inference"),
        (scheduler_pb2, "Scheduler"),
        (worker_pb2, "Worker"),
    ):
        assert list(module.DESCRIPTOR.services_by_name) == [service]
    assert serving.KEEPALIVE_MS >= 5_000


class EndedContext:
    """A call that its client ended in this very moment: gRPC can't send a status any more."""

    async def abort(self, *_: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


def test_nobody_is_left_to_be_told_an_error() -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(abort(EndedContext(), UnavailableError("too late")))  # type: ignore[arg-type]
