"""Components: traffic that is allowed, metrics that are scraped and scaled by, certificates."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client import CollectorRegistry

from octavo.metric_kinds import MetricSpec
from octavo.metrics import RouterMetrics, SchedulerMetrics, WorkerMetrics
from tests.unit.k8s.rendering import FOLDERS, FULL, K8S, Document, Manifests, container_of, render
from tests.unit.k8s.test_pods import environment_of, settings_of
from tests.unit.k8s.traffic import MONITORING, OUTSIDE, Network

NAME = "app.kubernetes.io/name"
_SERIES = re.compile(r"\b(?:octavo|vllm)[a-z_:]+")


def test_the_network_lets_through_what_the_services_need_and_nothing_else() -> None:
    manifests = render("cpu-dev")
    network = Network(manifests)
    names = ("router", "scheduler", "worker", "redis")
    router, scheduler, worker, redis = map(network.pod, names)
    ports = {
        port
        for name in names
        for port in (p["containerPort"] for p in container_of(_pod(manifests, name))["ports"])
    }
    peers = {"outside": OUTSIDE, "monitoring": MONITORING} | dict(
        zip(names, (router, scheduler, worker, redis), strict=True)
    )
    allowed = {
        (source, target, port)
        for source, peer in peers.items()
        for target in names
        for port in ports
        if source != target and network.allows(peer, peers[target], port)
    }
    assert allowed == {
        ("outside", "router", 8000),
        ("outside", "router", 8001),
        ("monitoring", "router", 8000),
        ("monitoring", "router", 8001),
        ("monitoring", "scheduler", 9100),
        ("monitoring", "worker", 9200),
        ("router", "scheduler", 8100),
        ("scheduler", "worker", 8200),
        ("router", "redis", 6379),
        ("scheduler", "redis", 6379),
        ("worker", "redis", 6379),
    }


def _pod(manifests: Manifests, name: str) -> Document:
    return dict(manifests.workloads())[name]


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_the_download_reaches_the_world(folder: str) -> None:
    manifests = render(folder)
    network = Network(manifests)
    reaching = {
        name for name, _ in manifests.workloads() if network.allows(network.pod(name), OUTSIDE, 443)
    }
    assert reaching == {"model-fetch"} & dict(manifests.workloads()).keys()


def test_jobs_are_named_as_in_compose() -> None:
    """Dashboards and rules are the same for both."""
    path = K8S / "components/observability/prometheus/prometheus.yaml"
    jobs = {job["job_name"] for job in yaml.safe_load(path.read_text())["scrape_configs"]}
    manifests = render(FULL)
    monitors = manifests.of_kind("ServiceMonitor", "PodMonitor")
    assert {monitor["spec"]["jobLabel"] for monitor in monitors} == {"app.kubernetes.io/name"}
    names = {template["metadata"]["labels"][NAME] for _, template in manifests.services()}
    assert manifests.get("Service", "router")["metadata"]["labels"][NAME] == "router"
    assert names == jobs == {"router", "scheduler", "worker"}


def test_every_port_with_metrics_is_scraped() -> None:
    manifests = render(FULL)
    monitor = manifests.get("PodMonitor", "schedulers-and-workers")["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert expression["key"] == NAME
    assert sorted(expression["values"]) == ["scheduler", "worker"]
    for name in expression["values"]:
        ports = {port["name"] for port in container_of(_pod(manifests, name))["ports"]}
        assert endpoint["port"] in ports
    monitor = manifests.get("ServiceMonitor", "router")["spec"]
    (endpoint,) = monitor["endpoints"]
    labels = monitor["selector"]["matchLabels"].items()
    (service,) = [
        s for s in manifests.of_kind("Service") if labels <= s["metadata"]["labels"].items()
    ]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def _specs() -> Iterator[MetricSpec]:
    for metrics in (RouterMetrics, SchedulerMetrics, WorkerMetrics):
        yield from metrics(CollectorRegistry()).specs


def known_families() -> set[str]:
    """The names of metrics, as people say them."""
    return {spec.name for spec in _specs()}


def known_series() -> set[str]:
    """Every series that a service exposes: a histogram's with their suffixes."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {spec.name + end for spec in _specs() for end in suffixes.get(spec.kind, ("",))}


