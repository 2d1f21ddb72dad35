"""compose.yaml: hardened, healthy in order, patient at the end, closed to the outside."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from octavo.setting import environment_name
from octavo.settings import CommonSettings, RouterSettings, WorkerSettings
from tests.programs import find_program
from tests.unit.images.dockerfiles import (
    FOLDERS,
    REPOSITORY,
    Dockerfile,
    read_compose,
    seconds,
    with_defaults,
)

COMPOSE = read_compose()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {"router": "router", "scheduler": "scheduler", "worker": "worker", "gpu-worker": "worker"}
OBSERVABILITY = REPOSITORY / "k8s/components/observability"

each_service = pytest.mark.parametrize("name", SERVICES)


def _environment(name: str) -> dict[str, str]:
    given: dict[str, Any] = SERVICES[name].get("environment") or {}
    return {key: with_defaults(str(value or "")) for key, value in given.items()}


@each_service
def test_it_can_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "ipc", "devices", "network_mode"} & service.keys()
    if "build" not in service and name != "more-routers":
        assert service["user"].split(":")[0] != "0"
        assert re.search(r":v?\d+\.\d+", with_defaults(service["image"])), "a version, not latest"


@each_service
def test_what_it_mounts_is_there(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert (REPOSITORY / source).exists(), source
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]
        assert target.startswith("/")


@pytest.mark.parametrize("name", OURS)
def test_it_has_time_to_drain(name: str) -> None:
    grace_s = float(_environment(name)["OCTAVO_DRAIN_GRACE_S"])
    assert grace_s == CommonSettings().drain_grace_s
    # And a third more, to close what is left.
    assert seconds(SERVICES[name]["stop_grace_period"]) >= grace_s * 4 / 3


@pytest.mark.parametrize("name", OURS)
def test_it_is_built_from_its_own_dockerfile(name: str) -> None:
    build = SERVICES[name]["build"]
    dockerfile = Dockerfile.of(OURS[name])
    assert build["dockerfile"] == f"{FOLDERS[OURS[name]]}/Dockerfile"
    assert build.get("target", "final") == list(dockerfile.stages)[-1]
    text = (REPOSITORY / build["dockerfile"]).read_text()
    for argument in build["args"]:
        assert re.search(rf"^ARG {argument}\b", text, re.MULTILINE), argument
    assert "healthcheck" not in SERVICES[name], "the image's own counts"
    assert dockerfile.health_port()


@pytest.mark.parametrize("name", OURS)
def test_its_environment_is_settings(name: str) -> None:
    classes = (RouterSettings, WorkerSettings, CommonSettings)
    known = {environment_name(field) for cls in classes for field in cls.__dataclass_fields__}
    assert {key for key in _environment(name) if key.startswith("OCTAVO_")} <= known


def test_what_starts_and_stops_when() -> None:
    ready, done, started = "service_healthy", "service_completed_successfully", "service_started"
    conditions = {
        name: {other: wait["condition"] for other, wait in SERVICES[name]["depends_on"].items()}
        for name in OURS
    }
    # Stopped in the reverse order: who takes requests first, who answers them last.
    assert conditions["router"] == {"redis": ready, "model": done, "scheduler": started}
    assert conditions["scheduler"] == {"redis": ready, "worker": started, "gpu-worker": started}
    for worker in ("worker", "gpu-worker"):
        assert conditions[worker] == {"redis": ready, "model": done}
        assert SERVICES["scheduler"]["depends_on"][worker]["required"] is False
    assert SERVICES["redis"]["healthcheck"]["test"][1:] == ["redis-cli", "ping"]


def test_one_service_fetches_and_the_others_read() -> None:
    assert SERVICES["model"]["restart"] == "no"
    assert SERVICES["model"]["volumes"] == ["models:/var/cache/octavo"]
    model = _environment("router")["OCTAVO_MODEL"]
    assert [with_defaults(word) for word in SERVICES["model"]["command"]] == [
        *("fetch", model, "--revision", "")
    ]
    for name in ("router", "worker", "gpu-worker"):
        assert "models:/var/cache/octavo:ro" in SERVICES[name]["volumes"]
        assert _environment(name)["HF_HUB_OFFLINE"] == "1"
        assert _environment(name)["OCTAVO_MODEL"] == model == "demo"


def test_only_doors_are_open() -> None:
    assert COMPOSE["networks"]["cell"] == {"internal": True}
    for name in ("scheduler", "worker", "gpu-worker", "redis", "collector"):
        assert SERVICES[name]["networks"] == ["cell"]
        assert "ports" not in SERVICES[name]
    published = {n: s["ports"] for n, s in SERVICES.items() if "ports" in s}
    assert set(published) == {"router", "more-routers", "jaeger", "prometheus", "grafana"}
    for ports in published.values():
        assert all(with_defaults(port).startswith("127.0.0.1:") for port in ports)


def _published(name: str) -> dict[str, range]:
    """The ports of this machine that may be a container's, by the container's."""
    found: dict[str, range] = {}
    for port in SERVICES[name]["ports"]:
        _, published, target = with_defaults(port).split(":")
        first, _, last = published.partition("-")
        found[target] = range(int(first), int(last or first) + 1)
    return found


def test_the_first_router_has_a_port_of_its_own() -> None:
    """Docker goes round in a range: a router that had one would move with every `up`."""
    environment = Dockerfile.of("router").environment()
    http, grpc = environment["OCTAVO_PORT"], environment["OCTAVO_GRPC_PORT"]
    assert _published("router") == {http: range(8000, 8001), grpc: range(8010, 8011)}
    assert _published("more-routers") == {http: range(8001, 8010), grpc: range(8011, 8020)}


def test_more_routers_are_routers() -> None:
    router, more = SERVICES["router"], SERVICES["more-routers"]
    assert more["scale"] == 0
    assert more["pull_policy"] == "never", "the image is built for the first"
    own = {"build", "ports", "scale", "pull_policy"}
    assert {k: v for k, v in more.items() if k not in own} == {
        key: value for key, value in router.items() if key not in own
    }
    assert not any("container_name" in service for service in SERVICES.values())


def test_profiles() -> None:
    profiles = {name: service.get("profiles") for name, service in SERVICES.items()}
    assert {n for n, p in profiles.items() if p is None} == {
        *("router", "more-routers", "scheduler", "worker", "model", "redis")
    }
    assert {n for n, p in profiles.items() if p == ["gpu"]} == {"gpu-worker"}
    assert {n for n, p in profiles.items() if p == ["obs"]} == {
        *("collector", "jaeger", "prometheus", "grafana")
    }
    (device,) = SERVICES["gpu-worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert _environment("router")["OTEL_EXPORTER_OTLP_ENDPOINT"] == "", "traces are off"


def test_the_gpu_worker_may_have_several_cards() -> None:
    service = SERVICES["gpu-worker"]
    environment = service["environment"]
    assert environment["OCTAVO_TENSOR_PARALLEL"] == "${TENSOR_PARALLEL:-1}"
    assert int(_environment("gpu-worker")["OCTAVO_TENSOR_PARALLEL"]) == (
        WorkerSettings().tensor_parallel
    )
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["${GPU:-0}"]
    # Docker's own 64 MiB are too little for NCCL.
    assert service["shm_size"] == "8gb"


def test_prometheus_scrapes_the_ports_that_are_open() -> None:
    config = yaml.safe_load((OBSERVABILITY / "prometheus/prometheus.yaml").read_text())
    scraped = {
        name: str(target["port"])
        for job in config["scrape_configs"]
        for target in job["dns_sd_configs"]
        for name in target["names"]
    }
    assert scraped == {
        name: Dockerfile.of(service).environment()[
            "OCTAVO_PORT" if service == "router" else "OCTAVO_METRICS_PORT"
        ]
        for name, service in {**OURS, "more-routers": "router"}.items()
    }


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """As mounted: the rules are a folder beside it."""
    promtool = find_program("promtool", "prometheus")
    for volume in SERVICES["prometheus"]["volumes"]:
        source, target, *_ = volume.split(":")
        if target.startswith("/etc/prometheus/"):
            place = tmp_path / target.removeprefix("/etc/prometheus/")
            place.symlink_to(REPOSITORY / source)
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_the_collectors_pipelines_are_of_what_it_has() -> None:
    config = yaml.safe_load((OBSERVABILITY / "collector/collector.yaml").read_text())
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    (pipeline,) = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(config[kind])
    assert pipeline["processors"][0] == "memory_limiter"
    host, _, _ = config["exporters"]["otlp/jaeger"]["endpoint"].partition(":")
    assert host in SERVICES


def _data_sources(value: Any) -> set[str]:
    """The uids that a dashboard names, wherever it does."""
    if isinstance(value, list):
        return set[str]().union(*map(_data_sources, value))
    if not isinstance(value, dict):
        return set()
    found = set[str]().union(*map(_data_sources, value.values()))
    source = value.get("datasource")
    return found | ({source["uid"]} if isinstance(source, dict) and "uid" in source else set())


def test_grafana_has_what_dashboards_name() -> None:
    folder = OBSERVABILITY / "grafana/provisioning"
    sources = yaml.safe_load((folder / "datasources/datasources.yaml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    for source in sources:
        assert urlsplit(source["url"]).hostname in SERVICES
        for destination in source.get("jsonData", {}).get("exemplarTraceIdDestinations", ()):
            assert destination["datasourceUid"] in uids
    (provider,) = yaml.safe_load((folder / "dashboards/dashboards.yaml").read_text())["providers"]
    mounted = {
        volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["grafana"]["volumes"]
    }
    dashboards = REPOSITORY / mounted[provider["options"]["path"]]
    named: set[str] = set()
    for path in sorted(Path(dashboards).glob("*.json")):
        named |= _data_sources(json.loads(path.read_text()))
    builtin = {"-- Grafana --", "grafana"}
    assert {uid for uid in named if not uid.startswith("$")} <= uids | builtin
