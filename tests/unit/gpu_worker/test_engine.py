"""The engine's thread: order, repeats, resets, and what ends it for good."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from octavo.errors import FailedPreconditionError
from octavo.metrics import WorkerMetrics
from octavo_worker.attention_inputs import StepInputs
from octavo_worker.backends.base import Backend
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.engine import Engine
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import KVCaches, Runner
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

torch.set_num_threads(1)
PROMPT = [5, 17, 3, 88]
WAIT_S = 20.0


class GatedModel(TinyPagedModel):
    """Stops before its second pass until told to go on; fails at pass `fails_at`."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.is_waiting = threading.Event()
        self.go_on = threading.Event()

    def forward(self, inputs: StepInputs, kv_caches: KVCaches, backend: Backend) -> torch.Tensor:
        if self.num_forwards + 1 == self.fails_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.num_forwards == 1:
            self.is_waiting.set()
            assert self.go_on.wait(WAIT_S)
        return super().forward(inputs, kv_caches, backend)


class Bench:
    """An engine and what came out of it."""

    def __init__(self, model: TinyPagedModel, max_in_flight: int = 1) -> None:
        self.outcomes: list[StepOutcome] = []
        self.fatal: Future[str] = Future()
        self.registry = CollectorRegistry()
        limits = RowLimits(4, 32, 16, MAX_MODEL_LEN, VOCAB_SIZE)
        caches = make_kv_caches(32, 16)
        self.engine = Engine(
            Runner(model, CpuBackend(), caches, limits, torch.device("cpu")),
            max_in_flight=max_in_flight,
            max_num_batched_tokens=64,
            num_blocks=32,
            metrics=WorkerMetrics(self.registry),
            on_fatal=self.fatal.set_result,
        )
        self.arrived = threading.Condition()
        self.engine.attach(self.take)
        self.engine.start()

    def take(self, outcome: StepOutcome) -> None:
        with self.arrived:
            self.outcomes.append(outcome)
            self.arrived.notify()

    def wait(self, num_outcomes: int) -> list[tuple[int, int, int]]:
        """(step, plan, repeat) of that many outcomes."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.outcomes) >= num_outcomes, WAIT_S)
            return [(o.step, o.plan_id, o.repeat) for o in self.outcomes]

    def tokens(self, row: int) -> list[int]:
        return [
            int(token)
            for outcome in self.outcomes
            for entry, token in zip(outcome.rows, outcome.token_ids, strict=True)
            if entry == row
        ]


def plan(plan_id: int = 1, row: int = 0, num_tokens: int = 6, decode_until: int = 0) -> Plan:
    blocks = np.arange(1 + 2 * row, 3 + 2 * row)
    add = RowAdd(row, 1, Sampling(), 0, blocks, 0, len(PROMPT) + num_tokens)
    chunk = Chunk(row, 0, np.array(PROMPT, np.int64), is_last=True)
    return Plan(plan_id, decode_until, added_rows=(add,), chunks=(chunk,))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_queued_plan_comes_before_the_next_repeat(max_in_flight: int) -> None:
    model = GatedModel()
    bench = Bench(model, max_in_flight)
    bench.engine.submit(plan(1, decode_until=4))
    assert model.is_waiting.wait(WAIT_S)
    # The repeat of plan 1 is running; plans 2 and 3 come meanwhile.
    bench.engine.submit(plan(2, row=1, decode_until=4))
    bench.engine.submit(Plan(3, decode_until=6))
    assert bench.engine.progress().num_queued_plans == 2
    model.go_on.set()
    expected = [(1, 1, 0), (2, 1, 1), (3, 2, 0), (4, 3, 0), (5, 3, 1), (6, 3, 2)]
    assert bench.wait(6) == expected
    bench.engine.close()
    assert bench.tokens(0) == model.greedy(PROMPT, 6)
    assert bench.tokens(1) == model.greedy(PROMPT, 4)
    assert bench.engine.progress() == (6, 0)
    # Steps that could still run at each launch: 3 and 2 under plan 1, then until step 6.
    assert bench.registry.get_sample_value("octavo_plan_lead_steps_sum") == 3 + 2 + 3 + 2 + 1 + 0
    assert bench.registry.get_sample_value("octavo_plan_lead_steps_bucket", {"le": "0.0"}) == 1
    assert bench.registry.get_sample_value("octavo_step_launch_seconds_count") == 6


def test_steps_in_flight_change_no_token() -> None:
    model = TinyPagedModel()
    bench = Bench(model, max_in_flight=2)
    bench.engine.submit(plan(1, num_tokens=9, decode_until=100))
    bench.engine.submit(plan(2, row=1, num_tokens=20, decode_until=100))
    bench.wait(21)
    bench.engine.close()
    assert bench.tokens(0) == model.greedy(PROMPT, 9)
    assert bench.tokens(1) == model.greedy(PROMPT, 20)
    assert bench.engine.is_idle


def test_plans_must_count_up() -> None:
    bench = Bench(TinyPagedModel())
    bench.engine.submit(Plan(1))
    with pytest.raises(FailedPreconditionError, match="plan_id is 3, expected 2"):
        bench.engine.submit(Plan(3))
    bench.engine.submit(Plan(2))
    assert bench.wait(2) == [(1, 1, 0), (2, 2, 0)]
    bench.engine.close()


def test_a_broken_leaders_plans_are_dropped_and_its_rows_freed() -> None:
    model = GatedModel()
    bench = Bench(model)
    bench.engine.submit(plan(1, decode_until=50))
    bench.wait(1)
    assert model.is_waiting.wait(WAIT_S)
    bench.engine.submit(Plan(2, sealed=((1, b"x" * 16),)))
    bench.engine.detach(drop_plans=True)
    reset = bench.engine.reset()
    assert not reset.done()
    model.go_on.set()
    # The running step ends, the queued plan never runs, nothing is repeated.
    assert reset.result(WAIT_S) == []
    assert (len(bench.outcomes), model.num_forwards) == (1, 2)
    assert bench.engine.is_idle
    bench.engine.attach(bench.take)
    bench.engine.submit(plan(1, num_tokens=3, decode_until=50))
    assert bench.wait(4)[1:] == [(1, 1, 0), (2, 1, 1), (3, 1, 2)]
    bench.engine.close()


def test_a_releasing_leaders_plans_still_run() -> None:
    model = GatedModel()
    bench = Bench(model)
    bench.engine.submit(plan(1, decode_until=50))
    assert model.is_waiting.wait(WAIT_S)
    bench.engine.submit(Plan(2, decode_until=50, sealed=((1, b"x" * 16),)))
    bench.engine.detach(drop_plans=False)
    reset = bench.engine.reset()
    model.go_on.set()
    # The sealed block is being written to by the row's decode: no hash survives that.
    assert reset.result(WAIT_S) == []
    assert model.num_forwards == 3
    bench.engine.close()


def test_who_asked_for_a_reset_may_go_away() -> None:
    model = GatedModel()
    bench = Bench(model)
    bench.engine.submit(plan(1, decode_until=50))
    assert model.is_waiting.wait(WAIT_S)
    bench.engine.detach(drop_plans=True)
    gone, next_one = bench.engine.reset(), bench.engine.reset()
    gone.cancel()  # what asyncio does to it when the call that waits is cancelled
    model.go_on.set()
    assert next_one.result(WAIT_S) == []
    bench.engine.attach(bench.take)
    bench.engine.submit(plan(1, num_tokens=3))
    assert bench.wait(2)[1:] == [(1, 1, 0)]
    assert not bench.fatal.done()
    bench.engine.close()


def test_an_error_outside_any_row_is_fatal() -> None:
    bench = Bench(GatedModel(fails_at=1))
    bench.engine.submit(plan(1))
    reason = bench.fatal.result(WAIT_S)
    assert reason == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert bench.outcomes == []
    bench.engine.close()


def test_what_was_counted() -> None:
    bench = Bench(TinyPagedModel())
    bench.engine.submit(plan(1, decode_until=50))
    bench.wait(6)
    bench.engine.close()
    sample = bench.registry.get_sample_value
    assert sample("octavo_worker_steps_total") == 6
    assert sample("octavo_worker_tokens_total", {"kind": "prefill"}) == 4
    assert sample("octavo_worker_tokens_total", {"kind": "decode"}) == 5
    assert sample("octavo_plan_wait_seconds_count") == 1
    assert sample("octavo_plan_launch_seconds_count") == 1
    assert sample("octavo_worker_rows") == 0
    assert sample("octavo_step_tokens_sum") == 9
    for name in ("step_seconds", "step_gap_seconds", "step_tokens"):
        assert sample(f"octavo_{name}_count") == 6
