"""What every gRPC server and channel of Octavo has in common.

Message limits, keep-alive, health, reflection, error mapping and signals. Must not
know: any service's messages. Entry points: `GrpcServer`, `open_channel`, `abort`,
`error_from_rpc`, `reachable_host`, `announce_ready`, `wait_for_signal`.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.errors import OctavoError, from_grpc_code
from octavo.security import OPEN, Security

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS = 10_000
# A server must accept pings at least as often as any client sends them: gRPC's own default
# (one in 300 s) answers our keep-alive with GOAWAY too_many_pings.
_MIN_PING_MS = 5_000
_PARAM_KEY, _RETRY_KEY = "octavo-param", "octavo-retry-after-ms"
# The health service's name for "this process answers": serving from the start to the end of the
# server, whether it is ready or not. For liveness probes, which restart what fails them.
LIVE = "octavo.live"

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_MS),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    # Two channels of one process to one address must not share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcServer:
    """An aio server with health and reflection. Use `server` to add servicers, then `start`."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        security: Security = OPEN,
    ) -> None:
        limit = ("grpc.max_receive_message_length", max_receive_bytes)
        options = [option for option in SERVER_OPTIONS if option[0] != limit[0]]
        self._security = security
        self.server = grpc.aio.server(
            options=[*options, limit], interceptors=[*security.interceptors(), *interceptors]
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._names: list[str] = []

    async def start(self, host: str, port: int, *descriptors: FileDescriptor) -> int:
        """Listen; returns the bound port. Not serving until `set_serving(True)`.

        Raises OctavoError.
        """
        self._names = [
            service.full_name for file in descriptors for service in file.services_by_name.values()
        ]
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        await self.set_serving(False)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        try:
            bound = self._listen(f"{host}:{port}")
        except RuntimeError as error:
            raise OctavoError(f"can't listen on {host}:{port}: {error}") from error
        await self.server.start()
        return bound

    def _listen(self, address: str) -> int:
        credentials = self._security.server_credentials()
        if credentials is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, credentials)

    async def set_serving(self, is_serving: bool) -> None:
        """Readiness of the whole server ("") and of each of its services."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(False)
        await self.server.stop(grace_s)


def reachable_host(host: str) -> str:
    """The host by which others reach a server that listens on `host`.

    A wildcard becomes this machine's own address: its name would mean nothing to most others
    (the name of a Kubernetes pod has no DNS record).
    """
    if host not in ("", "0.0.0.0", "::", "[::]"):
        return host
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        # A laptop may not know its own name; another machine then has to.
        return name


def open_channel(address: str, security: Security = OPEN) -> grpc.aio.Channel:
    """A channel with Octavo's options; certificates are read anew for each.

    Raises ConfigurationError if they aren't right.
    """
    credentials = security.channel_credentials()
    if credentials is None:
        return security.sign(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
    options = [*CHANNEL_OPTIONS, *security.channel_options()]
    return security.sign(grpc.aio.secure_channel(address, credentials, options=options))


async def is_serving(address: str, security: Security = OPEN, *, timeout_s: float = 1.0) -> bool:
    """Whether the server at `address` says, within the time, that it is ready."""
    request: Any = health_pb2.HealthCheckRequest()
    async with open_channel(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OctavoError) -> NoReturn:
    """End the RPC with the error's code, message, and param / retry-after as trailers.

    Raises asyncio.CancelledError if the client ended it first: then there is nobody to tell.
    """
    trailers: list[tuple[str, str]] = []
    if error.param:
        trailers.append((_PARAM_KEY, error.param))
    if error.retry_after_ms is not None:
        trailers.append((_RETRY_KEY, str(error.retry_after_ms)))
    code = next(code for code in grpc.StatusCode if code.value[0] == error.kind.grpc_code)
    try:
        await context.abort(code, error.message, tuple(trailers))
    except grpc.aio.InternalError:
        # The client left, or its own deadline passed, while we were about to tell it.
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


def error_from_rpc(error: grpc.RpcError) -> OctavoError:
    """The OctavoError that a failed call carries."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
    retry = trailers.get(_RETRY_KEY)
    return from_grpc_code(
        error.code().value[0],  # type: ignore[attr-defined]
        error.details() or "",  # type: ignore[attr-defined]
        param=trailers.get(_PARAM_KEY),
        retry_after_ms=int(retry) if retry is not None else None,
    )


def announce_ready(**ports: int) -> None:
    """Tell the parent process that this one serves: the JSON file `$OCTAVO_READY_FILE`.

    `ports` are the bound ones (`port`, `grpc_port`, `metrics_port`). Without the variable
    nothing is written.
    """
    path = os.environ.get("OCTAVO_READY_FILE")
    if not path:
        return
    # Renamed into place: the reader sees all of it or nothing.
    scratch = f"{path}.{os.getpid()}"
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump({**ports, "pid": os.getpid()}, file)
    os.replace(scratch, path)


async def wait_for_signal() -> None:
    """Return at the first SIGTERM or SIGINT; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            sys.stderr.flush()
            # The operator asked twice: no clean-up can be waited for.
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await stop.wait()
