"""A whole fleet of real processes: Valkey, workers, schedulers, routers; every one may die.

    with Fleet(folder, model=tiny_folder, num_workers=3, num_schedulers=2, num_routers=2) as fleet:
        fleet.kill("scheduler-0")
        fleet.recover()

All find one another through Valkey, and reach it and one another over a network that can fail.
Every process comes back on the port and under the name that it had. Entry point: `Fleet`.
"""

import contextlib
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.network import Link, Network
from tests.chaos.traffic import Traffic
from tests.e2e.redis_faults import Patient, network_to
from tests.e2e.stack import Service, Stack, free_port, scrape, total
from tests.redis_servers import RedisServer, valkey_binary

SETTLE_S = 60.0


class Fleet:
    """Real processes wired by the registry. `*_flags` are command-line flags of each kind."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | str,
        num_workers: int = 3,
        num_schedulers: int = 2,
        num_routers: int = 2,
        worker_flags: Sequence[str] = (),
        scheduler_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
    ) -> None:
        self.model = Path(model)
        self.redis = RedisServer(valkey_binary())
        self._stack = Stack(folder, model=model)
        self._commands: dict[str, tuple[str, ...]] = {}
        flags = {
            "worker": ("--model", str(model), *worker_flags),
            "scheduler": ("--max-queue-wait-s", "0", *scheduler_flags),
            "router": ("--model", str(model), *router_flags),
        }
        counts = {"worker": num_workers, "scheduler": num_schedulers, "router": num_routers}
        self.services: dict[str, Service] = {}
        for kind, count in counts.items():
            for i in range(count):
                self._commands[f"{kind}-{i}"] = (kind, *flags[kind])
        self.network = Network(self._commands)
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._resources.callback(self.redis.remove)
            self.redis.start()
            way = self._resources.enter_context(network_to(self.redis.port))
            self.patient = Patient(self.redis, way)
            self._stack.redis_url = f"redis://127.0.0.1:{way.port}"
            self._resources.enter_context(self.network)
            for name in self._commands:
                self.start(name)
            for service in self.services.values():
                service.wait_ready()
            self.wait_settled()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        for service in self.services.values():
            if service.process.poll() is None:
                service.kill(signal.SIGCONT)
                service.kill(signal.SIGTERM)
        self._stack.close()
        self._resources.close()

    def start(self, name: str) -> Service:
        """Start `worker-0`, `scheduler-1`, ... for the first time or again; not yet ready."""
        kind, *flags = self._commands[name]
        before = self.services.get(name)
        ports = dict(before.ports) if before is not None else {"port": free_port()}
        if before is None:
            ports["grpc_port" if kind == "router" else "metrics_port"] = free_port()
        for port_name, port in ports.items():
            if port_name != "pid":
                flags += [f"--{port_name.replace('_', '-')}", str(port)]
        environ = self.network.environ_of(name)
        service = self._stack.spawn(kind, *flags, f"--{kind}-id", name, environ=environ)
        service.ports = {k: v for k, v in ports.items() if k != "pid"}
        self.services[name] = service
        return service

    def of_kind(self, kind: str) -> list[Service]:
        """The present processes: worker, scheduler or router."""
        return [s for name, s in self.services.items() if name.startswith(kind)]

    # ---- faults

    def kill(self, name: str) -> None:
        """kill -9."""
        self.services[name].kill(signal.SIGKILL)
        self.services[name].process.wait(60)

    def freeze(self, name: str) -> None:
        """SIGSTOP: its connections live, it says nothing."""
        self.services[name].kill(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.services[name].kill(signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """SIGTERM; returns when it ended, well, by itself."""
        self.services[name].kill(signal.SIGTERM)
        assert self.services[name].process.wait(60) == 0, self.services[name].log()

    def busiest(self, kind: str) -> str:
        """The worker or scheduler that has most to do now; of routers, the first."""
        metrics = {"scheduler": "octavo_num_requests_running", "worker": "octavo_worker_rows"}
        names = [name for name in self.services if name.startswith(kind)]
        if kind not in metrics:
            return names[0]
        return max(names, key=lambda name: total(self.metrics(name), metrics[kind]))

    def busiest_link(self, source_kind: str, target_kind: str) -> Link:
        """The link between two kinds that carried most since the network was last whole."""
        sources = [name for name in self.services if name.startswith(source_kind)]
        return self.network.busiest(sources, [s.ports["port"] for s in self.of_kind(target_kind)])

    # ---- what it looks like

    def is_running(self, name: str) -> bool:
        return self.services[name].process.poll() is None

    @property
    def traffic(self) -> Traffic:
        """Clients over all routers."""
        routers = self.of_kind("router")
        return Traffic(
            [f"http://{s.address}" for s in routers],
            [f"127.0.0.1:{s.ports['grpc_port']}" for s in routers],
        )

    def metrics(self, name: str) -> dict[str, float]:
        """Prometheus samples of a running process, `name{labels}` to value."""
        ports = self.services[name].ports
        return scrape(ports.get("metrics_port", ports["port"]))

    def sum_of(self, metric: str, kind: str = "scheduler") -> float:
        """A metric over all running processes of a kind and all labels."""
        names = [name for name in self.services if name.startswith(kind) and self.is_running(name)]
        return sum(total(self.metrics(name), metric) for name in names)

    def num_led(self) -> dict[str, int]:
        """Workers that each running scheduler leads."""
        return {
            name: int(total(self.metrics(name), "octavo_workers"))
            for name in self.services
            if name.startswith("scheduler") and self.is_running(name)
        }

    def heal(self) -> None:
        """Whatever is frozen, gone, cut or full is so no more; what comes back isn't ready yet."""
        if not self.redis.is_running:
            self.redis.start()
        self.redis.thaw()
        self.redis.command("CONFIG", "SET", "maxmemory", 0)
        self.patient.network.delay_s = 0.0
        self.network.heal()
        for name in self.services:
            if self.is_running(name):
                self.thaw(name)
            else:
                self.start(name)

    def wait_served(self) -> None:
        """Until all processes are there, all workers are led, and every router has a scheduler."""
        for service in self.services.values():
            service.wait_ready()
        self.until(self._is_served, "served")

    def recover(self) -> None:
        """Heal, and wait until all is as at the start."""
        self.heal()
        self.wait_served()
        self.wait_settled()

    def wait_settled(self) -> None:
        """Until every router knows every scheduler, and these share the workers alike."""
        share = -(-len(self.of_kind("worker")) // len(self.of_kind("scheduler")))
        self.until(lambda: self._is_whole() and max(self.num_led().values()) <= share, "settled")

    def _is_served(self) -> bool:
        return sum(self.num_led().values()) == len(self.of_kind("worker")) and all(
            _is_ready(f"http://{s.address}") for s in self.of_kind("router")
        )

    def _is_whole(self) -> bool:
        sessions = {
            total(self.metrics(name), "octavo_router_sessions")
            for name in self.services
            if name.startswith("router")
        }
        return sessions == {len(self.of_kind("scheduler"))} and self._is_served()

    def wait_idle(self) -> None:
        """Until nothing runs or waits anywhere and every block of every worker is free."""

        def is_idle() -> bool:
            held = [
                value
                for name in self.num_led()
                for sample, value in self.metrics(name).items()
                if sample.startswith("octavo_num_requests_")
                or (sample.startswith("octavo_kv_blocks") and 'state="used"' in sample)
            ]
            return not any(held) and not self.sum_of("octavo_worker_rows", "worker")

        self.until(is_idle, "idle")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a state of the fleet."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            with contextlib.suppress(OSError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not {what} after {SETTLE_S} s: {self.num_led()}\n{self.logs()}"
                )
            time.sleep(0.1)

    def num_tracebacks(self) -> int:
        """In all that all processes ever logged."""
        return sum(service.log().count("Traceback") for service in self._stack.services)

    def logs(self) -> str:
        return self._stack.logs()


def _is_ready(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
        return answer.status == 200
