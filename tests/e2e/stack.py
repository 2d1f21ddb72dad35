"""Octavo's real processes on free ports, for tests: started, watched and always reaped.

Entry point: `Stack`. A stack is a scheduler, workers and routers wired by static addresses (and
by Redis when a URL is given).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPO = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0


@dataclass
class Service:
    """One child process and the ports that it announced."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    ready_path: Path
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['port']}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.ready_path.exists():
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"{self.name} ended with {self.process.returncode}:\n{self.log()}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} isn't ready after {timeout_s} s:\n{self.log()}")
            time.sleep(0.02)
        self.ports = json.loads(self.ready_path.read_text())

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, wait, SIGKILL if it doesn't go; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(5)


class Stack:
    """`with Stack(folder, model=...) as stack:` gives a ready service.

    `worker_flags`, `scheduler_flags` and `router_flags` are command-line flags; `environ` is
    added to every process's environment.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | str,
        num_workers: int = 1,
        num_routers: int = 1,
        worker_flags: Sequence[str] = (),
        scheduler_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        redis_url: str = "",
        environ: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.model = str(model)
        self.redis_url = redis_url
        self.environ = environ or {}
        self._counts = (num_workers, num_routers)
        self._flags = (worker_flags, scheduler_flags, router_flags)
        self.workers: list[Service] = []
        self.routers: list[Service] = []
        self.schedulers: list[Service] = []
        self.services: list[Service] = []

    def spawn(self, service: str, *flags: str, environ: dict[str, str] | None = None) -> Service:
        """Start one `octavo <service>`, not yet ready; `environ` is added to the stack's."""
        name = f"{service}-{len(self.services)}"
        ready = self.folder / f"{name}.ready"
        log = self.folder / f"{name}.log"
        environ = {
            **os.environ,
            "OCTAVO_READY_FILE": str(ready),
            # Two threads on two busy cores wait for each other more than they compute.
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **({"OCTAVO_REDIS_URL": self.redis_url} if self.redis_url else {}),
            **self.environ,
            **(environ or {}),
        }
        command = [sys.executable, "-m", "octavo", service, "--port", "0", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=REPO
            )
        started = Service(name, process, log, ready)
        self.services.append(started)
        return started

    def start_worker(self) -> Service:
        flags = ("--model", self.model, "--worker-id", f"worker-{len(self.workers)}")
        port = ("--metrics-port", str(free_port()))
        worker = self.spawn("worker", *flags, *port, *self._flags[0])
        self.workers.append(worker)
        return worker

    def start_scheduler(self) -> Service:
        addresses = ",".join(worker.address for worker in self.workers)
        # Nothing is refused for being slow: a machine may be busy with other things.
        flags = ("--workers", addresses, "--max-queue-wait-s", "0")
        flags = (*flags, "--metrics-port", str(free_port()))
        scheduler = self.spawn("scheduler", *flags, *self._flags[1])
        self.schedulers.append(scheduler)
        return scheduler

    def start_router(self) -> Service:
        addresses = ",".join(scheduler.address for scheduler in self.schedulers)
        flags = ("--model", self.model, "--schedulers", addresses, "--grpc-port", "0")
        router = self.spawn("router", *flags, *self._flags[2])
        self.routers.append(router)
        return router

    def __enter__(self) -> Self:
        try:
            for _ in range(self._counts[0]):
                self.start_worker()
            for worker in self.workers:
                worker.wait_ready()
            self.start_scheduler().wait_ready()
            for _ in range(self._counts[1]):
                self.start_router()
            for router in self.routers:
                router.wait_ready()
            self.wait_http_ready()
        except BaseException:
            self.close()
            raise
        return self

    def wait_http_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/readyz") as answer,
            ):
                if answer.status == 200:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"router isn't ready:\n{self.logs()}")
            time.sleep(0.05)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop everything, clients' side first."""
        for service in reversed(self.services):
            with contextlib.suppress(ProcessLookupError):
                service.stop()

    @property
    def url(self) -> str:
        return f"http://{self.routers[0].address}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.routers[0].ports['grpc_port']}"

    def logs(self) -> str:
        return "\n".join(f"--- {s.name}\n{s.log()[-3000:]}" for s in self.services)

    def scheduler_metrics(self) -> dict[str, float]:
        """The scheduler's Prometheus samples, `name{labels}` to value."""
        return scrape(self.schedulers[0].ports["metrics_port"])

    def router_metrics(self) -> dict[str, float]:
        return scrape(self.routers[0].ports["port"])

    def wait_idle(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Wait until nothing runs, waits or holds a block; the scheduler's metrics then."""
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.scheduler_metrics()
            held = [
                value
                for name, value in metrics.items()
                if name.startswith(("octavo_num_requests_", "octavo_kv_blocks"))
                and ("kv_blocks" not in name or 'state="used"' in name)
            ]
            if not any(held):
                return metrics
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle after {timeout_s} s: {metrics}\n{self.logs()}")
            time.sleep(0.05)


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(metrics: dict[str, float], name: str) -> float:
    """Sum of a metric over its label sets."""
    return sum(value for key, value in metrics.items() if key.split("{")[0] == name)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
