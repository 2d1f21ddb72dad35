"""As much of Kubernetes as shows that images and manifests fit: pods become containers.

Each pod gets its variables, volumes, user, read-only root, capabilities, limits, arguments and
grace from the rendered manifests, and its probes are asked from outside, over the pod's address.
Services are names on one network; NetworkPolicies and scheduling are left out. Entry point:
`Node`.
"""

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from octavo.cli import health
from tests.compose.engine import must, run
from tests.unit.k8s.rendering import Document, Manifests, container_of

_UNITS = {"Mi": "m", "Gi": "g"}


class Node:
    """Runs pods of `manifests`. `images`: by the name that the manifests have, without tag."""

    def __init__(
        self, manifests: Manifests, images: dict[str, str], folder: Path, name: str
    ) -> None:
        self._manifests = manifests
        self._images = images
        self._folder = folder
        self.name = name
        self._templates = dict(manifests.workloads())
        self._containers: dict[str, str] = {}
        must("docker", "network", "create", name)
        self._claims = sorted(manifests.names("PersistentVolumeClaim"))
        for claim in self._claims:
            must("docker", "volume", "create", f"{name}-{claim}")

    def run_pod(self, workload: str) -> None:
        """Start one pod; one that ends with an error is started again."""
        template = self._templates[workload]
        container = container_of(template)
        image = container["image"].rpartition(":")[0]
        # Noted first: one that doesn't start has to go too.
        name = self._containers[workload] = f"{self.name}-{workload}"
        restarts = "on-failure" if workload in self._manifests.names("Job") else "always"
        entrypoint, *command = [*container.get("command", ()), *self._arguments(container)] or [""]
        if not container.get("command"):
            entrypoint, command = "", [entrypoint, *command] if entrypoint else []
        must(
            *("docker", "run", "--detach", "--name", name, "--hostname", name),
            *("--network", self.name, "--network-alias", workload, f"--restart={restarts}"),
            *(("--entrypoint", entrypoint) if entrypoint else ()),
            *_security(template, container),
            *_limits(container["resources"]["limits"]),
            *self._variables(name, container),
            *self._mounts(template, container),
            self._images.get(image, image),
            *command,
        )

    def own(self, claim: str, workload: str) -> None:
        """Give a volume to the group of a pod's `fsGroup`, as Kubernetes does before it starts."""
        security = self._templates[workload]["spec"]["securityContext"]
        image = container_of(self._templates[workload])["image"].rpartition(":")[0]
        must(
            *("docker", "run", "--rm", "--user", "0", "--entrypoint", "sh"),
            *("--volume", f"{self.name}-{claim}:/v", self._images[image]),
            *("-c", f"chown :{security['fsGroup']} /v && chmod g+rwxs /v"),
        )

    def state(self, workload: str) -> dict[str, Any]:
        """Docker's `State` of a pod's container, and `RestartCount`."""
        (found,) = json.loads(must("docker", "inspect", self._containers[workload]))
        return {**found["State"], "RestartCount": found["RestartCount"]}

    def address(self, workload: str) -> str:
        (found,) = json.loads(must("docker", "inspect", self._containers[workload]))
        return found["NetworkSettings"]["Networks"][self.name]["IPAddress"]

    def passes(self, workload: str, kind: str) -> bool:
        """Ask one of a pod's probes."""
        container = container_of(self._templates[workload])
        probe, host = container[kind], self.address(workload)
        if not host:
            return False
        if "grpc" in probe:
            asked = ["--service", probe["grpc"].get("service", "")]
            return health.main([f"{host}:{probe['grpc']['port']}", *asked]) == 0
        port = {p["name"]: p["containerPort"] for p in container["ports"]}[probe["httpGet"]["port"]]
        try:
            url = f"http://{host}:{port}{probe['httpGet']['path']}"
            return urllib.request.urlopen(url, timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def logs(self, workload: str) -> str:
        done = run("docker", "logs", self._containers[workload])
        return done.stdout + done.stderr

    def stop(self, workload: str) -> int:
        """SIGTERM, and SIGKILL after the pod's grace; the exit code."""
        grace_s = self._templates[workload]["spec"]["terminationGracePeriodSeconds"]
        must("docker", "stop", "--time", str(grace_s), self._containers[workload], timeout_s=300)
        return self.state(workload)["ExitCode"]

    def close(self) -> None:
        for container in self._containers.values():
            run("docker", "rm", "--force", "--volumes", container)
        run("docker", "network", "rm", self.name)
        for claim in self._claims:
            run("docker", "volume", "rm", f"{self.name}-{claim}")

    # ---- inside

    def _arguments(self, container: Document) -> list[str]:
        environ = self._environ("", container)
        arguments: list[str] = []
        for argument in container.get("args", ()):
            for name, value in environ.items():
                argument = argument.replace(f"$({name})", value)
            arguments.append(argument)
        return arguments

    def _environ(self, pod: str, container: Document) -> dict[str, str]:
        environ: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            environ |= self._manifests.get("ConfigMap", source["configMapRef"]["name"])["data"]
        for item in container.get("env", ()):
            origin = item.get("valueFrom", {})
            if "fieldRef" in origin:
                assert origin["fieldRef"]["fieldPath"] == "metadata.name"
                environ[item["name"]] = pod
            elif "resourceFieldRef" in origin:
                assert origin["resourceFieldRef"]["resource"] == "limits.cpu"
                environ[item["name"]] = container["resources"]["limits"]["cpu"]
            elif "secretKeyRef" in origin:
                assert origin["secretKeyRef"]["optional"]
            else:
                environ[item["name"]] = item["value"]
        return environ

    def _variables(self, pod: str, container: Document) -> list[str]:
        environ = self._environ(pod, container)
        return [word for item in environ.items() for word in ("--env", "=".join(item))]

    def _mounts(self, template: Document, container: Document) -> list[str]:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        words: list[str] = []
        for mount in container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                size = _size(volume["emptyDir"]["sizeLimit"])
                words += ["--tmpfs", f"{path}:rw,mode=1777,size={size}"]
            elif "persistentVolumeClaim" in volume:
                source = f"{self.name}-{volume['persistentVolumeClaim']['claimName']}"
                words += ["--volume", f"{source}:{path}:{'ro' if mount.get('readOnly') else 'rw'}"]
            else:
                words += ["--volume", f"{self._secret(volume['secret'])}:{path}:ro"]
        return words

    def _secret(self, secret: Document) -> Path:
        data = self._manifests.get("Secret", secret["secretName"])["data"]
        folder = self._folder / "-".join(item["path"] for item in secret["items"])
        folder.mkdir(exist_ok=True)
        for item in secret["items"]:
            file = folder / item["path"]
            file.write_bytes(base64.b64decode(data[item["key"]]))
            file.chmod(secret["defaultMode"])
        return folder


def _security(template: Document, container: Document) -> list[str]:
    pod, own = template["spec"]["securityContext"], container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not own["allowPrivilegeEscalation"]
    words = ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--read-only", "--cap-drop=ALL"]
    words += ["--security-opt=no-new-privileges"]
    return words + (["--group-add", str(pod["fsGroup"])] if "fsGroup" in pod else [])


def _limits(limits: dict[str, str]) -> list[str]:
    return ["--memory", _size(limits["memory"]), "--cpus", limits["cpu"]]


def _size(quantity: str) -> str:
    """`64Mi` as Docker writes it."""
    return f"{quantity[:-2]}{_UNITS[quantity[-2:]]}"
