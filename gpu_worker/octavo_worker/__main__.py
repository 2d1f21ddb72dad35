"""`octavo worker`: settings, phases, registration, signals. Entry point: `main`."""

import argparse
import asyncio
import dataclasses
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from prometheus_client import CollectorRegistry

from octavo import vllm_metrics
from octavo.errors import OctavoError, UnavailableError
from octavo.hub import model_name_of
from octavo.logs import setup_logging
from octavo.metrics import WorkerMetrics
from octavo.metrics_http import serve_metrics
from octavo.registry import Registry, WorkerRecord, open_registry
from octavo.security import Security
from octavo.serving import GrpcServer, announce_ready, reachable_host, wait_for_signal
from octavo.settings import WorkerSettings, add_arguments, load
from octavo.telemetry import open_tracer
from octavo.v1 import worker_pb2, worker_pb2_grpc
from octavo_worker import loading
from octavo_worker.engine import ENGINE_THREAD
from octavo_worker.leadership import Leadership, Seat
from octavo_worker.server import WorkerService
from octavo_worker.step_profile import write_profile
from octavo_worker.step_trace import StepTrace

_logger = logging.getLogger("octavo_worker")
_DRAIN_POLL_S = 0.05
_STOP_GRACE_S = 0.5
_SAME_FATE_S = 1.0
_LOAD_THREAD = "load"

ResultT = TypeVar("ResultT")


def main(argv: list[str] | None = None) -> int:
    """Run a worker until a signal ends it; the exit code is 0 if one did."""
    usage, about = "%(prog)s [OPTIONS]", "Run one worker."
    parser = argparse.ArgumentParser(prog="octavo worker", usage=usage, description=about)
    add_arguments(parser, WorkerSettings)
    arguments = vars(parser.parse_args(argv))
    try:
        settings = load(WorkerSettings, arguments)
        if settings.tensor_parallel > 1 and (code := _follow(settings)) is not None:
            return code
        setup_logging("worker", settings.log_level, settings.log_format)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_Process(settings).run())
    except OctavoError as error:
        print(f"octavo worker: {error.message}", file=sys.stderr)
        # What is lacking may be there at the next start; a mistake will still be one.
        code = 1 if isinstance(error, UnavailableError) else 2
    if any(thread.name in (_LOAD_THREAD, ENGINE_THREAD) for thread in threading.enumerate()):
        # Inside torch, it can't be stopped; Python's own way out would abort the process.
        logging.shutdown()
        os._exit(code)
    return code


