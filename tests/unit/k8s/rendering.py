"""Overlays as Kubernetes gets them: rendered by kustomize, once per session.

Entry points: `render`, `FOLDERS`, `Manifests`.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
K8S = REPOSITORY / "k8s"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))
# What is tested: each overlay, and the one for production with every component beside it.
FULL = "gpu with all components"
FOLDERS = [*OVERLAYS, FULL]

Document = dict[str, Any]


def components() -> list[Path]:
    return sorted(path.parent for path in (K8S / "components").glob("*/kustomization.yaml"))


class Manifests(list[Document]):
    """The documents of one rendering."""

    def of_kind(self, *kinds: str) -> list[Document]:
        return [document for document in self if document["kind"] in kinds]

    def get(self, kind: str, name: str) -> Document:
        found = [d for d in self.of_kind(kind) if d["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    def names(self, kind: str) -> set[str]:
        return {document["metadata"]["name"] for document in self.of_kind(kind)}

    def workloads(self) -> Iterator[tuple[str, Document]]:
        """Name and pod template of everything that runs pods."""
        for document in self.of_kind("Deployment", "StatefulSet", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]
        for document in self.of_kind("LeaderWorkerSet"):
            name, templates = document["metadata"]["name"], document["spec"]["leaderWorkerTemplate"]
            yield name, templates["leaderTemplate"]
            yield f"{name}-ranks", templates["workerTemplate"]

    def services(self) -> Iterator[tuple[str, Document]]:
        """Name and pod template of Octavo's own: router, scheduler, worker."""
        for name, template in self.workloads():
            if name in ("router", "scheduler", "worker"):
                yield name, template


def container_of(template: Document) -> Document:
    (container,) = template["spec"]["containers"]
    return container


@functools.cache
def render(name: str) -> Manifests:
    """The documents of one of FOLDERS."""
    if name != FULL:
        return _kustomize(K8S / "overlays" / name)
    with tempfile.TemporaryDirectory(prefix="octavo-test-k8s-") as folder:
        target = Path(folder).resolve()
        used = yaml.safe_load((K8S / "overlays/gpu/kustomization.yaml").read_text())["components"]
        used_names = {Path(path).name for path in used}
        more = [path for path in components() if path.name not in used_names | {"redis"}]
        kustomization = {
            "resources": [os.path.relpath(K8S / "overlays/gpu", target)],
            "components": [os.path.relpath(path, target) for path in more],
            "namespace": "octavo",
        }
        (target / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return _kustomize(target)


def _kustomize(folder: Path) -> Manifests:
    command = _find_kustomize()
    done = subprocess.run(
        [*command, str(folder)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    # Kustomize warns of what it will not read in its next version.
    assert not done.stderr, done.stderr
    return Manifests(yaml.safe_load_all(done.stdout))


def _find_kustomize() -> list[str]:
    """Kustomize, alone or in kubectl; skips where neither is installed, but never in CI."""
    if found := shutil.which("kustomize"):
        return [found, "build"]
    if found := shutil.which("kubectl"):
        return [found, "kustomize"]
    message = "neither kustomize nor kubectl is installed"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
