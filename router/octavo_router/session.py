"""One Session stream to one scheduler: from its Welcome to its end, then never used again.

Requests are multiplexed by handles that are never reused. The reader always reads: what it
reads goes into flights, which never block. A writer task sends what was queued. Once a second
the heart beats: a ping goes out, which a scheduler answers by a frame, and a scheduler that said
nothing for `MAX_SILENT_BEATS` is given up. Must not know: text, HTTP, which cell is chosen.
Entry points: `open_session`, `Session.run`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from octavo import WIRE_VERSION
from octavo.blocks import HASH_VERSION
from octavo.cancel_reason import CancelReason
from octavo.errors import (
    CancelledError,
    DeadlineError,
    FailedPreconditionError,
    OctavoError,
    OverloadedError,
    UnavailableError,
)
from octavo.model_spec import spec_from_proto
from octavo.streams import ending
from octavo.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from octavo.wire_version import check_wire_version
from octavo_router.flights import Finish, Flight
from octavo_router.fullness import Fullness
from octavo_router.served_model import ServedModel
from octavo_router.session_wire import (
    deliver_prompt_logprobs,
    deliver_tokens,
    to_cancel,
    to_error,
    to_submit,
)

log = logging.getLogger(__name__)
PING_S = 1.0
# Counted in beats, not in time: a pause of this process's own is one beat.
MAX_SILENT_BEATS = 3
DESCRIBE_EVERY_BEATS = 10
_FINISHES = {
    common_pb2.FINISH_REASON_STOP: Finish.STOP,
    common_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
}
_Call = grpc.aio.StreamStreamCall[Any, Any]
RefusalHandler = Callable[["Session", Flight, OctavoError], None]


@dataclass(frozen=True, slots=True)
class CellLoad:
    """A cell's last reported load, `backlog_tokens` of prompts only; as in common.proto's Load."""

    backlog_tokens: int = 0
    prefill_tokens_per_s: int = 0
    is_draining: bool = False
    num_blocks: int = 0

    @property
    def takes_new(self) -> bool:
        """It doesn't drain, and has workers."""
        return not self.is_draining and self.num_blocks > 0


