"""The router's process: builds everything, serves both doors, drains at the end.

Must not know: how requests are answered. Entry point: `run_router`.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import secrets
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from octavo import vllm_metrics
from octavo.errors import ConfigurationError
from octavo.hub import model_name_of, resolve_model
from octavo.metrics import RouterMetrics
from octavo.registry import open_registry
from octavo.security import Security, public_security
from octavo.serving import GrpcServer, announce_ready, wait_for_signal
from octavo.setting import FileSecret
from octavo.settings import RouterSettings
from octavo.telemetry import open_tracer
from octavo.tls import TlsFiles, https_context
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo_router.app import create_app
from octavo_router.auth import KeyRing, follow_file
from octavo_router.generation_defaults import load_generation_defaults
from octavo_router.grpc_api import InferenceServicer
from octavo_router.grpc_guard import DecodeGuard
from octavo_router.http_connection import Bounds, HttpConnection
from octavo_router.live_feed import LiveFeed
from octavo_router.pipeline import Pipeline
from octavo_router.quotas import open_quotas
from octavo_router.service import Service
from octavo_router.sessions import Sessions
from octavo_router.tokenizer import load_tokenizer

log = logging.getLogger(__name__)
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_MAX_FILES = 1 << 16
# What macOS takes in any case (its OPEN_MAX).
_SURE_FILES = 10_240
# Files that are no HTTP connections: gRPC clients and sessions, sockets, libraries.
_OTHER_FILES = 256
# After SIGTERM: time for load balancers to see that this router isn't ready any more.
_UNREADY_S = 0.2
_FINISH_POLL_S = 0.05
# For calls that came in as a gRPC server was told to stop: to be refused in words.
_LAST_CALLS_S = 0.5


async def run_router(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs within the grace."""
    folder = resolve_model(settings.model, settings.revision, weights=False)
    tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
    registry = open_registry(settings.redis_url, settings.fleet)
    collectors = CollectorRegistry()
    metrics = RouterMetrics(collectors)
    router_id = settings.router_id or f"router-{secrets.token_hex(6)}"
    # A router that comes back under its name counts from 0 again.
    quotas = open_quotas(
        settings.tenant_quotas, settings.redis_url, f"{router_id}-{secrets.token_hex(4)}"
    )
    writers = [registry.lag_s] if quotas is None else [registry.lag_s, quotas.lag_s]
    metrics.redis_lag.set_function(lambda: max(lag_s() for lag_s in writers))
    model_names = settings.served_model_name or (model_name_of(settings.model),)
    if settings.vllm_metrics:
        vllm_metrics.add_to_router(metrics, lambda: model_names[0])
    tracer = open_tracer("router", router_id)
    sessions = Sessions(
        router_id=router_id,
        static=settings.schedulers,
        registry=registry,
        redial_ms=settings.redial_ms,
        max_moves=settings.max_moves,
        metrics=metrics,
        security=Security.of(settings),
    )
    with ThreadPoolExecutor(settings.tokenizer_threads, "tokenize") as executor:
        service = Service(
            settings=settings,
            model_names=model_names,
            defaults=load_generation_defaults(folder),
            pipeline=Pipeline(
                tokenizer=tokenizer,
                sessions=sessions,
                executor=executor,
                share_prefixes=settings.share_prefixes,
                quotas=quotas,
            ),
            sessions=sessions,
            keys=KeyRing.from_setting(settings.api_keys),
            metrics=metrics,
            registry=collectors,
            feed=LiveFeed(sessions.connected),
            quotas=quotas,
            tracer=tracer,
        )
        await registry.start()
        await sessions.start()
        if quotas is not None:
            await quotas.start()
        try:
            await serve_doors(service)
        finally:
            if quotas is not None:
                await quotas.close()
            await sessions.close()
            await registry.close()
            if tracer is not None:
                tracer.close()


