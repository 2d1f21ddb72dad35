"""A scheduler's cell with fake devices in this process and a clock that tests move.

Plans and results pass through the real message conversion, but no gRPC and no task: `step`
runs one step of every device and hands the results to the cell. Entry point: `SimulatedCell`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry

from octavo.blocks import BlockHashRoot, chain
from octavo.capacity import Capacity
from octavo.metrics import SchedulerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2, worker_pb2
from octavo_scheduler import dispatch
from octavo_scheduler.core import Cell
from octavo_scheduler.members import Member, state_of
from octavo_scheduler.outbox import FinishedNote, Frame, Outbox, RejectedNote, StartedNote
from octavo_scheduler.plan import Plan
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sampling import needs_history
from octavo_scheduler.sequence import Resume, Submission
from octavo_scheduler.sequence_trace import SubmissionTrace
from tests.fakes.fake_device import FakeDevice, FakeSize

SESSION = 1


class ManualClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class MemoryLink:
    """A device behind a queue of plans; `is_frozen` stops it without breaking anything."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.plans: deque[worker_pb2.Plan] = deque()
        self.sent: list[Plan] = []
        self.is_frozen = False
        # Results wait this many steps before they reach the scheduler.
        self.delay = 0
        self._results: deque[worker_pb2.StepResult] = deque()

    def send(self, plan: Plan) -> None:
        self.sent.append(plan)
        message = dispatch.plan_to_proto(plan)
        self.plans.append(worker_pb2.Plan.FromString(message.SerializeToString()))

    @property
    def has_step(self) -> bool:
        return not self.is_frozen and (bool(self.plans) or self.device.can_repeat)

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def step(self) -> list[worker_pb2.StepResult]:
        """Run one step, if there is one; the results that arrive now."""
        ran = self.has_step
        if ran:
            plan = self.plans.popleft() if self.plans else None
            result = self.device.step(plan)
            result.step_us = 1000
            self._results.append(result)
        arrived: list[worker_pb2.StepResult] = []
        while self._results and (len(self._results) > self.delay or not ran):
            arrived.append(self._results.popleft())
        return arrived


