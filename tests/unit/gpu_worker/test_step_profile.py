"""A profile's lanes tell each step's way from its plan to its leader."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from octavo.errors import ConfigurationError
from octavo.metrics import WorkerMetrics
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.engine import Engine
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from octavo_worker.step_profile import StepProfile, write_profile
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

LIMITS = RowLimits(4, 32, 16, MAX_MODEL_LEN, VOCAB_SIZE)


def profile_of_six_steps() -> StepProfile:
    """A prompt of four and six tokens: a plan's step, five repeats."""
    runner = Runner(
        TinyPagedModel(), CpuBackend(), make_kv_caches(32, 16), LIMITS, torch.device("cpu")
    )
    runner.profile = profile = StepProfile()
    reasons: list[str] = []
    engine = Engine(
        runner,
        max_in_flight=1,
        max_num_batched_tokens=64,
        num_blocks=32,
        metrics=WorkerMetrics(CollectorRegistry()),
        on_fatal=reasons.append,
    )
    engine.attach(lambda _: None)
    add = RowAdd(0, 1, Sampling(), 0, np.arange(1, 3), 0, 10)
    chunk = Chunk(0, 0, np.array([5, 17, 3, 88], np.int64), is_last=True)
    engine.submit(Plan(1, decode_until=50, added_rows=(add,), chunks=(chunk,)))
    engine.start()
    while not engine.is_idle:
        time.sleep(0.001)
    engine.close()
    assert reasons == []
    return profile


def test_each_step_passes_through_the_lanes_in_order() -> None:
    lanes = {lane.name: lane.spans for lane in profile_of_six_steps().lanes()}
    assert list(lanes) == ["plan waits", "launch", "device", "read", "emit"]
    names = ["plan 1: 4+0 tokens", *(f"repeat {step}: 0+1 tokens" for step in range(2, 7))]
    assert [span.name for span in lanes["plan waits"]] == names[:1]
    for name in ("launch", "device", "read", "emit"):
        assert [span.name for span in lanes[name]] == names
    assert lanes["plan waits"][0].end_ns == lanes["launch"][0].begin_ns
    for step in range(6):
        launch, device, read, emit = (
            lanes[name][step] for name in ("launch", "device", "read", "emit")
        )
        times = (*launch[1:], *device[1:], *read[1:], *emit[1:])
        assert launch == device, "a step on a CPU is over when it is launched"
        assert list(times[2:]) == sorted(times[2:])
    ends = [span.end_ns for span in lanes["launch"]]
    begins = [span.begin_ns for span in lanes["launch"]]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def test_the_trace_names_its_worker(tmp_path: Path) -> None:
    profile = profile_of_six_steps()
    write_profile(str(tmp_path / "trace.json"), "worker-7", profile)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["worker-7", "plan waits", "launch", "device", "read", "emit"]
    assert len([event for event in events if event["ph"] == "X"]) == 1 + 4 * 6
    profile.clear()
    assert all(not lane.spans for lane in profile.lanes())
    with pytest.raises(ConfigurationError, match="OCTAVO_PROFILE="):
        write_profile(str(tmp_path / "no folder" / "trace.json"), "worker-7", profile)