class Session:
    """A live stream. Feed it with `submit` and `cancel`; `run` returns when it is lost."""

    def __init__(
        self,
        call: _Call,
        stub: scheduler_pb2_grpc.SchedulerStub,
        address: str,
        scheduler_id: str,
        model: ServedModel,
        on_refused: RefusalHandler,
        load: CellLoad | None = None,
    ) -> None:
        self.address = address
        self.scheduler_id = scheduler_id
        self.model = model
        self.load = load or CellLoad()
        self._fullness = Fullness()
        # Handle -> flight, until the terminal frame of the request (abandoned ones too).
        self.flights: dict[int, Flight] = {}
        self._call = call
        self._stub = stub
        self._on_refused = on_refused
        self._next_handle = 1
        self._outbox: deque[scheduler_pb2.SchedulerSessionRequest] = deque()
        self._has_mail = asyncio.Event()
        # Sequences of each handle that have no terminal frame yet.
        self._open: dict[int, set[int]] = {}
        self._num_silent_beats = 0
        self._num_frames = 0

    def submit(self, flight: Flight) -> None:
        """Send a flight on its way, from where it stands."""
        flight.handle = self._next_handle
        flight.carrier = self
        flight.tried_cells.add(self.scheduler_id)
        flight.num_delivered_before = flight.num_delivered
        self._next_handle += 1
        self.flights[flight.handle] = flight
        self._open[flight.handle] = {s.index for s in flight.sequences if s.finish is None}
        now = asyncio.get_running_loop().time()
        submit = to_submit(flight, self.model, now)
        # Until the next frame tells: choices made meanwhile must know of this one.
        backlog_tokens = self.load.backlog_tokens + len(flight.order.token_ids)
        self.load = replace(self.load, backlog_tokens=backlog_tokens)
        self._post(scheduler_pb2.SchedulerSessionRequest(submit=submit))

    def refusal(self, tenant: str, priority: int) -> OverloadedError | None:
        """Why the cell takes no new request of this kind now, if that is known."""
        return self._fullness.find(tenant, priority, asyncio.get_running_loop().time())

    def cancel(
        self, flight: Flight, index: int | None, reason: CancelReason, num_kept: int
    ) -> None:
        """Ask the scheduler to end a sequence, or all of a flight's."""
        if self.flights.get(flight.handle) is not flight:
            return
        cancel = to_cancel(flight.handle, index, reason, num_kept)
        self._post(scheduler_pb2.SchedulerSessionRequest(cancel=cancel))

    async def watch(self, interval_ms: int) -> AsyncIterator[bytes]:
        """Pictures of the cell (UTF-8 JSON) for live views, while the scheduler lives.

        Raises grpc.RpcError, UnavailableError.
        """
        request = scheduler_pb2.SchedulerWatchRequest(interval_ms=interval_ms)
        with ending(self._stub.Watch(request)) as call:
            try:
                async for response in call:
                    yield response.picture_json
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                raise UnavailableError(f"scheduler {self.address} cancelled Watch") from None

    def _post(self, message: scheduler_pb2.SchedulerSessionRequest) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    async def run(self) -> str | None:
        """Read until the stream ends; returns MOVED's successor ("" = choose), None without.

        Raises grpc.RpcError when the stream broke.
        """
        helpers = [asyncio.create_task(self._write()), asyncio.create_task(self._beat())]
        try:
            while True:
                frame = await self._call.read()
                if not isinstance(frame, scheduler_pb2.SchedulerSessionResponse):
                    return None  # end of the stream
                self._num_silent_beats = 0
                moved = self._receive(frame)
                if moved is not None:
                    return moved
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            why = "cancelled the session"
            if self._num_silent_beats >= MAX_SILENT_BEATS:
                why = f"said nothing for {MAX_SILENT_BEATS * PING_S:g} s"
            raise UnavailableError(f"scheduler {self.address} {why}") from None
        finally:
            for task in helpers:
                task.cancel()
            self._call.cancel()

    async def _write(self) -> None:
        """Send queued messages in order. A broken stream is the reader's to notice."""
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                while self._outbox:
                    await self._call.write(self._outbox.popleft())
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            log.debug("session to %s: write failed: %s", self.address, error)

    async def _beat(self) -> None:
        ping = scheduler_pb2.SchedulerSessionRequest(ping=scheduler_pb2.SessionPing())
        num_beats = 0
        while self._num_silent_beats < MAX_SILENT_BEATS:
            self._post(ping)
            await asyncio.sleep(PING_S)
            self._num_silent_beats += 1
            num_beats += 1
            if num_beats % DESCRIBE_EVERY_BEATS == 0:
                await self._refresh()
        self._call.cancel()

    async def _refresh(self) -> None:
        """Workers come and go, and with them the largest request that fits."""
        with contextlib.suppress(grpc.RpcError, UnavailableError):
            max_request_tokens = await _max_request_tokens(self._stub)
            self.model = replace(self.model, max_request_tokens=max_request_tokens)

    def _receive(self, frame: scheduler_pb2.SchedulerSessionResponse) -> str | None:
        """Take one frame in; the successor's address if it was the last one.

        Raises FailedPreconditionError if frames before it are missing, or it came before.
        """
        if frame.number:
            if frame.number != self._num_frames + 1:
                raise FailedPreconditionError(
                    f"frame {frame.number} of scheduler {self.address} follows {self._num_frames}"
                )
            self._num_frames = frame.number
        for started in frame.started:
            flight = self.flights.get(started.handle)
            if flight is not None:
                flight.start(started.num_cached_tokens)
        for batch in frame.prompt_logprobs:
            deliver_prompt_logprobs(batch, self.flights)
        if frame.HasField("tokens"):
            deliver_tokens(frame.tokens, self.flights)
        for finished in frame.finished:
            self._finish(finished)
        # Before refusals: why a cell refuses may stand in it.
        if frame.HasField("load"):
            self.load = _to_load(frame.load)
            self._fullness.hear(self.load.backlog_tokens)
        for rejected in frame.rejected:
            self._reject(rejected)
        if frame.suspects:
            self._suspect(frame.suspects)
        if not frame.HasField("moved"):
            return None
        self._suspect(frame.moved.suspects)
        return frame.moved.successor

    def _suspect(self, suspects: Iterable[scheduler_pb2.MovedSuspect]) -> None:
        """Workers died on these requests: whoever gets them next is told so."""
        for suspect in suspects:
            flight = self.flights.get(suspect.handle)
            if flight is not None:
                flight.num_worker_suspicions = suspect.num_suspicions

    def _finish(self, finished: scheduler_pb2.Finished) -> None:
        handle = finished.handle
        flight = self.flights.get(handle)
        if flight is None or finished.sequence_index >= len(flight.sequences):
            return
        still_open = self._open[handle]
        still_open.discard(finished.sequence_index)
        if not still_open:
            self._forget(handle)
        finish = _FINISHES.get(finished.reason)
        if finish is not None:
            flight.finish(finished.sequence_index, finish)
        elif flight.sequences[finished.sequence_index].finish is None:
            # A sibling's error ends the request: the client gets one answer or one error.
            flight.fail(_error_of(finished))
            if handle in self.flights:
                self.cancel(flight, None, CancelReason.CLIENT, 0)

    def _reject(self, rejected: scheduler_pb2.Rejected) -> None:
        flight = self._forget(rejected.handle)
        if flight is None:
            return
        error = to_error(rejected.error)
        if rejected.is_full and isinstance(error, OverloadedError):
            order, now = flight.order, asyncio.get_running_loop().time()
            backlog_tokens = self.load.backlog_tokens
            self._fullness.refused(order.tenant, order.priority, backlog_tokens, now, error)
        if not flight.is_over:
            self._on_refused(self, flight, error)

    def _forget(self, handle: int) -> Flight | None:
        self._open.pop(handle, None)
        return self.flights.pop(handle, None)


