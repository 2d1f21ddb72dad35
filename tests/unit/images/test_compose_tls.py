"""compose.tls.yaml and the commands of k8s/SECURITY.md: what they make lets services in."""

import asyncio
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.security import Security
from octavo.serving import GrpcServer, open_channel
from octavo.settings import SchedulerSettings, load
from octavo.v1 import scheduler_pb2
from tests.programs import find_program
from tests.unit.images.dockerfiles import REPOSITORY, read_compose

SERVICES = ("router", "more-routers", "scheduler", "worker", "gpu-worker")
MOUNT = "/etc/octavo/tls"
ADDED: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.tls.yaml").read_text("utf-8"))[
    "services"
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's commands leave, word for word."""
    find_program("openssl", "openssl")
    page = (REPOSITORY / "k8s/SECURITY.md").read_text(encoding="utf-8")
    block = re.search(r"(?:^    .*\n)+", page[page.index("    mkdir certificates") :], re.MULTILINE)
    assert block is not None
    script = f"set -e\n{textwrap.dedent(block.group())}"
    folder = tmp_path_factory.mktemp("made")
    ended = subprocess.run(
        ["bash", "-c", script], check=False, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "certificates"


def environment(name: str, certificates: Path) -> dict[str, str]:
    """Of a service, as its container has it, with the mounted folder at its place here."""
    given: dict[str, Any] = ADDED[name]["environment"]
    return {key: value.replace(MOUNT, str(certificates)) for key, value in given.items()}


def test_only_the_services_are_changed() -> None:
    assert tuple(ADDED) == SERVICES
    assert set(SERVICES) <= read_compose()["services"].keys()
    for name in SERVICES:
        # Compose adds these to what is there; anything else would replace it.
        checked = {"healthcheck"} if name in ("router", "more-routers") else set[str]()
        assert set(ADDED[name]) == {"environment", "volumes"} | checked
        assert ADDED[name]["volumes"] == [f"${{CERTIFICATES:-./certificates}}:{MOUNT}:ro"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_file_is_one_that_the_commands_make(name: str, certificates: Path) -> None:
    paths = [v for v in environment(name, certificates).values() if v.startswith("/")]
    assert len(paths) == 4
    assert all(Path(path).is_file() for path in paths)


def test_what_the_commands_make_fits(certificates: Path) -> None:
    security = Security.of(load(SchedulerSettings, {}, environment("scheduler", certificates)))
    assert security.server_name == "octavo.internal"
    assert len(security.tokens[0]) == 64

    async def main() -> None:
        server = GrpcServer(security=security)
        port = await server.start("127.0.0.1", 0, scheduler_pb2.DESCRIPTOR)
        await server.set_serving(True)
        async with open_channel(f"127.0.0.1:{port}", security) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            # On a busy machine a handshake may be given up, and tried again.
            request = health_pb2.HealthCheckRequest()
            answer = await stub.Check(request, timeout=30, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.stop(0)

    asyncio.run(main())
