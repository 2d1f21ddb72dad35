"""A real engine as the device of a `SimulatedCell`: scheduler and worker without their processes.

Plans and results pass through the real messages, and as many steps are in flight as in a worker.
The cache is poisoned: a slot holds NaN until its row stores something there, so that a row which
reads a slot that nobody wrote fails.

Entry points: `EngineDevice`, `EngineLink`.
"""

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from octavo.metrics import WorkerMetrics
from octavo.settings import WorkerSettings
from octavo.v1 import worker_pb2
from octavo_worker.loading import load
from octavo_worker.plan import Plan
from octavo_worker.wire import plan_from_proto, results_to_proto
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import MemoryLink

# e4m3 has one pattern for NaN, sign aside; torch fills no tensor of it.
_E4M3_NAN = 0x7F


class EngineDevice:
    """A loaded worker without its thread: who has it runs its steps. See `FakeDevice`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._registry = CollectorRegistry()
        loaded = load(settings, WorkerMetrics(self._registry), _raise)
        spec, capacity = loaded.spec, loaded.capacity
        self.runner = loaded.engine.runner
        self.max_in_flight = loaded.engine.max_in_flight
        self.size = FakeSize(
            num_blocks=capacity.num_blocks,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            block_size=spec.block_size,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
        )
        self.violations: list[str] = []
        self.worst_launch_ms = 0.0
        self.poison(np.arange(self.size.num_blocks))

    @property
    def sealed(self) -> dict[int, bytes]:
        """Block id -> hash, least recently used first."""
        return dict(self.runner.sealed.inventory())

    @property
    def can_repeat(self) -> bool:
        return self.runner.can_repeat

    @property
    def num_late_compiles(self) -> int:
        """Kernels that compiled since the model was loaded; their names are in the log."""
        return int(self._registry.get_sample_value("octavo_late_compile_seconds_count") or 0)

    def reset(self) -> None:
        """A new epoch: rows go, sealed blocks stay; all others are poisoned again."""
        while self.runner.poll() is not None:
            pass
        self.runner.reset()
        is_unused = np.ones(self.size.num_blocks, np.bool_)
        is_unused[list(self.sealed)] = False
        self.poison(np.flatnonzero(is_unused))

    def forget(self) -> None:
        """Unseal everything: nothing that was computed is found again."""
        self.runner.sealed.drop(np.arange(self.size.num_blocks))

    def launch(self, message: worker_pb2.Plan | None) -> None:
        """Run the plan's step, or repeat."""
        plan = None if message is None else plan_from_proto(message)
        if plan is not None:
            self.poison(_fresh_blocks(plan, self.size.block_size))
        self.runner.submit(plan)

    def read(self) -> worker_pb2.StepResult:
        """The oldest step's result."""
        outcome = self.runner.poll()
        assert outcome is not None
        self.worst_launch_ms = max(self.worst_launch_ms, outcome.launch_us / 1e3)
        for fault in outcome.faults:
            self.violations.append(f"step {outcome.step}, row {fault.row}: {fault.message}")
        values = [item.logprob for item in outcome.logprobs]
        values += [value for piece in outcome.prompt_logprobs for value in piece.logprobs]
        if not np.isfinite(values).all():
            self.violations.append(f"step {outcome.step}: log-probabilities {values}")
        return results_to_proto([outcome]).results.results[0]

    @torch.inference_mode()
    def poison(self, blocks: np.ndarray) -> None:
        """NaN into every slot of these blocks, behind the steps that were launched."""
        if not blocks.size:
            return
        for pair in self.runner._kv_caches:
            for cache in pair:
                index = torch.from_numpy(blocks).to(cache.device)
                if cache.dtype.itemsize == 1:
                    cache.view(torch.uint8)[index] = _E4M3_NAN
                else:
                    cache[index] = torch.nan


class EngineLink(MemoryLink):
    """Steps of an `EngineDevice`, several in flight."""

    device: EngineDevice  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, device: EngineDevice, delay: int) -> None:
        super().__init__(device)
        self.delay = delay

    def send(self, plan: object) -> None:
        super().send(plan)
        self.sent.clear()  # tests that look at plans are short; these aren't

    @property
    def has_results(self) -> bool:
        return super().has_results or self.device.runner.num_in_flight > 0

    def step(self) -> list[worker_pb2.StepResult]:
        """Launch a step, if there is one; read one if that many are in flight, or none came."""
        device, is_launch = self.device, self.has_step
        if is_launch:
            device.launch(self.plans.popleft() if self.plans else None)
        if device.runner.num_in_flight >= (device.max_in_flight if is_launch else 1):
            result = device.read()
            result.step_us = 1000  # what is planned must not depend on the machine
            self._results.append(result)
        arrived: list[worker_pb2.StepResult] = []
        while self._results and (len(self._results) > self.delay or not is_launch):
            arrived.append(self._results.popleft())
        return arrived


def _fresh_blocks(plan: Plan, block_size: int) -> np.ndarray:
    """The blocks in which a plan's rows have computed nothing."""
    found = [plan.block_updates[:, 2]]
    for add in plan.added_rows:
        assert add.num_computed_tokens % block_size == 0
        found.append(add.block_ids[add.num_computed_tokens // block_size :])
    return np.concatenate(found)


def _raise(reason: str) -> None:
    raise AssertionError(reason)