async def serve_doors(service: Service) -> None:
    """Listen on HTTP and gRPC, say so, and drain after the first signal."""
    settings = service.settings
    security = public_security(settings)
    http_socket = bind(settings.host, settings.port, settings.write_stall_s)
    http_port = http_socket.getsockname()[1]
    http = HttpServer(create_app(service), settings, security.tls)
    grpc_server = GrpcServer(
        [DecodeGuard()], max_receive_bytes=settings.max_body_bytes, security=security
    )
    servicer = InferenceServicer(service)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, grpc_server.server)
    grpc_port = await grpc_server.start(settings.host, settings.grpc_port, inference_pb2.DESCRIPTOR)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(http.serve([http_socket]))
        followers = [tasks.create_task(_follow_readiness(service, grpc_server))]
        if isinstance(settings.api_keys, FileSecret):
            followers.append(tasks.create_task(follow_file(service.keys, settings.api_keys)))
        await http.is_listening.wait()
        log.info(
            "ready: router http on %s:%d grpc on %s:%d",
            settings.host,
            http_port,
            settings.host,
            grpc_port,
        )
        # What was built so far stays: no collection needs to look at it again.
        gc.freeze()
        announce_ready(port=http_port, grpc_port=grpc_port)
        await wait_for_signal()
        log.info("draining: new requests are refused, running ones finish")
        service.is_draining = True
        for follower in followers:
            follower.cancel()
        service.feed.close()
        await grpc_server.set_serving(False)
        grace_s = settings.drain_grace_s
        await asyncio.gather(
            http.finish(grace_s), _finish_grpc(lambda: servicer.num_running, grpc_server, grace_s)
        )


async def _finish_grpc(num_running: Callable[[], int], server: GrpcServer, grace_s: float) -> None:
    """Go on accepting, to refuse in words, while answers run; then end.

    A server that was told to stop may leave a call that comes in that very moment unanswered for
    the whole grace that it was given, which is short for that; the call then ends as CANCELLED.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s
    await asyncio.sleep(min(_UNREADY_S, grace_s))
    while num_running() and loop.time() < end:  # noqa: ASYNC110 - no event to keep
        await asyncio.sleep(_FINISH_POLL_S)
    await server.stop(min(_LAST_CALLS_S, grace_s))


async def _follow_readiness(service: Service, server: GrpcServer) -> None:
    """gRPC's health service says what /readyz says."""
    was_ready = False
    while True:
        if service.is_ready != was_ready:
            was_ready = service.is_ready
            await server.set_serving(was_ready)
        await asyncio.sleep(0.5)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers and access log."""

    def __init__(self, app: ASGIApp, settings: RouterSettings, tls: TlsFiles | None = None) -> None:
        bounds = Bounds(
            max_header_bytes=settings.max_header_bytes,
            read_timeout_s=settings.read_timeout_s,
            write_stall_s=settings.write_stall_s,
            max_connections=connections_within(raise_file_limit()),
        )
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(HttpConnection, bounds=bounds)),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            # Longer than clients keep idle connections: it is they who should close them.
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.drain_grace_s)),
            ssl_context_factory=None if tls is None else lambda *_: https_context(tls),
        )
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def finish(self, grace_s: float) -> None:
        """Go on listening, to refuse in words, while answers run; then begin to end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        await asyncio.sleep(min(_UNREADY_S, grace_s))
        while self.server_state.tasks and loop.time() < end:  # noqa: ASYNC110 - uvicorn's own set
            await asyncio.sleep(_FINISH_POLL_S)
        self.config.timeout_graceful_shutdown = 1
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """The entry point handles signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()


def raise_file_limit() -> int:
    """Allow this process all the open files that it may have; how many. A connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_FILES
    for wanted in (_MAX_FILES, _SURE_FILES):
        limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if soft >= limit:
            return soft
        # macOS calls its limit infinite and takes less.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return limit
    return soft


def connections_within(file_limit: int) -> int:
    """How many connections to accept at once; what else is open needs files too."""
    return file_limit - min(_OTHER_FILES, file_limit // 2)


def bind(host: str, port: int, stall_s: float) -> socket.socket:
    """A listening socket; connections inherit its options. A client that acknowledges nothing
    for `stall_s` is dropped by the kernel. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stall_ms = int(stall_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"OCTAVO_HOST={host}, OCTAVO_PORT={port}: can't listen there: {error.strerror}",
            param="port",
        ) from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
