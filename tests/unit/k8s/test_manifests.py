"""What Kubernetes would refuse, or quietly get wrong: schemas, references, selectors, versions."""

import subprocess
import sys

import kubernetes_validate
import pytest

import octavo
from tests.unit.k8s.rendering import (
    FOLDERS,
    FULL,
    K8S,
    OVERLAYS,
    REPOSITORY,
    Document,
    components,
    container_of,
    render,
)

# The oldest that has all we use (the preStop sleep, on by default), and the newest known here.
KUBERNETES_VERSIONS = ("1.30", "1.34")
# Checked by their operators' own webhooks; none of the validator's schemas knows them.
CUSTOM = {
    "cert-manager.io/v1",
    "keda.sh/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
    "monitoring.coreos.com/v1",
}
# What k8s/README.md tells the operator to make.
GIVEN_SECRETS = {"octavo-secrets"}


def test_the_overlays_are_those_that_the_readme_names() -> None:
    readme = (K8S / "README.md").read_text()
    for folder in [*OVERLAYS, *(path.name for path in components())]:
        assert f"`{folder}`" in readme, folder


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_document_fits_kubernetes_schema(folder: str, version: str) -> None:
    for document in render(folder):
        if document["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelled_field_would_be_found() -> None:
    """The check above has teeth."""
    document = render("gpu").get("Deployment", "router")
    broken = document | {"spec": document["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSIONS[-1], strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_referred_to_is_there(folder: str) -> None:
    manifests = render(folder)
    maps, claims = manifests.names("ConfigMap"), manifests.names("PersistentVolumeClaim")
    secrets = manifests.names("Secret") | GIVEN_SECRETS
    secrets |= {d["spec"]["secretName"] for d in manifests.of_kind("Certificate")}
    for name, template in manifests.workloads():
        container = container_of(template)
        for source in container.get("envFrom", ()):
            assert source["configMapRef"]["name"] in maps, name
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(volumes) == sorted(mounts), name
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets, name
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, name
    for document in manifests.of_kind("StatefulSet"):
        assert document["spec"]["serviceName"] in manifests.names("Service")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_secrets_hold_every_key_that_is_mounted(folder: str) -> None:
    manifests = render(folder)
    held = {d["metadata"]["name"]: set(d["data"]) for d in manifests.of_kind("Secret")}
    for name, template in manifests.workloads():
        for volume in template["spec"]["volumes"]:
            secret = volume.get("secret", {})
            if secret.get("secretName") in held:
                wanted = {item["key"] for item in secret["items"]}
                assert wanted <= held[secret["secretName"]], name


@pytest.mark.parametrize("folder", FOLDERS)
def test_selectors_select_what_they_mean(folder: str) -> None:
    manifests = render(folder)
    labels = {name: template["metadata"]["labels"] for name, template in manifests.workloads()}
    for document in manifests.of_kind("Deployment", "StatefulSet"):
        name = document["metadata"]["name"]
        assert _selected(document["spec"]["selector"], labels) == [name]
        for spread in document["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert _selected(spread["labelSelector"], labels) == [name]
    for budget in manifests.of_kind("PodDisruptionBudget"):
        assert _selected(budget["spec"]["selector"], labels) == [budget["metadata"]["name"]]
    for service in manifests.of_kind("Service"):
        assert len(_selected({"matchLabels": service["spec"]["selector"]}, labels)) == 1


def _selected(selector: Document, labels: dict[str, dict[str, str]]) -> list[str]:
    wanted = selector["matchLabels"].items()
    return [name for name, its in labels.items() if wanted <= its.items()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_is_in_the_namespace(folder: str) -> None:
    for document in render(folder):
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "octavo", document["metadata"]["name"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_our_images_have_this_version(folder: str) -> None:
    for _, template in render(folder).workloads():
        image, _, tag = container_of(template)["image"].rpartition(":")
        assert tag not in ("", "latest")
        if image.startswith("octavo-"):
            is_cuda = folder != "cpu-dev" and image == "octavo-worker"
            assert tag == octavo.__version__ + ("-cuda" if is_cuda else "")


def test_the_full_rendering_has_every_component() -> None:
    kinds = {document["kind"] for document in render(FULL)}
    assert {"NetworkPolicy", "ScaledObject", "PodMonitor", "Certificate", "Job"} <= kinds


def test_all_yaml_is_clean() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "-s", "."],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
