"""What the images are made of: no root, health over gRPC, and no torch where none belongs."""

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from octavo.setting import environment_name
from octavo.settings import RouterSettings, SchedulerSettings, WorkerSettings, load
from tests.unit.images.dockerfiles import FOLDERS, REPOSITORY, Dockerfile

SETTINGS: dict[str, type[Any]] = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TENSORS = {"torch", "triton", "transformers", "safetensors", "accelerate", "nvidia-ml-py"}
TEXT_AND_HTTP = {"tokenizers", "jinja2", "huggingface-hub", "fastapi", "starlette", "uvicorn"}
NOT_IN = {"router": TENSORS, "scheduler": TENSORS | TEXT_AND_HTTP}

each_service = pytest.mark.parametrize("service", FOLDERS)


def _brought_by(extras: set[str]) -> set[str]:
    """Every package that Octavo with `extras` brings, as the installed ones declare it."""
    wanted = [*PROJECT["dependencies"]]
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(text), "") for text in wanted]
    while left:
        requirement, asked_for = left.pop()
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": asked_for}):
            continue
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key not in seen:
                seen.add(key)
                declared = importlib.metadata.requires(requirement.name) or ()
                left += [(Requirement(text), extra) for text in declared]
    return {name for name, _ in seen}


@pytest.mark.parametrize("service", NOT_IN)
def test_what_is_not_needed_is_not_brought(service: str) -> None:
    extras = Dockerfile.of(service).extras()
    assert extras == {service, "telemetry"}
    brought = _brought_by(extras)
    assert {"grpcio", "numpy", "opentelemetry-sdk", "uvloop"} <= brought
    assert brought & NOT_IN[service] == set()


def test_the_walk_would_find_torch() -> None:
    extras = Dockerfile.of("worker").extras()
    assert extras == {"worker", "telemetry"}
    assert {"torch", "transformers", "triton"} <= _brought_by(extras)


def test_a_cpu_build_takes_no_triton() -> None:
    runs = " ".join(i.arguments for i in Dockerfile.of("worker").whole("build"))
    assert """if [ "$BACKEND" = cpu ]; then sed -i '/^triton\\b/d' requirements.txt; fi""" in runs
    lines = [line for line in PROJECT["optional-dependencies"]["worker"] if "triton" in line]
    assert len(lines) == 1
    assert lines[0].startswith("triton")


@each_service
def test_only_a_services_own_code_is_in_its_image(service: str) -> None:
    build = Dockerfile.of(service).whole("build")
    copied = {word for i in build if i.name == "COPY" for word in i.arguments.split()[:-1]}
    folders = {path for path in copied if (REPOSITORY / path).is_dir()}
    kernels = {"kernels"} if service == "worker" else set[str]()
    assert folders == {"protos", FOLDERS[service]} | kernels


@each_service
def test_it_runs_without_root_and_says_how_it_is(service: str) -> None:
    dockerfile = Dockerfile.of(service)
    # By number: Kubernetes can't tell that a name isn't root.
    user, _, group = dockerfile.last("USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert dockerfile.last("ENTRYPOINT") == '["tini", "--", "octavo"]'
    assert dockerfile.last("CMD") == f'["{service}"]'
    environment = dockerfile.environment()
    ports = {value for name, value in environment.items() if name.endswith("_PORT")}
    assert set(dockerfile.last("EXPOSE").split()) == ports
    name = "OCTAVO_GRPC_PORT" if service == "router" else "OCTAVO_PORT"
    assert dockerfile.health_port() == environment[name]


@each_service
def test_its_environment_is_settings(service: str) -> None:
    environment = Dockerfile.of(service).environment()
    load(SETTINGS[service], environ=environment)
    known = {environment_name(name) for name in SETTINGS[service].__dataclass_fields__}
    ours = {name for name in environment if name.startswith("OCTAVO_")}
    assert ours <= known | {"OCTAVO_CACHE"}


def test_images_begin_alike() -> None:
    """The same instructions are one layer: built, stored and pulled once for all images."""
    dockerfiles = [Dockerfile.of(service) for service in FOLDERS]
    built = [
        list(takewhile(lambda i: i.name != "COPY", dockerfile.whole("dependencies")))
        for dockerfile in dockerfiles
    ]
    assert built[0] == built[1] == built[2]
    first = [dockerfile.whole()[0] for dockerfile in dockerfiles]
    assert "useradd" in first[0].arguments
    assert first[0] == first[1] == first[2]


@each_service
def test_code_is_a_layer_of_its_own(service: str) -> None:
    """Else every change of the code would be a new layer with torch in it."""
    copied = [i.arguments for i in Dockerfile.of(service).whole() if i.name == "COPY"]
    assert copied == [
        "--from=dependencies /opt/octavo /opt/octavo",
        "--from=build /opt/code /opt/octavo",
    ]
    _, own = Dockerfile.of(service).stages["build"]
    assert own[-1] == ("RUN", "pip install --no-deps --prefix /opt/code .")


def test_a_model_is_fetched_by_the_workers_image() -> None:
    dockerfile = Dockerfile.of("worker")
    assert list(dockerfile.stages)[-1] == "worker"
    assert dockerfile.last("CMD", "model") == '["fetch"]'
    assert dockerfile.last("USER", "model") == dockerfile.last("USER", "worker")
    # Only there: who runs a worker needs no demo.
    demo = [i for i in dockerfile.whole("model") if "demo" in i.arguments]
    assert demo
    assert not [i for i in dockerfile.whole("worker") if "demo" in i.arguments]


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert program is not None
    files = [str(REPOSITORY / folder / "Dockerfile") for folder in FOLDERS.values()]
    done = subprocess.run(
        [program, "--config", str(REPOSITORY / ".hadolint.yaml"), *files],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_context_is_the_sources_only() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        word
        for service in FOLDERS
        for instruction in Dockerfile.of(service).whole("build")
        if instruction.name == "COPY"
        for word in instruction.arguments.split()[:-1]
    }
    assert allowed == copied