@dataclass
class Answer:
    """What a session received for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    started: StartedNote | None = None
    finished: FinishedNote | None = None


class SimulatedCell:
    """A cell of `num_workers` fake devices and one session."""

    def __init__(
        self,
        size: FakeSize | None = None,
        *,
        num_workers: int = 1,
        settings: SchedulerSettings | None = None,
    ) -> None:
        self.size = size or FakeSize()
        self.clock = ManualClock()
        self.metrics = SchedulerMetrics(CollectorRegistry())
        settings = settings or SchedulerSettings(check_integrity=True)
        self.cell = Cell(settings, self.metrics, self.clock)
        self.spec = ModelSpec(
            name="fake",
            revision="r1",
            block_size=self.size.block_size,
            kv_scheme="fake",
            hash_version=1,
            max_model_len=self.size.max_model_len,
            vocab_size=self.size.vocab_size,
            eos_token_ids=(2,),
        )
        self.root = BlockHashRoot("fake", "r1", self.size.block_size, "fake").digest()
        self.outbox = Outbox(lambda: None)
        self.cell.open_session(SESSION, self.outbox)
        self.answers: dict[tuple[int, int], Answer] = {}
        self.rejected: dict[int, RejectedNote] = {}
        # Handle -> workers that died on it, as last told.
        self.suspects: dict[int, int] = {}
        # By handle: (position, log-probability) of the prompt tokens, as they came.
        self.prompts: dict[int, list[tuple[int, float]]] = {}
        self.members: list[Member] = []
        self.links: dict[Member, MemoryLink] = {}
        self.num_steps = 0
        self._next_handle = 1
        for _ in range(num_workers):
            self.attach(FakeDevice(self.size))

    # ---- workers

    def attach(self, device: FakeDevice, link: MemoryLink | None = None) -> Member:
        """A device joins, with what it has sealed."""
        device.reset()
        link = link or MemoryLink(device)
        size = device.size
        capacity = Capacity(size.num_blocks, size.max_num_seqs, size.max_num_batched_tokens)
        name = f"w{len(self.members)}"
        state = state_of(name, self.spec, capacity, self.cell.settings)
        state.restore(list(device.sealed), list(device.sealed.values()))
        member = self.cell.attach(state, self.spec, link)
        self.members.append(member)
        self.links[member] = link
        return member

    def kill(self, member: Member, loss: Loss = Loss.CRASH) -> FakeDevice:
        """The worker's stream breaks now; results that wait are lost."""
        self.cell.detach(member, loss)
        return self.links.pop(member).device

    # ---- requests

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        num_sequences: int = 1,
        seed: int | None = None,
        ending_ids: Sequence[int] = (),
        min_tokens: int = 0,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
        presence_penalty: float = 0.0,
        priority: int = 0,
        tenant: str = "",
        deadline_ms: int | None = None,
        resumes: Sequence[Resume] = (),
        trace: SubmissionTrace | None = None,
        sampling: common_pb2.SamplingParams | None = None,
    ) -> int:
        """Submit and return the handle; `seed` None is greedy, `sampling` outranks it."""
        handle = self._next_handle
        self._next_handle += 1
        ids = np.array(prompt, np.uint32)
        sampling = sampling or sampling_of(seed, ending_ids, logprobs)
        if prompt_logprobs:
            sampling.prompt_logprobs = 0
        if presence_penalty:
            sampling.presence_penalty = presence_penalty
        submission = Submission(
            handle=handle,
            request_id=f"r{handle}",
            prompt_token_ids=ids.tobytes(),
            root_hash=self.root,
            block_hashes=tuple(chain(self.root, ids, self.size.block_size)),
            sampling=sampling.SerializeToString(),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ending_ids=frozenset(ending_ids),
            num_sequences=num_sequences,
            deadline_ms=deadline_ms,
            priority=priority,
            tenant=tenant,
            resumes=tuple(resumes),
            needs_history=needs_history(sampling),
            wants_prompt_logprobs=prompt_logprobs,
            trace=trace,
        )
        self.cell.submit(SESSION, submission)
        return handle

    def answer(self, handle: int, index: int = 0) -> Answer:
        return self.answers.setdefault((handle, index), Answer())

    # ---- running

    def step(self) -> None:
        """Plan, run one step of every device, read what arrives."""
        self.num_steps += 1
        self.cell.expire()
        self.cell.pump()
        for member, link in list(self.links.items()):
            arrived = link.step()
            self.clock.advance(0.001)
            if arrived and member in self.cell.members:
                self.cell.read(member, map(dispatch.outcome_from_proto, arrived))
            assert not link.device.violations, link.device.violations
        self.receive()

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is queued, running or under way."""
        for _ in range(max_steps):
            self.step()
            if self.is_idle:
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    @property
    def is_idle(self) -> bool:
        busy = any(link.has_step or link.has_results for link in self.links.values())
        return not busy and not self.cell.requests

    def receive(self) -> None:
        """Take the session's frame and file it under its sequences."""
        frame: Frame = self.outbox.take()
        for started in frame.started:
            answer = self.answer(started.handle, started.sequence_index)
            assert answer.started is None, "started twice"
            answer.started = started
        for note in frame.prompt_logprobs:
            assert not self.answer(note.handle).token_ids, "a prompt reported after a token"
            values = [(note.start + i, entry.logprob) for i, entry in enumerate(note.entries)]
            self.prompts.setdefault(note.handle, []).extend(values)
        if frame.tokens is not None:
            start = 0
            columns = (frame.tokens.handles, frame.tokens.indexes, frame.tokens.counts)
            for handle, index, count in zip(*(column.tolist() for column in columns), strict=True):
                answer = self.answer(handle, index)
                assert answer.finished is None, "a token after the end"
                answer.token_ids += frame.tokens.token_ids[start : start + count].tolist()
                for i in range(start, start + count):
                    if i in frame.tokens.logprobs:
                        answer.logprobs.append(frame.tokens.logprobs[i].logprob)
                start += count
        for finished in frame.finished:
            answer = self.answer(finished.handle, finished.sequence_index)
            assert answer.finished is None, "finished twice"
            answer.finished = finished
        for rejected in frame.rejected:
            self.rejected[rejected.handle] = rejected
        self.suspects.update((note.handle, note.num_suspicions) for note in frame.suspects)

    def assert_all_free(self) -> None:
        """No request, row or block is held, and no plan is owed."""
        cell = self.cell
        assert not cell.requests
        assert (cell.members.num_running, cell.num_waiting, cell.queue.num_tokens) == (0, 0, 0)
        assert cell.members.num_used_blocks == 0
        assert cell.backlog_tokens() == 0
        for member in cell.members:
            member.state.check_integrity()
            assert not member.state.leaving
            assert not member.state.computing
            assert not member.state.owes_steps

    def counter(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"octavo_{name}" and labels.items() <= sample.labels.items()
        )


def sampling_of(
    seed: int | None, ending_ids: Sequence[int] = (), logprobs: bool = False
) -> common_pb2.SamplingParams:
    """Greedy without a seed, else temperature 1."""
    sampling = common_pb2.SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        top_p=1.0,
        seed=seed or 0,
        stop_token_ids=np.array(ending_ids, "<u4").tobytes(),
    )
    if logprobs:
        sampling.logprobs = 0
    return sampling


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A reproducible prompt."""
    return np.random.default_rng(seed).integers(10, 30_000, length).tolist()
