"""A whole fleet of real processes: Valkey, workers, schedulers, routers; every one may die.

    with Fleet(folder, model=tiny_folder, num_workers=3, num_schedulers=2, num_routers=2) as fleet:
        report = fleet.traffic.run(calls, lambda: fleet.kill(fleet.schedulers[0]), after=60)
        fleet.recover()

All find one another through Valkey. Every process comes back on the port and under the name that
it had. Entry points: `Fleet`, `check_answers`.
"""

import contextlib
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.traffic import Answer, Call, Report, Traffic
from tests.e2e.stack import Service, Stack, free_port, scrape, total
from tests.oracle import check_greedy
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
            "scheduler": scheduler_flags,
            "router": ("--model", str(model), *router_flags),
        }
        counts = {"worker": num_workers, "scheduler": num_schedulers, "router": num_routers}
        self.services: dict[str, Service] = {}
        for kind, count in counts.items():
            for i in range(count):
                self._commands[f"{kind}-{i}"] = (kind, *flags[kind])

    def __enter__(self) -> Self:
        self.redis.start()
        self._stack.redis_url = self.redis.url
        try:
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
        self.redis.remove()

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
        service = self._stack.spawn(kind, *flags, f"--{kind}-id", name)
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
        self.services[name].process.wait(10)

    def freeze(self, name: str) -> None:
        """SIGSTOP: its connections live, it says nothing."""
        self.services[name].kill(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.services[name].kill(signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """SIGTERM; returns when it ended, well, by itself."""
        self.services[name].kill(signal.SIGTERM)
        assert self.services[name].process.wait(60) == 0, self.services[name].log()

    # ---- what it looks like

    def is_running(self, name: str) -> bool:
        return self.services[name].process.poll() is None

    @property
    def traffic(self) -> Traffic:
        """Clients over all routers that run."""
        routers = [s for name, s in self.services.items() if name.startswith("router")]
        routers = [s for s in routers if s.process.poll() is None]
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

    def recover(self) -> None:
        """Thaw and start again whatever is stopped or gone; wait until all is as at the start."""
        for name in self.services:
            if self.is_running(name):
                self.thaw(name)
            else:
                self.start(name)
        for service in self.services.values():
            service.wait_ready()
        self.wait_settled()

    def wait_settled(self) -> None:
        """Until all workers are led, shared alike, and every router knows every scheduler."""
        num_workers = len(self.of_kind("worker"))
        num_schedulers = len(self.of_kind("scheduler"))
        share = -(-num_workers // num_schedulers)

        def is_settled() -> bool:
            led = self.num_led()
            sessions = [
                total(self.metrics(name), "octavo_router_sessions")
                for name in self.services
                if name.startswith("router")
            ]
            return (
                sum(led.values()) == num_workers
                and max(led.values()) <= share
                and sessions == [num_schedulers] * len(sessions)
                and all(_is_ready(f"http://{s.address}") for s in self.of_kind("router"))
            )

        self.until(is_settled, "settled")

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

    def logs(self) -> str:
        return self._stack.logs()

    def check_answers(self, calls: Sequence[Call], undisturbed: Report, disturbed: Report) -> None:
        """Every stream ended once and well, with the ids of the undisturbed run.

        Greedy text may differ where another batch shape's rounding flips a near-tie.
        """
        assert [answer.error for answer in disturbed.answers if answer.error] == [], self.logs()
        for call, before, after in zip(calls, undisturbed.answers, disturbed.answers, strict=True):
            _check_answer(self.model, call, before, after)


def _check_answer(model: Path, call: Call, before: Answer, after: Answer) -> None:
    max_tokens = call.fields["max_tokens"]
    num_ids = sum(len(choice.token_ids) for choice in after.choices)
    assert num_ids == after.completion_tokens, "an id is missing, or came twice"
    for was, now in zip(before.choices, after.choices, strict=True):
        assert now.finish in ("stop", "length")
        if now.finish == "length":
            assert len(now.token_ids) == max_tokens
        if "logprobs" in call.fields:
            assert now.num_logprobs == len(now.token_ids)
        if now.token_ids == was.token_ids:
            assert (now.text, now.finish) == (was.text, was.finish)
            continue
        assert call.is_greedy, "a seeded stream went on with other draws"
        check = check_greedy(model, call.prompt_ids, now.token_ids)
        assert check.is_right, f"{check.wrong} after a move"
        assert check.num_near_ties


def _is_ready(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
        return answer.status == 200
