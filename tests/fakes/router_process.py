"""A whole router in the test's event loop: both doors on real ports, fake schedulers behind.

async with running_router(fake) as router:
    answer = await router.http.post("/v1/completions", json={...})
"""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from octavo.metrics import RouterMetrics
from octavo.registry import MemoryRegistry
from octavo.serving import GrpcServer, open_channel
from octavo.settings import RouterSettings
from octavo.telemetry import Tracer
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo_router.app import create_app
from octavo_router.auth import KeyRing
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.grpc_api import InferenceServicer
from octavo_router.grpc_guard import DecodeGuard
from octavo_router.live_feed import LiveFeed
from octavo_router.pipeline import Pipeline
from octavo_router.quotas import open_quotas
from octavo_router.service import Service
from octavo_router.sessions import Sessions
from octavo_router.wiring import HttpServer, bind
from tests.fakes.byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer
from tests.fakes.fake_scheduler import FakeScheduler
from tests.sse_parser import Stream, parse

GUARD_S = 20.0


def byte_scheduler(**options: Any) -> FakeScheduler:
    """A fake scheduler for the byte tokenizer's vocabulary."""
    return FakeScheduler(**{"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,)} | options)


@dataclass
class RunningRouter:
    """Handles on a router under test."""

    service: Service
    http: httpx.AsyncClient
    inference: inference_pb2_grpc.InferenceStub
    http_port: int
    server: HttpServer

    async def open_stalled(self, body: dict[str, Any]) -> asyncio.StreamWriter:
        """POST to /v1/completions, read the headers and then nothing more; little is buffered."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.http_port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        data = json.dumps({"stream": True, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await reader.readuntil(b"\r\n")
        return writer

    async def stream(self, path: str, body: dict[str, Any], num_choices: int = 1) -> Stream:
        """POST with `stream: true`; the strictly parsed answer."""
        answer = await self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse(answer.content, num_choices=num_choices)

    def samples(self, name: str) -> list[Sample]:
        return [
            sample
            for family in self.service.registry.collect()
            for sample in family.samples
            if sample.name == name
        ]

    def outcomes(self) -> dict[tuple[str, str], int]:
        """(endpoint, outcome) -> count, of every request received so far."""
        return {
            (sample.labels["endpoint"], sample.labels["outcome"]): int(sample.value)
            for sample in self.samples("octavo_requests_total")
            if sample.value
        }

    def value(self, name: str) -> float:
        return sum(sample.value for sample in self.samples(name))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state; fails if it doesn't come."""
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110 - any state, not an event of ours
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running_router(
    *fakes: FakeScheduler,
    wait_ready: bool = True,
    registry: MemoryRegistry | None = None,
    tracer: Tracer | None = None,
    **settings: Any,
) -> AsyncGenerator[RunningRouter]:
    """Start the given fake schedulers (those not yet started) and a router on them."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            if not fake.address:
                await stack.enter_async_context(fake)
        addresses = tuple(fake.address for fake in fakes)
        config = RouterSettings(
            **{"port": 0, "schedulers": addresses, "drain_grace_s": 1.0} | settings
        )
        router = await _start(config, registry or MemoryRegistry(), stack, tracer)
        if wait_ready:
            await until(lambda: router.value("octavo_router_sessions") == len(fakes))
        yield router


async def _start(
    config: RouterSettings,
    registry: MemoryRegistry,
    stack: contextlib.AsyncExitStack,
    tracer: Tracer | None,
) -> RunningRouter:
    collectors = CollectorRegistry()
    metrics = RouterMetrics(collectors)
    sessions = Sessions(
        router_id="router-under-test",
        static=config.schedulers,
        registry=registry,
        redial_ms=config.redial_ms,
        max_moves=config.max_moves,
        metrics=metrics,
    )
    quotas = open_quotas(config.tenant_quotas, config.redis_url, f"router-{secrets.token_hex(4)}")
    if quotas is not None:
        await quotas.start()
        stack.push_async_callback(quotas.close)
    executor = stack.enter_context(ThreadPoolExecutor(1))
    service = Service(
        settings=config,
        model_names=config.served_model_name or ("byte-model",),
        defaults=GenerationDefaults(),
        pipeline=Pipeline(
            tokenizer=ByteTokenizer(),
            sessions=sessions,
            executor=executor,
            share_prefixes=config.share_prefixes,
            quotas=quotas,
        ),
        sessions=sessions,
        keys=KeyRing.from_setting(config.api_keys),
        metrics=metrics,
        registry=collectors,
        feed=LiveFeed(sessions.connected),
        quotas=quotas,
        tracer=tracer,
    )
    await sessions.start()
    stack.push_async_callback(sessions.close)
    listener = bind("127.0.0.1", 0, config.write_stall_s)
    http_port = listener.getsockname()[1]
    http = HttpServer(create_app(service), config)
    serving = asyncio.create_task(http.serve([listener]))

    async def stop_http() -> None:
        http.should_exit = True
        await serving

    stack.push_async_callback(stop_http)
    await http.is_listening.wait()
    grpc_server = GrpcServer([DecodeGuard()], max_receive_bytes=config.max_body_bytes)
    inference_pb2_grpc.add_InferenceServicer_to_server(
        InferenceServicer(service), grpc_server.server
    )
    grpc_port = await grpc_server.start("127.0.0.1", 0, inference_pb2.DESCRIPTOR)
    stack.push_async_callback(grpc_server.stop, 0)
    channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{grpc_port}"))
    client = await stack.enter_async_context(
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=GUARD_S)
    )
    stub = inference_pb2_grpc.InferenceStub(channel)
    return RunningRouter(service, client, stub, http_port, http)