class _Process:
    """Wires one worker process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._worker_id = settings.worker_id or f"worker-{secrets.token_hex(4)}"
        self._leadership = Leadership(secrets.token_hex(8), settings.leader_silence_s)
        self._metrics = WorkerMetrics(CollectorRegistry())
        self._registry: Registry = open_registry(settings.redis_url, settings.fleet)
        self._metrics.redis_lag.set_function(self._registry.lag_s)
        if settings.vllm_metrics:
            names = settings.served_model_name or (model_name_of(settings.model),)
            vllm_metrics.add_to_worker(self._metrics, lambda: names[0])
        self._record: WorkerRecord | None = None
        self._tracer = open_tracer("worker", self._worker_id)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        fatal: asyncio.Future[str] = loop.create_future()

        def on_fatal(reason: str) -> None:
            loop.call_soon_threadsafe(lambda: fatal.done() or fatal.set_result(reason))

        settings = self._settings
        server = GrpcServer(security=Security.of(settings))
        service = WorkerService(self._worker_id, self._leadership, self._on_leader_change)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server.server)
        port = await server.start(settings.host, settings.port, worker_pb2.DESCRIPTOR)
        signalled = asyncio.create_task(wait_for_signal())
        loaded: loading.Loaded | None = None
        try:
            loading_ends = _in_thread(
                lambda: loading.load(settings, self._metrics, on_fatal, service.compile)
            )
            loaded = await _unless(signalled, fatal, loading_ends)
            if loaded is None:
                return self._end(fatal)
            if self._tracer is not None:
                loaded.engine.trace_steps(StepTrace(self._tracer, loaded.capacity.device))
            loaded.engine.start()
            service.run(loaded)
            await self._announce(loaded, port)
            await server.set_serving(True)
            await asyncio.wait({signalled, fatal}, return_when=asyncio.FIRST_COMPLETED)
            if fatal.done():
                return self._end(fatal)
            await server.set_serving(False)
            await self._drain(service, fatal)
            return 1 if fatal.done() else 0
        finally:
            signalled.cancel()
            await self._registry.close()
            await server.stop(_STOP_GRACE_S)
            if loaded is not None:
                loaded.engine.close()
                if settings.profile:
                    profile = loaded.engine.runner.profile
                    write_profile(settings.profile, self._worker_id, profile)
            if self._tracer is not None:
                self._tracer.close()

    def _end(self, fatal: "asyncio.Future[str]") -> int:
        """The exit status."""
        if not fatal.done():
            return 0
        _logger.critical("ending: %s", fatal.result())
        return 1

    async def _announce(self, loaded: loading.Loaded, port: int) -> None:
        settings = self._settings
        metrics_port = settings.metrics_port
        if metrics_port:
            serve_metrics(self._metrics.registry, settings.host, metrics_port)
        self._record = WorkerRecord(
            worker_id=self._worker_id,
            address=f"{reachable_host(settings.host)}:{port}",
            boot_id=self._leadership.boot_id,
            model=loaded.spec.name,
            revision=loaded.spec.revision,
            num_blocks=loaded.capacity.num_blocks,
            max_num_seqs=loaded.capacity.max_num_seqs,
            leader_id="",
            epoch=0,
        )
        await self._registry.start()
        self._registry.announce_worker(self._record)
        announce_ready(port=port, metrics_port=metrics_port)
        _logger.info("ready: worker on %s:%d", settings.host, port)

    def _on_leader_change(self) -> None:
        leadership = self._leadership
        self._metrics.epoch.set(leadership.epoch)
        self._metrics.is_led.set(leadership.seat is Seat.LIVE)
        if self._record is not None:
            self._record = dataclasses.replace(
                self._record,
                leader_id=leadership.leader_id,
                epoch=leadership.epoch,
                last_leader_id=leadership.last_leader_id,
            )
            self._registry.announce_worker(self._record)

    async def _drain(self, service: WorkerService, fatal: "asyncio.Future[str]") -> None:
        """Let the rows end, or be moved by the leader, within the grace."""
        service.drain()
        _logger.info("draining for up to %g s", self._settings.drain_grace_s)
        deadline = asyncio.get_running_loop().time() + self._settings.drain_grace_s
        while not (service.is_drained or fatal.done()):
            if asyncio.get_running_loop().time() >= deadline:
                _logger.warning("the drain grace is over; what still runs is left to move")
                return
            await asyncio.sleep(_DRAIN_POLL_S)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _unless(
    stop: "asyncio.Task[None]", fatal: "asyncio.Future[str]", work: "asyncio.Future[ResultT]"
) -> ResultT | None:
    """The result of `work`; None if one of the others ends first."""
    await asyncio.wait({stop, fatal, work}, return_when=asyncio.FIRST_COMPLETED)
    if fatal.done():
        # What ended another rank may end this one too, and then it says more.
        await asyncio.wait({work}, timeout=_SAME_FATE_S)
    return work.result() if work.done() else None


def _follow(settings: WorkerSettings) -> int | None:
    """Be one of the ranks that follow, if that is this process's place: its exit status."""
    # Only here: a worker that has its model to itself imports none of it.
    from octavo_worker.parallel.following import follow
    from octavo_worker.parallel.places import Place

    place = Place.here(settings.tensor_parallel)
    return follow(settings, place) if place.share.rank > 0 else None


def _in_thread(function: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
    """Call `function` in a daemon thread: a process that is told to end does not wait for it."""
    future: Future[ResultT] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name=_LOAD_THREAD, daemon=True).start()
    return asyncio.wrap_future(future)


if __name__ == "__main__":
    sys.exit(main())