def test_workers_are_scaled_by_series_that_exist() -> None:
    scaled = render(FULL).get("ScaledObject", "worker")["spec"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    used = {name for query in queries for name in _SERIES.findall(query)} - {"octavo"}
    assert {"octavo_queue_time_seconds_bucket", "octavo_kv_cache_usage_ratio"} <= used
    assert used <= known_series()
    # Without traffic a quantile is no number, and an absent series no value: both must read 0.
    assert all(query.endswith("or vector(0)") for query in queries)
    assert all('namespace="octavo"' in query for query in queries)


def test_the_component_has_every_dashboard_and_rule() -> None:
    manifests = render(FULL)
    folder = K8S / "components/observability"
    held = {
        name: text
        for document in manifests.of_kind("ConfigMap")
        if document["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
        for name, text in document["data"].items()
    }
    paths = (folder / "dashboards").glob("*.json")
    assert held == {path.name: path.read_text(encoding="utf-8") for path in paths}
    rules = yaml.safe_load((folder / "rules/octavo.yaml").read_text(encoding="utf-8"))
    assert manifests.get("PrometheusRule", "octavo")["spec"] == rules


def test_traces_go_where_the_network_lets_them() -> None:
    manifests = render(FULL)
    (fleet,) = [d for d in manifests.of_kind("ConfigMap") if "OCTAVO_FLEET" in d["data"]]
    endpoint = urlsplit(fleet["data"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert endpoint.hostname == "collector.monitoring"
    assert endpoint.port is not None
    network = Network(manifests)
    for name, _ in manifests.services():
        assert network.allows(network.pod(name), MONITORING, endpoint.port)


def test_scaling_down_drains_one_at_a_time() -> None:
    manifests = render(FULL)
    worker = manifests.get("ScaledObject", "worker")["spec"]
    router = manifests.get("HorizontalPodAutoscaler", "router")["spec"]
    behaviors = {
        worker["scaleTargetRef"]["name"]: worker["advanced"]["horizontalPodAutoscalerConfig"],
        router["scaleTargetRef"]["name"]: router,
    }
    for name, config in behaviors.items():
        target = manifests.get("Deployment", name)
        # A number here would undo the scaling at each apply.
        assert "replicas" not in target["spec"]
        (policy,) = config["behavior"]["scaleDown"]["policies"]
        assert policy["type"] == "Pods"
        assert policy["value"] == 1
        grace_s = target["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert policy["periodSeconds"] >= grace_s


def test_certificates_are_where_the_settings_look_for_them() -> None:
    manifests = render(FULL)
    for name, template in manifests.services():
        settings = settings_of(manifests, name)
        certificate = manifests.get("Certificate", name)["spec"]
        assert settings.tls_server_name in certificate["dnsNames"]
        # Each service is a server to some and a client of others.
        assert {"server auth", "client auth"} <= set(certificate["usages"])
        mounts = {m["mountPath"]: m["name"] for m in container_of(template)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        secret = volumes[mounts["/etc/octavo/tls"]]["secret"]
        assert secret["secretName"] == certificate["secretName"]
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        assert files == tuple(f"/etc/octavo/tls/{f}" for f in ("tls.crt", "tls.key", "ca.crt"))


def test_the_download_fetches_the_model_that_is_served() -> None:
    manifests = render(FULL)
    container = container_of(_pod(manifests, "model-fetch"))
    environ = environment_of(manifests, container)
    served = environment_of(manifests, container_of(_pod(manifests, "worker")))
    assert container["args"] == ["fetch", "$(OCTAVO_MODEL)", "--revision", "$(OCTAVO_REVISION)"]
    same = ("OCTAVO_CACHE", "HF_HOME", "OCTAVO_MODEL", "OCTAVO_REVISION")
    assert [environ[name] for name in same] == [served[name] for name in same]
    assert (environ["HF_HUB_OFFLINE"], served["HF_HUB_OFFLINE"]) == ("0", "1")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert all(environ[name].startswith(mounts["model"]) for name in same[:2])
