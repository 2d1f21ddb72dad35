"""A real engine under a random load for minutes: no NaN, no leak, blocks whole after every step.

On a card each configuration runs for OCTAVO_RANDOM_LIVES_S seconds (240), on a CPU it is two lives.
A failure names the seed of its life; the lives before it fill the prefix cache.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.settings import WorkerSettings
from tests.e2e.engine_link import EngineDevice
from tests.e2e.random_life import RandomLife, Totals
from tests.tiny_models import save_tiny_model

SECONDS = float(os.environ.get("OCTAVO_RANDOM_LIVES_S", "240"))
# Few rows and blocks: what a large card meets in hours happens all the time.
SMALL: dict[str, Any] = {"max_num_seqs": 12, "num_kv_blocks": 64, "max_num_batched_tokens": 256}
# Name: family, its configuration, the worker's settings.
ON_CARD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("llama", {}, {"dtype": "float32"}),
    "bfloat16, blocks of 32": (
        "qwen3",
        {},
        {"dtype": "bfloat16", "block_size": 32, "num_kv_blocks": 40, "max_num_seqs": 24},
    ),
    "fp8 keys and values": ("llama", {}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "windows and caps": ("gemma2", {}, {"dtype": "bfloat16"}),
    "experts": ("qwen3_moe", {}, {"dtype": "bfloat16"}),
}
# Bytes that tables of rows with rules may grow by as such rows come.
LATE_BYTES = 4 << 20


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("name", ON_CARD)
def test_minutes_on_a_card(name: str, tmp_path: Path) -> None:
    family, config, settings = ON_CARD[name]
    save_tiny_model(tmp_path / "model", family, head_dim=64, **config)
    # Steps so wide that most of warming up fits in.
    settings = {"backend": "cuda", "max_num_batched_tokens": 700, **settings}
    device = load_device(tmp_path / "model", **settings)
    ends = time.monotonic() + SECONDS
    live_long(device, lambda _: time.monotonic() < ends, is_exact=name == "float32")


def test_two_lives_on_a_cpu(tiny_folder: Path) -> None:
    device = load_device(tiny_folder, backend="cpu", num_kv_blocks=32)
    live_long(device, lambda seed: seed < 2, is_exact=True, num_requests=14)


def load_device(folder: Path, **settings: Any) -> EngineDevice:
    return EngineDevice(WorkerSettings(**{"model": str(folder), **SMALL, **settings}))


def live_long(
    device: EngineDevice,
    goes_on: Callable[[int], bool],
    *,
    is_exact: bool,
    num_requests: int = 80,
) -> None:
    """Lives, one after the other; `is_exact`: answers don't depend on what else runs."""
    totals, seed = Totals(), 0
    num_replayed = num_differing = 0
    early_bytes = 0
    while goes_on(seed):
        life = RandomLife(seed, device, num_requests)
        try:
            life.run(totals)
            if is_exact:
                num, num_otherwise = life.replay(4)
                num_replayed += num
                num_differing += num_otherwise
        except BaseException as error:
            error.add_note(f"in the life of seed {seed}, after {totals}")
            raise
        seed += 1
        if seed == 10:
            early_bytes = device_bytes()
    print(f"{seed} lives: {totals}; replayed {num_replayed}, {num_differing} otherwise")
    print(
        f"longest launch of a step: {device.worst_launch_ms:.1f} ms; "
        f"{device.num_late_compiles} kernels compiled late"
    )
    # Nearly equal logits may be drawn from otherwise in another batch: once in many answers.
    assert num_differing <= num_replayed // 40
    assert totals.preemptions > 0
    assert totals.cached_tokens > 0
    assert {"stop", "length", "cancelled"} <= set(totals.finished)
    if seed > 10:
        assert device_bytes() <= early_bytes + LATE_BYTES


def device_bytes() -> int:
    """Bytes in tensors on the card."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
