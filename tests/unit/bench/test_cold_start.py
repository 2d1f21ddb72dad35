"""tests.bench.cold_start: its checkpoints load, and its parts are what services log."""

import json
from pathlib import Path

import pytest
import torch

from octavo_worker.models import load_model
from tests.bench.cold_start import Start
from tests.bench.random_checkpoint import read_once, write_checkpoint

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


def test_a_random_checkpoint_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    num_bytes = write_checkpoint(folder, "tiny", SHAPE, shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    read_once(folder)
    fractions: list[float] = []
    model = load_model(folder, device="cpu", progress=fractions.append)
    assert fractions[-1] == 1.0
    values = {name: slot.target for name, slot in model.slots().items()}
    assert num_bytes == 2 * sum(value.numel() for value in values.values())
    assert all(torch.isfinite(value).all() for value in values.values())
    # Whole already: left as it is.
    assert write_checkpoint(folder, "tiny", SHAPE) == num_bytes


def record(service: str, message: str) -> str:
    return json.dumps({"service": service, "message": message}) + "\n"


def test_parts_are_read_off_the_log() -> None:
    start = Start()
    lines = [
        record("octavo", "starting"),
        record("worker", "loading /models/8b on cuda:0"),
        record("worker", "loading weights: 25 %"),
        record("worker", "weights: 16.06 GB of 291 tensors in 3.0 s, 5.4 GB/s (threads: 8)"),
        "no record\n",
        record("router", "ready: router http on 127.0.0.1:8000 grpc on 127.0.0.1:9000"),
        record("worker", "ready: worker on 127.0.0.1:8200"),
    ]
    assert not any(start.note(line, float(at)) for at, line in enumerate(lines))
    assert start.note("Octavo serves tiny: press Ctrl-C to stop\n", 9.5)
    assert start.marks == {
        "worker: imports, device": 1.0,
        "worker: weights": 3.0,
        "router listens": 5.0,
        "worker ready": 6.0,
    }
    assert start.ready_s == 9.5
    assert "16.06 GB" in start.table()
