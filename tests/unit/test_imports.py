"""Who may import what, seen in real processes: a service starts with its own packages only.

Import-linter reads the sources (`make lint`); this sees what importing them really loads.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_LIST_MODULES = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""
TENSORS = {"torch", "triton", "transformers", "safetensors", "octavo_kernels"}
TEXT = {"tokenizers", "transformers", "jinja2"}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx"}
# Every module of a package, so that nothing hides behind an import in a function's caller.
PACKAGES = {
    "router/octavo_router": {"octavo_scheduler", "octavo_worker"} | TENSORS,
    "scheduler_svc/octavo_scheduler": {"octavo_router", "octavo_worker"} | TENSORS | TEXT | HTTP,
    "gpu_worker/octavo_worker": {"octavo_router", "octavo_scheduler"} | HTTP,
}

# Loaded only for models that run in transformers' code, which loads the hub's HTTP client.
IN_TRANSFORMERS = {"fallback.py", "fallback_loading.py", "transformers_probe.py"}


def _modules_of(folder: Path) -> list[str]:
    root = folder.parent
    files = sorted(file for file in folder.rglob("*.py") if file.name not in IN_TRANSFORMERS)
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def _loaded_by(*names: str) -> set[str]:
    """Top-level names of the modules in a fresh process after importing `names`."""
    return {name.partition(".")[0] for name in _all_loaded_by(*names)}


def _all_loaded_by(*names: str) -> set[str]:
    answer = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES, *names],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return set(json.loads(answer.stdout))


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_service_loads_nothing_of_another(folder: str) -> None:
    names = _modules_of(REPOSITORY / folder)
    assert len(names) > 5
    # `python -m` runs __main__; importing it must be harmless too.
    assert any(name.endswith(".__main__") for name in names)
    assert _loaded_by(*names) & PACKAGES[folder] == set()


def test_the_workers_cpu_path_never_loads_triton() -> None:
    loaded = _loaded_by(
        "octavo_worker.__main__", "octavo_worker.footprint", "octavo_worker.backends.cpu"
    )
    assert loaded & {"triton", "octavo_kernels", "transformers"} == set()


def test_kernels_know_only_torch_and_triton() -> None:
    names = _modules_of(REPOSITORY / "kernels" / "octavo_kernels")
    loaded = _loaded_by(*names)
    assert loaded & {"octavo", "octavo_worker", "grpc", "transformers"} == set()


def test_the_client_needs_no_service_and_no_server_packages() -> None:
    loaded = _loaded_by("octavo.client")
    services = {"octavo_router", "octavo_scheduler", "octavo_worker"}
    assert loaded & (services | TENSORS | TEXT | HTTP | {"redis", "rich"}) == set()


def test_the_command_line_loads_a_service_only_when_told_to() -> None:
    loaded = _loaded_by("octavo.cli")
    services = {"octavo_router", "octavo_scheduler", "octavo_worker"}
    assert loaded & (services | TENSORS | TEXT | HTTP | {"rich", "grpc"}) == set()


def test_a_worker_of_one_rank_loads_nothing_of_several() -> None:
    loaded = _all_loaded_by("octavo_worker.__main__", "octavo_worker.bare_loop")
    assert "octavo_worker.runner" in loaded
    assert not [name for name in loaded if name.startswith("octavo_worker.parallel")]
