"""The overlay for development with the real images: each pod a container, as its manifest says.

The tests share one node and run in the order in which they stand here.
"""

from collections.abc import Generator

import httpx
import pytest

from tests.compose.engine import Project, copy_checkout, images, wait_until
from tests.compose.kubelet import Node
from tests.unit.k8s.rendering import render

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]
PODS = ("router", "scheduler", "worker", "redis")
KEY = {"Authorization": "Bearer octavo-dev"}
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[Node]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "checkout").mkdir()
    copy_checkout(folder / "checkout")
    name = f"octavo-node-{folder.parent.name.rpartition('-')[2]}"
    with images() as variables:
        Project(folder / "checkout", name, variables).build()
    ours = {f"octavo-{n}": f"octavo-test/{n}" for n in ("router", "scheduler", "worker", "model")}
    redis = {"docker.io/valkey/valkey": variables["REDIS_IMAGE"]}
    node = Node(render("cpu-dev"), ours | redis, folder, name)
    try:
        yield node
    finally:
        node.close()


def test_pods_wait_for_their_model(node: Node) -> None:
    node.own("model", "model-fetch")
    for pod in PODS:
        node.run_pod(pod)
    # They start, all at once, before there is anything to serve.
    for pod in ("router", "worker"):
        wait_until(lambda pod=pod: node.state(pod)["RestartCount"] > 0, f"{pod} restarts")
        assert "the demo model isn't in /models" in node.logs(pod)
    wait_until(lambda: node.passes("scheduler", "startupProbe"), "the scheduler lives")
    assert not node.passes("scheduler", "readinessProbe")


def test_the_job_fills_the_volume_and_all_become_ready(node: Node) -> None:
    node.run_pod("model-fetch")
    wait_until(
        lambda: node.state("model-fetch")["Status"] == "exited",
        "the model is fetched",
        timeout_s=1200,
    )
    assert node.state("model-fetch")["ExitCode"] == 0, node.logs("model-fetch")
    for pod in ("worker", "scheduler", "router"):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            wait_until(
                lambda pod=pod, probe=probe: node.passes(pod, probe),
                f"{pod} passes its {probe}",
                timeout_s=300,
            )


def test_it_answers_whoever_has_a_key(node: Node) -> None:
    url = f"http://{node.address('router')}:8000/v1/chat/completions"
    answer = httpx.post(url, json=QUESTION, headers=KEY, timeout=120)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert httpx.post(url, json=QUESTION, timeout=120).status_code == 401


def test_pods_leave_within_their_grace(node: Node) -> None:
    assert [node.stop(pod) for pod in ("router", "scheduler", "worker")] == [0, 0, 0]
