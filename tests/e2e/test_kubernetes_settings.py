"""The variables, secrets, certificates and probes of the manifests, given to real processes.

What Kubernetes would mount lies in a folder, its ports are free ones here, the card is a CPU. All
else is as the overlay for production with all its components has it.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.e2e.stack import REPO, START_TIMEOUT_S, Service
from tests.redis_servers import RedisServer, free_port, valkey_binary
from tests.unit.k8s.rendering import FULL, Document, container_of, render
from tests.unit.k8s.test_pods import environment_of, settings_of

SECRETS = {
    "api-keys": "first-key:acme\nsecond-key:acme\n",
    "internal-token": "the-fleets-own-word\n",
}
PASSWORD = "of-redis"


class Pods:
    """One process for each service of the rendered manifests."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model
        self._manifests = render(FULL)
        self._ports: dict[str, str] = {}
        self.services: dict[str, Service] = {}

    def container(self, name: str) -> Document:
        return container_of(dict(self._manifests.services())[name])

    def environ(self, name: str) -> dict[str, str]:
        """As the container has it, in this folder and on this machine."""
        rendered = environment_of(self._manifests, self.container(name))
        environ = {key: self.localise(value) for key, value in rendered.items()}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
        ports = {key: self.port(value) for key, value in environ.items() if key.endswith("PORT")}
        return {
            **inherited,
            **environ,
            **ports,
            f"OCTAVO_{name.upper()}_ID": f"{name}-0",
            "OCTAVO_HOST": "127.0.0.1",
            "OCTAVO_MODEL": str(self._model),
            "OMP_NUM_THREADS": "1",
            "OCTAVO_READY_FILE": str(self.folder / f"{name}.ready"),
            **({"OCTAVO_BACKEND": "cpu"} if name == "worker" else {}),
        }

    def localise(self, path: str) -> str:
        return path.replace("/etc/octavo", str(self.folder))

    def port(self, rendered: str) -> str:
        return self._ports.setdefault(rendered, str(free_port()))

    def start(self, name: str) -> None:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "octavo", name],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environ(name),
                cwd=REPO,
            )
        self.services[name] = Service(name, process, log, self.folder / f"{name}.ready")

    def stop(self) -> dict[str, int]:
        """Exit codes, the clients' side first."""
        return {name: self.services[name].stop() for name in reversed(self.services)}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer(valkey_binary(), {"requirepass": PASSWORD}).start()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def pods(
    redis: RedisServer, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("pods")
    pods = Pods(folder, tiny_folder)
    name = settings_of(render(FULL), "worker").tls_server_name
    Authority().issue(folder / "tls", names=(name,))
    url = f"redis://:{PASSWORD}@127.0.0.1:{redis.port}"
    (folder / "secrets").mkdir()
    for key, text in {**SECRETS, "redis-url": url}.items():
        (folder / "secrets" / key).write_text(text)
    try:
        for service in ("worker", "scheduler", "router"):
            pods.start(service)
        for service in pods.services.values():
            service.wait_ready()
        # A router has started when it listens; it is ready when it found the scheduler.
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready(pods):
            assert time.monotonic() < deadline, pods.services["router"].log()
            time.sleep(0.05)
        yield pods
    finally:
        pods.stop()


def is_ready(pods: Pods) -> bool:
    try:
        probe(pods, "router", pods.container("router")["readinessProbe"])
    except urllib.error.HTTPError:
        return False
    return True


def ask(pods: Pods, key: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://{pods.services['router'].address}/v1/completions",
        json.dumps({"prompt": [3, 5, 7], "max_tokens": 4}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def probe(pods: Pods, name: str, wanted: Document) -> None:
    """What the kubelet would do; raises if the pod fails it."""
    if "httpGet" in wanted:
        url = f"http://{pods.services[name].address}{wanted['httpGet']['path']}"
        urllib.request.urlopen(url, timeout=60).close()
        return
    program, *words, address = wanted["exec"]["command"]
    host, port = address.split(":")
    subprocess.run(
        [sys.executable, "-m", program, *words, f"{host}:{pods.port(port)}"],
        env=pods.environ(name),
        cwd=REPO,
        check=True,
        timeout=60,
    )


def test_the_manifests_make_a_service(pods: Pods) -> None:
    status, body = ask(pods, "second-key")
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == 4
    assert ask(pods, "the-fleets-own-word")[0] == 401


@pytest.mark.parametrize("name", ["router", "scheduler", "worker"])
def test_running_pods_pass_their_probes(pods: Pods, name: str) -> None:
    container = pods.container(name)
    probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    # Each question once: several probes ask the same.
    questions = {str(wanted.get("exec") or wanted["httpGet"]): wanted for wanted in probes}
    assert len(questions) == 2
    for wanted in questions.values():
        probe(pods, name, wanted)


def test_secrets_are_in_no_log(pods: Pods) -> None:
    logs = "".join(service.log() for service in pods.services.values())
    assert logs
    for secret in ("first-key", "second-key", "the-fleets-own-word", PASSWORD):
        assert secret not in logs


def test_pods_leave_with_success(pods: Pods) -> None:
    assert pods.stop() == {"router": 0, "scheduler": 0, "worker": 0}
