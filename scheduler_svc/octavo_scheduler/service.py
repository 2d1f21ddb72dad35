"""One scheduler process: wires the cell, its links, its server, its timers, and drains.

Timers: a pump after events (bursts share one), the next deadline, a watchdog and the registry
once a second. An idle cell does nothing else.

Must not know: how anything is decided. Entry point: `SchedulerProcess.run`.
"""

import asyncio
import gc
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from octavo.errors import UnavailableError
from octavo.metrics import SchedulerMetrics
from octavo.metrics_http import serve_metrics
from octavo.registry import open_registry
from octavo.security import Security
from octavo.serving import GrpcServer, announce_ready, reachable_host, wait_for_signal
from octavo.settings import SchedulerSettings
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo_scheduler import gauges
from octavo_scheduler.core import Cell
from octavo_scheduler.ledger import Ledger
from octavo_scheduler.recovery import Loss
from octavo_scheduler.server import SchedulerService
from octavo_scheduler.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_DRAIN_POLL_S = 0.02
# Time for the last frames and releases to leave.
_FAREWELL_S = 0.5


class SchedulerProcess:
    """Everything that lives as long as the process. Make it inside a running event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.scheduler_id = settings.scheduler_id or f"scheduler-{secrets.token_hex(4)}"
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self._loop = asyncio.get_running_loop()
        self.cell = Cell(settings, self.metrics, self._loop.time, self._pump_soon)
        self.registry = open_registry(settings.redis_url, settings.fleet)
        gauges.bind(self.metrics, self.cell, self.registry.lag_s)
        if settings.vllm_metrics:
            gauges.bind_vllm(self.metrics, self.cell)
        self._worker_gauges = gauges.WorkerGauges(self.metrics, self.cell)
        self.links: dict[str, WorkerLink] = {}
        self.port = 0
        self._security = Security.of(settings)
        self._server = GrpcServer(security=self._security)
        self._service = SchedulerService(
            self.cell,
            self.scheduler_id,
            settings.session_flush_ms / 1000,
            lambda: list(self.links.values()),
            self.drain,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_pump_due = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._ready = asyncio.Event()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain; the exit code."""
        await self.start()
        try:
            await wait_for_signal()
            logger.info("draining for up to %g s", self.settings.drain_grace_s)
            await self.drain(self.settings.drain_grace_s)
        finally:
            await self.stop()
        return 0

    async def start(self) -> None:
        """Listen, begin to lead workers; ready when the first one is attached."""
        settings = self.settings
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self._service, self._server.server)
        self.port = await self._server.start(settings.host, settings.port, scheduler_pb2.DESCRIPTOR)
        if settings.metrics_port:
            serve_metrics(self.metrics.registry, settings.host, settings.metrics_port)
        await self.registry.start()
        address = f"{reachable_host(settings.host)}:{self.port}"
        ledger = Ledger(self.registry, self.cell, self.scheduler_id, address)
        for worker in settings.workers:
            self._lead(worker)
        self._spawn("ready", self._announce())
        self._spawn("tick", self._tick(ledger))

    async def drain(self, grace_s: float) -> int:
        """No new requests; wait for the accepted ones, then end the rest. How many those are."""
        self.cell.drain()
        await self._server.set_serving(False)
        end = self._loop.time() + grace_s
        while self.cell.requests and self._loop.time() < end:  # noqa: ASYNC110 - no event to keep
            await asyncio.sleep(_DRAIN_POLL_S)
        error = UnavailableError(
            "the scheduler shut down before this request ended", retry_after_ms=1000
        )
        return self.cell.end_all(error)

    async def stop(self) -> None:
        """Release the workers, send what is owed, close everything."""
        self.cell.pump()
        for link in self.links.values():
            link.release()
        leading = [self._tasks[address] for address in self.links if address in self._tasks]
        if leading:
            await asyncio.wait(leading, timeout=_FAREWELL_S)
        await self._server.stop(_FAREWELL_S)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        await self.registry.close()

    # ---- inside

    def _spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("task %s failed", task.get_name(), exc_info=error)

    def _lead(self, address: str) -> None:
        link = WorkerLink(address, self.cell, self.scheduler_id, self._ready.set, self._security)
        self.links[address] = link
        self._spawn(address, link.run())

    async def _announce(self) -> None:
        await self._ready.wait()
        await self._server.set_serving(True)
        # What lives now lives long: collections need not look at it again.
        gc.collect()
        gc.freeze()
        logger.info("ready: scheduler on %s:%d", self.settings.host, self.port)
        announce_ready(port=self.port, metrics_port=self.settings.metrics_port)

    async def _tick(self, ledger: Ledger) -> None:
        while True:
            due = self._loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lag_s = self._loop.time() - due
            hung = self.cell.find_hung(lag_s)
            for link in self.links.values():
                if hung is not None and link.member is hung:
                    logger.error("worker %s hangs; its rows move", link.worker_id)
                    link.break_off(Loss.HANG)
            self.cell.give_up_waiting()
            if not self.settings.workers:
                self._discover()
            self._worker_gauges.tell()
            await ledger.publish(list(self.links.values()))

    def _discover(self) -> None:
        """Lead the registry's workers that nobody else leads; forget those that went."""
        mine = ("", self.scheduler_id)
        free = {r.address for r in self.registry.workers() if r.leader_id in mine}
        for address in free - self.links.keys():
            self._lead(address)
        for address in self.links.keys() - free:
            # A live stream outranks the registry.
            if self.links[address].member is None:
                del self.links[address]
                if address in self._tasks:
                    self._tasks[address].cancel()

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        self.cell.pump()
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        deadline = self.cell.next_deadline()
        if deadline is not None:
            self._deadline_timer = self._loop.call_at(deadline, self.cell.expire)
