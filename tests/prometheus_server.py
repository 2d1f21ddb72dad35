"""Debian's real Prometheus for tests: on a free port, scraping what it is told, reaped.

Entry points: `Prometheus`, `promtool`.
"""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.stack import free_port
from tests.programs import find_program

_START_TIMEOUT_S = 60.0


def promtool(*arguments: str | Path) -> str:
    """Run promtool; what it says. Raises AssertionError with that if it isn't content."""
    command = [find_program("promtool", "prometheus"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


class Prometheus:
    """`with Prometheus(folder, {"router": ["127.0.0.1:8000"]}, rules=[...]) as prometheus:`

    `targets`: addresses by job, scraped once a second.
    """

    def __init__(
        self, folder: Path, targets: Mapping[str, Sequence[str]], rules: Sequence[Path] = ()
    ) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        # JSON is YAML.
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in targets.items()
            ],
        }
        self.config_path = folder / "prometheus.yml"
        self.config_path.write_text(json.dumps(config))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector (or scalar, as one sample) that it is now: metric and value."""
        data = self._get("/api/v1/query", query=expression)["data"]
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        return data["result"]

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their health."""
        groups = self._get("/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Series with their exemplars of the last minute."""
        now = time.time()
        return self._get("/api/v1/query_exemplars", query=expression, start=now - 60, end=now)[
            "data"
        ]

    def _get(self, path: str, **parameters: str | float) -> dict[str, Any]:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self._port}{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def __enter__(self) -> Self:
        log_path = self._folder / "prometheus.log"
        command = [
            find_program("prometheus", "prometheus"),
            f"--config.file={self.config_path}",
            f"--storage.tsdb.path={self._folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--enable-feature=exemplar-storage",
        ]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"Prometheus doesn't start: {log_path.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5):
                return True
        except OSError:
            return False
