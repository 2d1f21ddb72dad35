"""Reads Dockerfiles and compose.yaml far enough to ask what matters.

Entry points: `Dockerfile.of`, `read_compose`, `with_defaults`.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDERS = {"router": "router", "scheduler": "scheduler_svc", "worker": "gpu_worker"}
_EXTRA = re.compile(r"extras\['(\w+)'\]")


class Instruction(NamedTuple):
    """`RUN ls` is ("RUN", "ls"); continued lines are joined, comments gone."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Dockerfile:
    """Its stages in order, each with the instructions after FROM, and what it starts from."""

    stages: dict[str, tuple[str, tuple[Instruction, ...]]]

    @classmethod
    def of(cls, service: str) -> "Dockerfile":
        text = (REPOSITORY / FOLDERS[service] / "Dockerfile").read_text()
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        joined = "\n".join(lines).replace("\\\n", " ")
        stages: dict[str, tuple[str, tuple[Instruction, ...]]] = {}
        name = ""
        for line in filter(str.strip, joined.splitlines()):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                base, _, alias = rest.partition(" AS ")
                name = alias or "final"
                stages[name] = (base, ())
            elif name:
                base, before = stages[name]
                stages[name] = (base, (*before, Instruction(word, rest.strip())))
        return cls(stages)

    def whole(self, stage: str | None = None) -> list[Instruction]:
        """The instructions of a stage (default: the last) and of the stages that it stands on."""
        base, instructions = self.stages[stage or list(self.stages)[-1]]
        return [*(self.whole(base) if base in self.stages else ()), *instructions]

    def last(self, name: str, stage: str | None = None) -> str:
        """The arguments of the instruction that counts."""
        return next(i.arguments for i in reversed(self.whole(stage)) if i.name == name)

    def environment(self, stage: str | None = None) -> dict[str, str]:
        found = [i.arguments for i in self.whole(stage) if i.name == "ENV"]
        pairs = [pair.partition("=") for text in found for pair in shlex.split(text)]
        return {name: value for name, _, value in pairs}

    def extras(self) -> set[str]:
        """The extras of pyproject.toml that its build installs."""
        builds = [i.arguments for i in self.whole("build") if i.name == "RUN"]
        return {extra for text in builds for extra in _EXTRA.findall(text)}

    def health_port(self, stage: str | None = None) -> str:
        """The port that its health check asks over gRPC."""
        _, _, command = self.last("HEALTHCHECK", stage).partition("CMD ")
        program, verb, address = json.loads(command)
        assert (program, verb) == ("octavo", "health")
        host, _, port = address.partition(":")
        assert host == "127.0.0.1"
        return port


def read_compose() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "compose.yaml").read_text())


def with_defaults(value: str) -> str:
    """`${NAME:-value}` and `${NAME-value}` as they are when nobody sets NAME."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> float:
    """`45s` or `2m`."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]
