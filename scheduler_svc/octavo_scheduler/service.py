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
from octavo.registry import Registry, open_registry
from octavo.security import Security
from octavo.serving import (
    GrpcServer,
    announce_ready,
    is_serving,
    reachable_host,
    wait_for_signal,
)
from octavo.settings import SchedulerSettings
from octavo.telemetry import open_tracer
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo_scheduler import gauges
from octavo_scheduler.core import Cell
from octavo_scheduler.handover import HandOver
from octavo_scheduler.ledger import Ledger
from octavo_scheduler.recovery import Loss
from octavo_scheduler.server import SchedulerService
from octavo_scheduler.takeover import Intake
from octavo_scheduler.worker_link import WorkerLink
from octavo_scheduler.worker_links import WorkerLinks

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_DRAIN_POLL_S = 0.02
# Time for the last frames and releases to leave.
_FAREWELL_S = 0.5


class SchedulerProcess:
    """Everything that lives as long as the process. Make it inside a running event loop."""

    def __init__(self, settings: SchedulerSettings, registry: Registry | None = None) -> None:
        self.settings = settings
        self.scheduler_id = settings.scheduler_id or f"scheduler-{secrets.token_hex(4)}"
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self._loop = asyncio.get_running_loop()
        self.cell = Cell(settings, self.metrics, self._loop.time, self._pump_soon)
        self.registry = registry or open_registry(settings.redis_url, settings.fleet)
        gauges.bind(self.metrics, self.cell, self.registry.lag_s)
        if settings.vllm_metrics:
            gauges.bind_vllm(self.metrics, self.cell)
        self._worker_gauges = gauges.WorkerGauges(self.metrics, self.cell)
        self._ready = asyncio.Event()
        self._security = Security.of(settings)
        self.workers = WorkerLinks(
            self.cell,
            self.scheduler_id,
            self.registry,
            settings.workers,
            settings.max_workers,
            on_attached=self._ready.set,
            on_taken=self._on_taken,
            security=self._security,
        )
        self.port = 0
        self._server = GrpcServer(security=self._security)
        self._tracer = open_tracer("scheduler", self.scheduler_id)
        self._service = SchedulerService(
            self.cell,
            Intake(self.cell, self.workers, self.scheduler_id),
            self.scheduler_id,
            settings.session_flush_ms / 1000,
            lambda: list(self.links.values()),
            self.drain,
            self._tracer,
        )
        self._hand_over = HandOver(
            self.cell,
            self.workers,
            self.registry,
            self.scheduler_id,
            self._service.move_sessions,
            lambda address: is_serving(address, self._security),
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_pump_due = False
        self.is_serving = False
        self._deadline_timer: asyncio.TimerHandle | None = None

    @property
    def links(self) -> dict[str, WorkerLink]:
        """By address of the worker."""
        return self.workers.by_address

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then hand over or drain; the exit code."""
        await self.start()
        try:
            await wait_for_signal()
            await self.leave(self.settings.drain_grace_s)
        finally:
            await self.stop()
        return 0

    async def leave(self, grace_s: float) -> None:
        """Hand everything over to another scheduler; without one, finish within the grace."""
        await self._close_door()
        heir = await self._hand_over.find_heir()
        if heir is not None:
            await self._hand_over.run(heir)
            return
        logger.info("draining for up to %g s", grace_s)
        await self.drain(grace_s)

    async def start(self) -> None:
        """Listen, begin to lead workers; ready when the first one is attached."""
        settings = self.settings
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self._service, self._server.server)
        self.port = await self._server.start(settings.host, settings.port, scheduler_pb2.DESCRIPTOR)
        if settings.metrics_port:
            serve_metrics(self.metrics.registry, settings.host, settings.metrics_port)
        await self.registry.start()
        address = f"{reachable_host(settings.host)}:{self.port}"
        self._ledger = Ledger(
            self.registry,
            self.cell,
            self.scheduler_id,
            address,
            takes_workers=self.workers.takes_workers,
        )
        self._ledger.announce()
        self.workers.start()
        self._spawn("ready", self._announce())
        self._spawn("tick", self._tick(self._ledger))

    async def drain(self, grace_s: float) -> int:
        """No new requests; wait for the accepted ones, then end the rest. How many those are."""
        await self._close_door()
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
        await self.workers.release(_FAREWELL_S)
        await self._server.stop(_FAREWELL_S)
        await self.workers.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        await self.registry.close()
        if self._tracer is not None:
            self._tracer.close()

    # ---- inside

    def _spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("task %s failed", task.get_name(), exc_info=error)

    async def _close_door(self) -> None:
        """Take no new requests, and say so to everybody."""
        self.cell.drain()
        self._ledger.announce()
        await self._server.set_serving(False)

    def _on_taken(self, leader_id: str) -> None:
        """Another scheduler leads a worker of ours; with the last one go the requests."""
        if not self.cell.members and not self.cell.is_draining:
            self._spawn("move", self._hand_over.move(leader_id, "superseded"))

    async def _announce(self) -> None:
        await self._ready.wait()
        await self._tell_readiness()
        # What lives now lives long: collections need not look at it again.
        gc.collect()
        gc.freeze()
        logger.info("ready: scheduler on %s:%d", self.settings.host, self.port)
        announce_ready(port=self.port, metrics_port=self.settings.metrics_port)

    async def _tick(self, ledger: Ledger) -> None:
        while True:
            due = self._loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            try:
                await self._look_after(ledger, self._loop.time() - due)
            except Exception:
                # Without the next rounds no hang would be found, and our lease would end.
                logger.exception("looking after the cell")

    async def _look_after(self, ledger: Ledger, lag_s: float) -> None:
        hung = self.cell.find_hung(lag_s)
        for link in self.links.values():
            if hung is not None and link.member is hung:
                logger.error("worker %s hangs; its rows move", link.worker_id)
                link.break_off(Loss.HANG)
        if self.workers.is_spare:
            self._ready.set()
        await self._tell_readiness()
        if not self.cell.is_draining:
            await self._hand_over.check_empty()
        self.cell.give_up_waiting()
        self._worker_gauges.tell()
        await ledger.publish(list(self.links.values()))

    async def _tell_readiness(self) -> None:
        """Ready: it leads a worker, or others lead all that there are."""
        is_ready = bool(self.cell.members) or self.workers.is_spare
        if self._ready.is_set() and is_ready != self.is_serving and not self.cell.is_draining:
            self.is_serving = is_ready
            await self._server.set_serving(is_ready)

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
