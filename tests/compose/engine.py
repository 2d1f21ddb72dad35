"""A Docker engine for tests: what it has, stand-ins for what it can't pull, one compose project.

Images come from registries where those can be reached. Where they can't, Debian's own packages
make them: debootstrap a base image, `redis-server` and `prometheus` what runs on it. What is
missing and can't be made ends the tests with its name. Entry points: `images`, `Project`.
"""

import ipaddress
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BASE, REDIS, PROMETHEUS = "debian:bookworm-slim", "valkey/valkey:8.1", "prom/prometheus:v3.5.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_BUILD_TIMEOUT_S = 1800
# The same each time if it is free: the address is a build argument, on which cached layers depend.
_WHEELS_PORT = 18973
# Official images keep no package archives. The host's own authorities count once a build installs
# ca-certificates.
_BASE_EXTRAS = """
set -e
cp -r /usr/local/share/ca-certificates "$1/usr/local/share/" 2>/dev/null || true
rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*
"""


def run(*command: str, timeout_s: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; nothing is raised for a status."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )


def must(*command: str, timeout_s: float = 300, **options: Any) -> str:
    """Run; what it printed. A failure shows what it said."""
    done = run(*command, timeout_s=timeout_s, **options)
    said = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{said}"
    return done.stdout


def check_engine() -> None:
    """Fail, saying what to install or start, unless `docker compose` can work here."""
    if shutil.which("docker") is None:
        pytest.fail("docker is not installed (Debian: apt-get install docker.io)")
    done = run("docker", "version", "--format", "{{.Server.Version}}")
    if done.returncode:
        pytest.fail(f"no Docker engine answers (start dockerd): {done.stderr.strip()}")
    if run("docker", "compose", "version").returncode:
        pytest.fail("docker has no compose plugin (version 2): see docs.docker.com/compose/install")


@contextmanager
def images() -> Generator[dict[str, str]]:
    """Variables for compose.yaml that name the images and packages to build with and to run."""
    check_engine()
    base = os.environ.get("BASE_IMAGE") or _pulled(BASE) or _debootstrap()
    redis = _pulled(REDIS) or _on_base(base, "redis-server", 'ENTRYPOINT ["redis-server"]')
    prometheus = _pulled(PROMETHEUS) or _on_base(
        base,
        "prometheus",
        "RUN install -d -o 65534 -g 65534 /prometheus",
        'ENTRYPOINT ["prometheus"]',
    )
    ours = {f"{name.upper()}_IMAGE": f"octavo-test/{name}" for name in _OURS}
    names = {"BASE_IMAGE": base, "REDIS_IMAGE": redis, "PROMETHEUS_IMAGE": prometheus}
    with _torch() as torch:
        yield names | ours | torch


_OURS = ("router", "scheduler", "worker", "model")


def _pulled(image: str) -> str | None:
    is_here = run("docker", "image", "inspect", image).returncode == 0
    return image if is_here or run("docker", "pull", "-q", image).returncode == 0 else None


def _debootstrap() -> str:
    """Debian bookworm, minimal, from Debian's mirror."""
    tag = "octavo-test/debian:bookworm"
    if run("docker", "image", "inspect", tag).returncode == 0:
        return tag
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.fail(f"{BASE} can't be pulled, and to make one needs debootstrap and root")
    folder = must("mktemp", "-d").strip()
    try:
        must("debootstrap", "--variant=minbase", "bookworm", folder, timeout_s=900)
        must("sh", "-c", _BASE_EXTRAS, "sh", folder)
        must("sh", "-c", f"tar -C {folder} -c . | docker import - {tag}")
    finally:
        shutil.rmtree(folder)
    return tag


def _on_base(base: str, package: str, *lines: str) -> str:
    """An image of one of Debian's packages, started with the arguments that compose.yaml has."""
    tag = f"octavo-test/{package}"
    install = f"RUN apt-get update && apt-get install -y --no-install-recommends {package}"
    text = "\n".join([f"FROM {base}", install, *lines])
    must("docker", "build", "-q", "-t", tag, "-", input=text, timeout_s=900, env=_classic())
    return tag


def _classic() -> dict[str, str]:
    """The builder that every engine has; BuildKit's needs a plugin."""
    return {**os.environ, "DOCKER_BUILDKIT": "0"}


@contextmanager
def _torch() -> Generator[dict[str, str]]:
    """Where the CPU build of torch comes from: its index, or wheels that this machine's pip has."""
    given = os.environ.get("TORCH_INDEX_URL")
    if given is not None or _answers(f"{TORCH_INDEX}/torch/"):
        yield {} if given is None else {"TORCH_INDEX_URL": given}
        return
    folder = _wheels_folder()
    if folder is None:
        pytest.fail(f"{TORCH_INDEX} can't be reached, and pip's find-links hold no CPU torch")
    bridge = ("docker", "network", "inspect", "bridge", "--format")
    subnet = must(*bridge, "{{(index .IPAM.Config 0).Subnet}}").strip()
    # Where containers that are being built see this machine.
    host = str(ipaddress.ip_network(subnet, strict=False)[1])
    with _served(folder, host) as port:
        yield {
            "TORCH_INDEX_URL": "",
            "PIP_FIND_LINKS": f"http://{host}:{port}/",
            "PIP_TRUSTED_HOST": host,
        }


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _wheels_folder() -> Path | None:
    configured = run("python3", "-m", "pip", "config", "get", "global.find-links").stdout
    for word in f"{os.environ.get('PIP_FIND_LINKS', '')} {configured}".split():
        folder = Path(word.strip("'\""))
        if folder.is_dir() and list(folder.glob("torch-*+cpu-*.whl")):
            return folder
    return None


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def _served(folder: Path, host: str) -> Generator[int]:
    handler = partial(_Quiet, directory=str(folder))
    try:
        server = ThreadingHTTPServer((host, _WHEELS_PORT), handler)
    except OSError:
        server = ThreadingHTTPServer((host, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def copy_checkout(folder: Path) -> None:
    """What a clone of the working tree would have: no ignored file comes along."""
    listed = must("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


class Project:
    """One compose project, by a name of its own beside others on the same engine."""

    def __init__(self, folder: Path, name: str, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.name = name
        # Whatever ports are free.
        self._environ = {**os.environ, **variables, "HTTP_PORT": "0", "GRPC_PORT": "0"}

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        command = ("docker", "compose", "-p", self.name, *arguments)
        return must(*command, timeout_s=timeout_s, cwd=self.folder, env=self._environ)

    def build(self) -> None:
        self.compose("build", timeout_s=_BUILD_TIMEOUT_S)

    def up(self, *arguments: str, timeout_s: float = 600) -> None:
        """Returns when all that has a health check is healthy."""
        waiting = ("--detach", "--wait", "--wait-timeout", str(int(timeout_s)))
        self.compose("up", "--no-build", *waiting, *arguments, timeout_s=timeout_s + 60)

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans")

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine knows of a service's containers, by their number."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        found: list[dict[str, Any]] = json.loads(must("docker", "inspect", *ids)) if ids else []
        return sorted(found, key=lambda one: one["Name"])

    def url(self, service: str = "router") -> str:
        """Where the HTTP port of a service of routers is published: of its first container."""
        return f"http://{self.compose('port', service, '8000').strip()}"

    def python(self, service: str, program: str) -> str:
        """What `program` prints inside a service's container."""
        return self.compose("exec", "-T", service, "python", "-c", program)

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds: Sequence[tuple[str, ...]] = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        found = [must("docker", *kind, "--quiet", "--filter", label) for kind in kinds]
        return "".join(found).split()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120) -> Any:
    """The first true value of `condition`; fails with `what` when none comes."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.3)
