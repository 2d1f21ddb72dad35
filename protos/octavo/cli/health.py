"""`octavo health ADDRESS`: does a service say that it serves? For containers' health checks.

Asks grpc.health.v1, as Kubernetes' gRPC probes do. Must not know: any service. Entry point:
`main`.
"""

import argparse
import asyncio
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.serving import open_channel

_SERVING = health_pb2.HealthCheckResponse.SERVING


def main(argv: list[str] | None = None) -> int:
    """Status 0 if the server at the address is SERVING, else 1 and a line that says what it is."""
    parser = argparse.ArgumentParser(prog="octavo health", description="Is a service ready?")
    parser.add_argument("address", metavar="ADDRESS", help="its gRPC address, host:port")
    parser.add_argument(
        "--service", default="", help="one gRPC service, e.g. octavo.v1.Worker [the whole server]"
    )
    parser.add_argument("--timeout-s", type=float, default=3.0, help="longest wait [3]")
    arguments = parser.parse_args(argv)
    problem = asyncio.run(_problem(arguments.address, arguments.service, arguments.timeout_s))
    if problem is not None:
        print(f"octavo health: {arguments.address}: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


async def _problem(address: str, service: str, timeout_s: float) -> str | None:
    """Why the server doesn't serve; None if it does."""
    request: Any = health_pb2.HealthCheckRequest(service=service)
    async with open_channel(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == _SERVING:
        return None
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
