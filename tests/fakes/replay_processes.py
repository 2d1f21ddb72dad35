"""Routers, schedulers and workers of a `replay_world.World`: processes and the streams between.

What decides is the real thing: the workers' Leadership, the schedulers' Cell, the routers'
Session and Flight, and the conversion of every message. A message waits on its stream until the
test delivers it, and a stream breaks for one end before the other hears of it.

Entry points: `Worker`, `Scheduler`, `Router`.
"""

from collections import deque
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

from octavo.capacity import Capacity
from octavo.errors import FailedPreconditionError, OctavoError
from octavo.metrics import SchedulerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings
from octavo.v1 import scheduler_pb2, worker_pb2
from octavo_router.flights import Flight
from octavo_router.served_model import ServedModel
from octavo_router.session import Session
from octavo_scheduler import dispatch, frames
from octavo_scheduler.core import Cell
from octavo_scheduler.frames import LoadNumbers
from octavo_scheduler.members import Member, state_of
from octavo_scheduler.outbox import Outbox
from octavo_scheduler.plan import Plan
from octavo_scheduler.recovery import Loss
from octavo_scheduler.results import WorkerProtocolError
from octavo_worker.leadership import Leadership
from tests.fakes.fake_device import FakeDevice, FakeSize
from tests.fakes.simulated_cell import ManualClock

SIZE = FakeSize(
    num_blocks=40, max_num_seqs=4, max_num_batched_tokens=48, block_size=16, max_model_len=256
)
SILENCE_S = 3.0
SPEC = ModelSpec(
    name="fake",
    revision="r1",
    block_size=SIZE.block_size,
    kv_scheme="fake",
    hash_version=1,
    max_model_len=SIZE.max_model_len,
    vocab_size=SIZE.vocab_size,
    eos_token_ids=(2,),
)
SERVED = ServedModel.of(SPEC)
NO_LOAD = LoadNumbers(0, 0, 0, 0, 0, 0, draining=False, prompt_backlog_tokens=0)
ResultT = TypeVar("ResultT")


class Stream:
    """A Steps stream: plans one way, results the other. Each end hears of its end by itself."""

    def __init__(self, owner: "Scheduler", boot_id: str, epoch: int) -> None:
        self.owner = owner
        self.boot_id = boot_id
        self.epoch = epoch
        self.plans: deque[worker_pb2.Plan] = deque()
        self.results: deque[worker_pb2.StepResult] = deque()

    def send(self, plan: Plan) -> None:
        """The scheduler's side: a plan goes onto the wire."""
        message = dispatch.plan_to_proto(plan).SerializeToString()
        self.plans.append(worker_pb2.Plan.FromString(message))


class Worker:
    """A device and who leads it. `led_by`: whose plans and leases ran, by (boot id, epoch)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = ManualClock()
        self.num_boots = 0
        self.led_by: dict[tuple[str, int], set[Scheduler]] = {}
        self.boot()

    def boot(self) -> None:
        """A new process: nothing of the old one is left."""
        self.num_boots += 1
        self.leadership = Leadership(f"{self.name}-{self.num_boots}", SILENCE_S)
        self.device = FakeDevice(SIZE)
        self.stream: Stream | None = None
        self._queue: deque[worker_pb2.Plan] = deque()
        self._num_plans = 0

    def attach(self, scheduler: "Scheduler", expected_epoch: int) -> Stream:
        """A new leader, if it may be; raises FailedPreconditionError."""
        epoch = self.leadership.attach(scheduler.name, expected_epoch, self.clock())
        self._drop()
        self.device.reset()
        return Stream(scheduler, self.leadership.boot_id, epoch)

    def open(self, stream: Stream) -> None:
        self.leadership.open_stream(stream.boot_id, stream.epoch, self.clock())
        self.stream = stream

    def receive(self, stream: Stream) -> None:
        """The next plan arrives; of a stream that is over, nobody reads it."""
        plan = stream.plans.popleft()
        if stream is not self.stream:
            return
        self.leadership.hear(stream.epoch, self.clock())
        if plan.plan_id != self._num_plans + 1:
            self.close()  # as the engine refuses it
            return
        self._num_plans += 1
        self._queue.append(plan)

    def close(self) -> None:
        """The stream broke, as far as this end knows."""
        if self.stream is not None:
            self.leadership.close_stream(self.stream.epoch)
        self._drop()

    def _drop(self) -> None:
        self.stream = None
        self._queue.clear()
        self._num_plans = 0

    def step(self) -> bool:
        """Run one step if there is one; its result goes onto the wire."""
        stream = self.stream
        if stream is None or not (self._queue or self.device.can_repeat):
            return False
        result = self.device.step(self._queue.popleft() if self._queue else None)
        result.step_us = 1000
        stream.results.append(worker_pb2.StepResult.FromString(result.SerializeToString()))
        epoch = (self.leadership.boot_id, self.leadership.epoch)
        self.led_by.setdefault(epoch, set()).add(stream.owner)
        assert not self.device.violations, self.device.violations
        return True


class Scheduler:
    """One scheduler process: a cell, its streams to workers, its sessions of routers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = ManualClock()
        settings = SchedulerSettings(check_integrity=True, max_moves=2)
        self.cell = Cell(settings, SchedulerMetrics(CollectorRegistry()), self.clock)
        self.members: dict[Stream, Member] = {}
        self.leads: dict[str, Stream] = {}
        self.sessions: list[SessionStream] = []

    def lead(self, worker: Worker, stream: Stream) -> None:
        """The stream is open: the worker joins with what its cache holds."""
        device = worker.device
        capacity = Capacity(SIZE.num_blocks, SIZE.max_num_seqs, SIZE.max_num_batched_tokens)
        state = state_of(worker.name, SPEC, capacity, self.cell.settings)
        state.restore(list(device.sealed), list(device.sealed.values()))
        self.members[stream] = self.cell.attach(state, SPEC, stream)
        self.leads[worker.name] = stream

    def read(self, stream: Stream) -> None:
        """The next result arrives."""
        result = stream.results.popleft()
        member = self.members.get(stream)
        if member is None:
            return
        self.clock.advance(0.001)
        try:
            self.cell.read(member, [dispatch.outcome_from_proto(result)])
        except WorkerProtocolError:
            self.lose(stream)

    def lose(self, stream: Stream) -> None:
        """The stream broke, as far as this end knows."""
        member = self.members.pop(stream, None)
        if member is not None:
            self.leads = {name: held for name, held in self.leads.items() if held is not stream}
            self.cell.detach(member, Loss.CRASH)


