"""`octavo health ADDRESS`: does a service say that it serves? For containers' health checks.

Asks grpc.health.v1, as Kubernetes' gRPC probes do, with the certificates that the environment
names (OCTAVO_TLS_*); a URL is asked over HTTP. Must not know: any service. Entry point: `main`.
"""

import argparse
import asyncio
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.security import Security
from octavo.serving import open_channel
from octavo.settings import CommonSettings, load

_SERVING = health_pb2.HealthCheckResponse.SERVING


def main(argv: list[str] | None = None) -> int:
    """Status 0 if the server at the address serves, else 1 and a line that says what it does.

    Raises ConfigurationError for certificates that can't be used.
    """
    parser = argparse.ArgumentParser(prog="octavo health", description="Is a service ready?")
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        help="its gRPC address, host:port; or a URL: http://127.0.0.1:8000/readyz",
    )
    parser.add_argument(
        "--service", default="", help="one gRPC service, e.g. octavo.v1.Worker [the whole server]"
    )
    parser.add_argument("--timeout-s", type=float, default=3.0, help="longest wait [3]")
    arguments = parser.parse_args(argv)
    address, timeout_s = arguments.address, arguments.timeout_s
    if address.startswith(("http://", "https://")):
        problem = _http_problem(address, timeout_s)
    else:
        problem = asyncio.run(_grpc_problem(address, arguments.service, timeout_s))
    if problem is not None:
        print(f"octavo health: {address}: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


async def _grpc_problem(address: str, service: str, timeout_s: float) -> str | None:
    """Why the server doesn't serve; None if it does."""
    request: Any = health_pb2.HealthCheckRequest(service=service)
    async with open_channel(address, Security.of(load(CommonSettings))) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == _SERVING:
        return None
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def _http_problem(url: str, timeout_s: float) -> str | None:
    """Why the URL isn't answered with a 2xx; None if it is."""
    # A certificate names the service, not the loopback address where its own check asks.
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=unverified):
            return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError as error:
        return str(error)
