"""Workers of several nodes: groups of pods as LeaderWorkerSet makes them.

The API: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/. Its pods are checked as a
Deployment's would be.
"""

import kubernetes_validate
import pytest

from tests.unit.k8s.rendering import Document, Manifests, container_of, render
from tests.unit.k8s.test_manifests import KUBERNETES_VERSIONS
from tests.unit.k8s.test_pods import environment_of, settings_of

SPEC_FIELDS = {
    "replicas",
    "leaderWorkerTemplate",
    "rolloutStrategy",
    "startupPolicy",
    "networkConfig",
}
TEMPLATE_FIELDS = {"leaderTemplate", "workerTemplate", "size", "restartPolicy"}


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return render("gpu-tensor-parallel")


@pytest.fixture(scope="module")
def group(manifests: Manifests) -> Document:
    return manifests.get("LeaderWorkerSet", "worker")["spec"]


def test_groups_take_the_place_of_the_deployment(manifests: Manifests, group: Document) -> None:
    assert manifests.names("Deployment") == {"router"}
    assert group["replicas"] >= 2
    assert group.keys() <= SPEC_FIELDS
    template = group["leaderWorkerTemplate"]
    assert template.keys() <= TEMPLATE_FIELDS
    # A worker with a lost rank is a lost worker.
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    strategy = group["rolloutStrategy"]
    assert strategy["type"] == "RollingUpdate"
    assert strategy["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("kind", ["leaderTemplate", "workerTemplate"])
def test_pods_fit_kubernetes_schema(kind: str, version: str, group: Document) -> None:
    template = group["leaderWorkerTemplate"][kind]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "worker"},
        "spec": {
            "selector": {"matchLabels": template["metadata"]["labels"]},
            "template": template,
        },
    }
    kubernetes_validate.validate(deployment, version, strict=True)


def test_there_is_a_rank_for_every_card(manifests: Manifests, group: Document) -> None:
    settings = settings_of(manifests, "worker")
    workloads = dict(manifests.workloads())
    leader, follower = (container_of(workloads[name]) for name in ("worker", "worker-ranks"))
    for key in ("command", "envFrom", "env", "resources", "volumeMounts", "image"):
        assert leader[key] == follower[key]
    flags = dict(word.split("=", 1) for word in leader["command"] if word.startswith("--n"))
    per_node = int(flags["--nproc-per-node"])
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == str(per_node)
    assert group["leaderWorkerTemplate"]["size"] * per_node == settings.tensor_parallel
    assert flags["--nnodes"] == "$(LWS_GROUP_SIZE)"
    assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)"
    assert "--master-addr=$(LWS_LEADER_ADDRESS)" in leader["command"]
    # By which ranks on several machines know each other.
    assert "OCTAVO_INTERNAL_TOKEN_FILE" in environment_of(manifests, leader)


def test_followers_are_nobodys_workers(manifests: Manifests) -> None:
    """No probe, service, budget or scheduler takes one for a worker; ranks reach each other."""
    workloads = dict(manifests.workloads())
    assert not [key for key in container_of(workloads["worker-ranks"]) if key.endswith("Probe")]
    labels = workloads["worker-ranks"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] != "worker"
    policy = manifests.get("NetworkPolicy", "worker-ranks")["spec"]
    wanted = policy["podSelector"]["matchLabels"].items()
    for name in ("worker", "worker-ranks"):
        assert wanted <= workloads[name]["metadata"]["labels"].items()
    for rules, side in (("ingress", "from"), ("egress", "to")):
        assert policy[rules] == [{side: [{"podSelector": policy["podSelector"]}]}]
