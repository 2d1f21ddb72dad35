"""What keeps a fleet safe and up: settings, probes, grace, budgets, limits, no privileges."""

import math
from typing import Any

import pytest

from octavo.serving import LIVE
from octavo.setting import environment_name
from octavo.settings import CommonSettings, RouterSettings, SchedulerSettings, WorkerSettings, load
from tests.unit.k8s.rendering import FOLDERS, FULL, Document, Manifests, container_of, render

SETTINGS: dict[str, type[CommonSettings]] = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
# Read by octavo.hub, not by a service.
OTHER_VARIABLES = {"OCTAVO_CACHE"}
SECRETS = "/etc/octavo/secrets"
# Time to close what is left after the grace.
CLOSING_S = 10


def environment_of(manifests: Manifests, container: Document) -> dict[str, str]:
    """The variables that a container gets, as far as they have values here."""
    environ: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environ |= manifests.get("ConfigMap", source["configMapRef"]["name"])["data"]
    for item in container.get("env", ()):
        environ[item["name"]] = item.get("value", "from elsewhere")
    return environ


def settings_of(manifests: Manifests, service: str) -> Any:
    """The settings with which a service starts; raises what its start would."""
    container = container_of(dict(manifests.services())[service])
    environ = environment_of(manifests, container)
    plain = {key: value for key, value in environ.items() if not key.endswith("_FILE")}
    return load(SETTINGS[service], environ=plain)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting_of_its_service(folder: str, service: str) -> None:
    manifests = render(folder)
    template = dict(manifests.services())[service]
    fields = SETTINGS[service].__dataclass_fields__.values()
    known = {environment_name(field.name) for field in fields}
    known |= {f"{environment_name(f.name)}_FILE" for f in fields if f.metadata["secret"]}
    environ = environment_of(manifests, container_of(template))
    given = {name for name in environ if name.startswith("OCTAVO_")} - OTHER_VARIABLES
    common = {environment_name(name) for name in CommonSettings.__dataclass_fields__}
    assert given - known - common == set()
    settings = settings_of(manifests, service)
    assert settings.host == "0.0.0.0"
    # Kubernetes would make variables of its services: ROUTER_PORT=tcp://... and so on.
    assert template["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("service", SETTINGS)
def test_no_secret_stands_in_a_variable(folder: str, service: str) -> None:
    manifests = render(folder)
    template = dict(manifests.services())[service]
    environ = environment_of(manifests, container_of(template))
    fields = SETTINGS[service].__dataclass_fields__.values()
    for field in fields:
        if field.metadata["secret"]:
            assert environment_name(field.name) not in environ
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounted = {f"{SECRETS}/{item['path']}" for item in volumes["secrets"]["secret"]["items"]}
    files = {v for k, v in environ.items() if k.endswith("_FILE") and v.startswith(SECRETS)}
    assert files == mounted
    # The keys of clients are the router's alone.
    assert (f"{SECRETS}/api-keys" in mounted) == (service == "router")


@pytest.mark.parametrize("folder", FOLDERS)
def test_ports_are_those_of_the_settings(folder: str) -> None:
    manifests = render(folder)
    ports = {
        name: {port["name"]: port["containerPort"] for port in container_of(template)["ports"]}
        for name, template in manifests.services()
    }
    router = settings_of(manifests, "router")
    assert ports["router"] == {"http": router.port, "grpc": router.grpc_port}
    for name in ("scheduler", "worker"):
        settings = settings_of(manifests, name)
        assert ports[name] == {"grpc": settings.port, "metrics": settings.metrics_port}
    for service in manifests.of_kind("Service"):
        selected = service["spec"]["selector"]["app.kubernetes.io/name"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports.get(selected, {"redis": 6379})


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_grpc_probes_tell_alive_from_ready(folder: str, service: str) -> None:
    manifests = render(folder)
    container = container_of(dict(manifests.services())[service])
    port = settings_of(manifests, service).port
    # A scheduler starts without workers; a worker has started when its model is loaded.
    asked = {"startupProbe": LIVE if service == "scheduler" else "", "readinessProbe": ""}
    for probe, name in (asked | {"livenessProbe": LIVE}).items():
        assert _grpc_probe(container[probe]) == (port, name), probe
        assert ("exec" in container[probe]) == (folder == FULL)
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 60


def _grpc_probe(probe: Document) -> tuple[int, str]:
    """Port and service that it asks: by Kubernetes itself, or by a command where TLS is on."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    command = probe["exec"]["command"]
    assert command[:2] == ["octavo", "health"]
    # Python starts within this even on a busy node.
    assert probe["timeoutSeconds"] >= 10
    service = command[command.index("--service") + 1] if "--service" in command else ""
    host, port = command[-1].split(":")
    assert host == "127.0.0.1"
    return int(port), service


@pytest.mark.parametrize("folder", FOLDERS)
def test_http_probes_of_the_router(folder: str) -> None:
    container = container_of(dict(render(folder).services())["router"])
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert all(container[probe]["httpGet"]["port"] == "http" for probe in paths)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("service", SETTINGS)
def test_a_pod_is_killed_only_after_its_drain(folder: str, service: str) -> None:
    manifests = render(folder)
    template = dict(manifests.services())[service]
    hook = container_of(template).get("lifecycle", {}).get("preStop", {})
    before_s = hook.get("sleep", {}).get("seconds", 0)
    grace_s = settings_of(manifests, service).drain_grace_s
    assert template["spec"]["terminationGracePeriodSeconds"] >= before_s + grace_s + CLOSING_S


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_service_has_a_budget_and_spreads(folder: str) -> None:
    manifests = render(folder)
    for name, template in manifests.services():
        assert manifests.get("PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1
        # Routers and workers of a lost node come back elsewhere; a scheduler has a successor.
        vanished = {
            item["key"]: item["tolerationSeconds"]
            for item in template["spec"].get("tolerations", ())
            if item["effect"] == "NoExecute"
        }
        if name != "scheduler":
            assert vanished == {
                "node.kubernetes.io/unreachable": 30,
                "node.kubernetes.io/not-ready": 30,
            }
        keys = [c["topologyKey"] for c in template["spec"]["topologySpreadConstraints"]]
        assert "kubernetes.io/hostname" in keys


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_pod_has_privileges(folder: str) -> None:
    manifests = render(folder)
    for name, template in manifests.workloads():
        spec, container = template["spec"], container_of(template)
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
    labels = manifests.get("Namespace", "octavo")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_pod_asks_for_what_it_needs_and_is_held_to_it(folder: str) -> None:
    for name, template in render(folder).workloads():
        resources = container_of(template)["resources"]
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= resources[kind].keys(), (name, kind)
        for volume in template["spec"]["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], name


@pytest.mark.parametrize("folder", FOLDERS)
def test_services_only_read_the_model_and_nobody_else_has_it(folder: str) -> None:
    for name, template in render(folder).workloads():
        mounts = {mount["name"]: mount for mount in container_of(template)["volumeMounts"]}
        assert ("model" in mounts) == (name in ("router", "worker", "worker-ranks", "model-fetch"))
        if name in ("router", "worker"):
            assert mounts["model"]["readOnly"] is True
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            assert volumes["model"]["persistentVolumeClaim"]["readOnly"] is True


@pytest.mark.parametrize("folder", ["gpu", FULL])
def test_a_worker_has_one_card_and_every_scheduler_a_worker(folder: str) -> None:
    manifests = render(folder)
    resources = container_of(dict(manifests.services())["worker"])["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert settings_of(manifests, "worker").backend == "cuda"
    num_schedulers = manifests.get("StatefulSet", "scheduler")["spec"]["replicas"]
    assert num_schedulers == 2
    if folder == "gpu":
        assert manifests.get("Deployment", "worker")["spec"]["replicas"] >= num_schedulers
    else:
        scaled = manifests.get("ScaledObject", "worker")["spec"]
        assert scaled["minReplicaCount"] >= num_schedulers


def test_a_cpu_worker_fits_in_its_memory() -> None:
    """Weights of the demo model (538 MB), torch (about 700 MB) and the KV cache."""
    manifests = render("cpu-dev")
    limit = container_of(dict(manifests.services())["worker"])["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    cache = settings_of(manifests, "worker").kv_cache_memory
    assert cache.endswith("GiB")
    assert math.isclose(float(cache.removesuffix("GiB")), 1.0)
    assert float(limit.removesuffix("Gi")) >= float(cache.removesuffix("GiB")) + 2