class SessionStream:
    """A session between a router and a scheduler: messages one way, frames the other."""

    _num_made = 0

    def __init__(self, router: "Router", scheduler: Scheduler) -> None:
        SessionStream._num_made += 1
        self.id = SessionStream._num_made
        self.router = router
        self.scheduler = scheduler
        self.outbox = Outbox(lambda: None)
        self.frames: deque[bytes] = deque()
        scheduler.cell.open_session(self.id, self.outbox)
        scheduler.sessions.append(self)
        nothing = cast(Any, None)  # no call: this file moves the messages
        self.end = Session(
            nothing, nothing, scheduler.name, scheduler.name, SERVED, router.on_refused
        )

    def take_in(self) -> None:
        """The router's next message arrives at the scheduler."""
        if not self.end._outbox or self not in self.scheduler.sessions:
            return
        message = scheduler_pb2.SchedulerSessionRequest.FromString(
            self.end._outbox.popleft().SerializeToString()
        )
        cell = self.scheduler.cell
        if message.WhichOneof("message") == "submit":
            cell.submit(self.id, frames.submission_from_proto(message.submit, SPEC))
        else:
            cancel = message.cancel
            index = cancel.sequence_index if cancel.HasField("sequence_index") else None
            reason = frames.cancel_reason_from_proto(cancel.reason)
            cell.cancel(self.id, cancel.handle, index, reason)

    def flush(self) -> None:
        """What the session is owed goes onto the wire."""
        if self in self.scheduler.sessions:
            frame = frames.frame_to_proto(self.outbox.take(), NO_LOAD)
            self.frames.append(frame.SerializeToString())

    def deliver(self) -> None:
        """The next frame arrives at the router; one out of order ends the session."""
        if not self.frames:
            return
        message = self.frames.popleft()
        try:
            self.end._receive(scheduler_pb2.SchedulerSessionResponse.FromString(message))
        except FailedPreconditionError:
            self.router.lose(self.scheduler)

    def close_at_scheduler(self) -> None:
        """The scheduler hears that the session is over."""
        if self in self.scheduler.sessions:
            self.scheduler.sessions.remove(self)
            self.scheduler.cell.close_session(self.id)


class Router:
    """Its sessions, by scheduler, and flights that have none."""

    def __init__(self) -> None:
        self.sessions: dict[Scheduler, SessionStream] = {}
        self.homeless: list[Flight] = []
        self.flights: list[Flight] = []

    def session_to(self, scheduler: Scheduler) -> SessionStream:
        if scheduler not in self.sessions:
            self.sessions[scheduler] = SessionStream(self, scheduler)
        return self.sessions[scheduler]

    def on_refused(self, session: Session, flight: Flight, error: OctavoError) -> None:
        del session, error
        flight.carrier = None
        self.homeless.append(flight)

    def place(self, flight: Flight, scheduler: Scheduler) -> None:
        self.session_to(scheduler).end.submit(flight)

    def lose(self, scheduler: Scheduler) -> None:
        """The session broke, as far as this end knows: nothing more of it is read."""
        stream = self.sessions.pop(scheduler, None)
        if stream is None:
            return
        for flight in stream.end.flights.values():
            flight.carrier = None
            if not flight.is_over:
                flight.lost_cell = scheduler.name
                self.homeless.append(flight)
        stream.end.flights.clear()
