"""All services of one machine as child processes: Valkey, scheduler, workers, router.

Started at once on ports chosen beforehand (each waits for its peers by itself), watched
until stopped, drained in the order in which requests flow. Must not know: command lines,
terminals. Entry point: `Stack`.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import httpx

from octavo.cli.child import Child, ChildSpec
from octavo.cli.console import Console
from octavo.cli.devices import worker_environments, workers_per_device
from octavo.cli.ports import check_port_is_free, free_ports
from octavo.cli.valkey import ValkeyKeeper
from octavo.hub import cache_folder, model_name_of
from octavo.settings import (
    RouterSettings,
    SchedulerSettings,
    WorkerSettings,
    to_environment,
    to_flags,
)

ResultT = TypeVar("ResultT")
_POLL_S = 0.05
# A service is killed this long after its own grace ran out.
_EXTRA_GRACE_S = 5.0
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class StackOptions:
    """What to run. The services' `host`, `port` and addresses are the stack's to choose,
    but for the first router's."""

    model: str
    num_workers: int
    router: RouterSettings
    scheduler: SchedulerSettings
    worker: WorkerSettings
    num_routers: int = 1


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a router of a running stack answers."""

    url: str
    grpc_address: str
    model: str


class Stack:
    """Starts, watches and stops the services. `start` once, then `watch`, then `stop`."""

    def __init__(self, options: StackOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._valkey = ValkeyKeeper(console)
        self._run_folder: Path | None = None
        # In the order in which requests flow, which is the order of the drain.
        self.routers: list[Child] = []
        self.schedulers: list[Child] = []
        self.workers: list[Child] = []
        # Each router's, once started.
        self.doors: tuple[Endpoints, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def children(self) -> list[Child]:
        return [*self.routers, *self.schedulers, *self.workers]

    async def start(self) -> Endpoints:
        """Start everything; returns when the routers take requests, the first one's endpoints.

        Raises ConfigurationError or CrashLoopError if a service can't be started.
        """
        options = self._options
        check_port_is_free(options.router.host, options.router.port, "port")
        check_port_is_free(options.router.host, options.router.grpc_port, "grpc_port")
        runs = cache_folder() / "run"
        runs.mkdir(parents=True, exist_ok=True)
        self._run_folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=runs))
        redis_url = options.router.redis_url or await self._valkey.start()
        self._make_children(redis_url)
        self._tasks = [asyncio.create_task(child.run()) for child in self.children]
        with self._console.waiting():
            self.doors = tuple(map(self._door, await self._until(self._announced())))
            if not options.router.public_tls_ca:
                # Else it would want a certificate of ours.
                for door in self.doors:
                    await self._until(self._accepting(door.url))
        return self.doors[0]

    def _door(self, ports: Mapping[str, int]) -> Endpoints:
        router = self._options.router
        host = _ANY_HOST.get(router.host, router.host)
        scheme = "https" if router.public_tls_cert else "http"
        name = (router.served_model_name or (model_name_of(self._options.model),))[0]
        return Endpoints(f"{scheme}://{host}:{ports['port']}", f"{host}:{ports['grpc_port']}", name)

    async def watch(self) -> None:
        """Return never; raise when a service can't be kept running."""
        # Not gather: cancelling the watch must not cancel what it watches.
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def stop(self) -> None:
        """Drain: routers first, then scheduler, workers, Valkey."""
        grace_s = self._options.router.drain_grace_s + _EXTRA_GRACE_S
        for stage in (self.routers, self.schedulers, self.workers):
            await asyncio.gather(*(child.stop(grace_s) for child in stage))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._clean_up()

    async def kill(self) -> None:
        """End everything now."""
        for child in self.children:
            child.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._clean_up()

    async def _clean_up(self) -> None:
        await self._valkey.stop()
        if self._run_folder is not None:
            shutil.rmtree(self._run_folder, ignore_errors=True)

    def _make_children(self, redis_url: str) -> None:
        options = self._options
        # Chosen here and kept over restarts, so that peers find each other again.
        ports = free_ports(2 * (options.num_workers + options.num_routers) + 2)
        addresses = [f"127.0.0.1:{ports.pop()}" for _ in range(options.num_workers)]
        scheduler_address = f"127.0.0.1:{ports.pop()}"
        for index in range(options.num_routers):
            # Only the first one's address is the user's.
            first = options.router if index == 0 else replace(options.router, port=0, grpc_port=0)
            router = replace(
                first,
                redis_url=redis_url,
                model=options.model,
                port=first.port or ports.pop(),
                grpc_port=first.grpc_port or ports.pop(),
                schedulers=(scheduler_address,),
                served_model_name=first.served_model_name or (model_name_of(options.model),),
            )
            name = f"router-{index}" if options.num_routers > 1 else "router"
            self._add(self.routers, name, "router", router)
        scheduler = replace(
            options.scheduler,
            redis_url=redis_url,
            **_listen_on(scheduler_address, ports.pop()),
            workers=tuple(addresses),
            scheduler_id=options.scheduler.scheduler_id or "scheduler",
        )
        self._add(self.schedulers, "scheduler", "scheduler", scheduler)
        environments = worker_environments(
            options.num_workers, options.worker.backend, options.worker.tensor_parallel
        )
        shared = workers_per_device(environments)
        for index, (address, environment) in enumerate(zip(addresses, environments, strict=True)):
            name = f"worker-{index}"
            worker = replace(
                options.worker,
                redis_url=redis_url,
                **_listen_on(address, ports.pop()),
                model=options.model,
                worker_id=name,
                memory_utilization=max(0.05, options.worker.memory_utilization / shared),
            )
            self._add(self.workers, name, "worker", worker, environment)

    def _add(
        self,
        stage: list[Child],
        name: str,
        command: str,
        settings: RouterSettings | SchedulerSettings | WorkerSettings,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        assert self._run_folder is not None
        # Secrets travel in the environment: command lines are everybody's to read.
        environment = {**to_environment(settings), **environment}
        flags = to_flags(settings, only_changed=False)
        whole = (sys.executable, "-m", "octavo", command, *flags)
        spec = ChildSpec(name, whole, environment)
        stage.append(Child(spec, self._console, self._run_folder))

    async def _until(self, ready: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `ready` returns, unless a child fails for good before."""
        task = asyncio.ensure_future(ready)
        try:
            await asyncio.wait([task, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for child in self._tasks:
                if child.done():
                    await child
            return await task
        finally:
            task.cancel()

    async def _announced(self) -> list[dict[str, int]]:
        """The routers' ports, when all services have announced theirs."""
        while True:
            missing = [child.spec.name for child in self.children if child.ports is None]
            ports = [found for child in self.routers if (found := child.ports) is not None]
            if not missing and len(ports) == len(self.routers):
                return ports
            self._console.update(f"waiting for {', '.join(missing)}")
            await asyncio.sleep(_POLL_S)

    async def _accepting(self, url: str) -> None:
        """Return when the router says that it takes requests."""
        self._console.update("waiting for the router to find the model")
        # Our own child on this machine, whatever name its certificate has.
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            while True:
                try:
                    answer = await client.get(f"{url}/readyz", timeout=5.0)
                    if answer.is_success:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(_POLL_S)


def _listen_on(address: str, metrics_port: int) -> dict[str, Any]:
    host, port = address.rsplit(":", 1)
    return {"host": host, "port": int(port), "metrics_port": metrics_port}