def _error_of(finished: scheduler_pb2.Finished) -> OctavoError:
    match finished.reason:
        case common_pb2.FINISH_REASON_DEADLINE:
            return DeadlineError("the request's deadline passed")
        case common_pb2.FINISH_REASON_CANCELLED:
            return CancelledError("the request was cancelled")
        case common_pb2.FINISH_REASON_ERROR if finished.HasField("error"):
            return to_error(finished.error)
        case _:
            return OctavoError("the scheduler ended the request for an unknown reason")


def is_own_cancellation() -> bool:
    """Whether a CancelledError is this task's own.

    grpc.aio raises the same for a call that ended as CANCELLED, whoever cancelled it.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def may_try_elsewhere(error: OctavoError) -> bool:
    """Refused for this cell's state, not for what the request is."""
    return isinstance(error, OverloadedError | UnavailableError)


async def open_session(
    channel: grpc.aio.Channel, address: str, router_id: str, on_refused: RefusalHandler
) -> Session:
    """Shake hands with the scheduler at `address`.

    Raises grpc.RpcError if it can't be reached, FailedPreconditionError if the versions of wire
    or hash don't fit, UnavailableError if it closed the stream.
    """
    stub = scheduler_pb2_grpc.SchedulerStub(channel)
    call: _Call = stub.Session()
    hello = scheduler_pb2.SessionHello(wire_version=WIRE_VERSION, router_id=router_id)
    try:
        await call.write(scheduler_pb2.SchedulerSessionRequest(hello=hello))
        first = await call.read()
        if not isinstance(first, scheduler_pb2.SchedulerSessionResponse):
            raise UnavailableError(f"scheduler {address} closed the session before its welcome")
        welcome = first.welcome
        _check_versions(address, welcome)
        model = ServedModel.of(spec_from_proto(welcome.model), await _max_request_tokens(stub))
    except BaseException as error:
        call.cancel()
        if isinstance(error, asyncio.CancelledError) and not is_own_cancellation():
            raise UnavailableError(f"scheduler {address} cancelled the session") from None
        raise
    load = _to_load(first.load)
    return Session(call, stub, address, welcome.scheduler_id, model, on_refused, load)


def _to_load(load: common_pb2.Load) -> CellLoad:
    is_told = load.HasField("prompt_backlog_tokens")
    backlog_tokens = load.prompt_backlog_tokens if is_told else load.backlog_tokens
    return CellLoad(backlog_tokens, load.prefill_tokens_per_s, load.draining, load.num_blocks)


async def _max_request_tokens(stub: scheduler_pb2_grpc.SchedulerStub) -> int:
    """What only Describe says of the model. Raises grpc.RpcError, UnavailableError."""
    request = scheduler_pb2.SchedulerDescribeRequest()
    try:
        described = await stub.Describe(request, timeout=PING_S)
    except asyncio.CancelledError:
        if is_own_cancellation():
            raise
        raise UnavailableError("the scheduler cancelled Describe") from None
    return described.max_request_tokens


def _check_versions(address: str, welcome: scheduler_pb2.SessionWelcome) -> None:
    check_wire_version(f"scheduler {address}", welcome.wire_version)
    if welcome.model.hash_version != HASH_VERSION:
        raise FailedPreconditionError(
            f"scheduler {address} hashes blocks by version {welcome.model.hash_version}, this "
            f"router by {HASH_VERSION}; upgrade the older one"
        )
