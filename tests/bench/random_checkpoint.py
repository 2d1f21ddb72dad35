"""A checkpoint of a benchmark's shape with random values: sharded safetensors, as published ones.

Values are drawn on the card if there is one, and shards are written side by side: 16 GB take
seconds. Must not know: servers. Entry points: `write_checkpoint`, `read_once`.
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.cli.model_shapes import ensure_shape_folder
from octavo_worker.models import ModelConfig, meta_model
from octavo_worker.slots import Place

SHARD_BYTES = 2 << 30
_THREADS = 8
_READ_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"


def write_checkpoint(
    folder: Path, name: str, shape: dict[str, Any], *, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write config, tokenizer and bfloat16 weights of shape `name`; bytes of weights.

    A folder that was written to its end is left as it is.
    """
    index = folder / _INDEX
    if index.exists():
        return json.loads(index.read_text())["metadata"]["total_size"]
    folder.mkdir(parents=True, exist_ok=True)
    for file in ensure_shape_folder(name, shape).iterdir():
        shutil.copy(file, folder)
    config = ModelConfig.from_folder(folder, dtype=torch.bfloat16, max_model_len=0)
    assert config.quantization is None, "stored codes aren't drawn"
    slots = config.layout.stored(meta_model(config, is_packed=False).slots(), config.heads)
    shards = list(_shards(slots, shard_bytes))
    files = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]

    def write(number: int) -> None:
        tensors = {slot: _values(slots[slot].shape) for slot in shards[number]}
        save_file(tensors, folder / files[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(write, range(len(shards))))
    total = sum(_num_bytes(place) for place in slots.values())
    weight_map = {slot: file for shard, file in zip(shards, files, strict=True) for slot in shard}
    # Last: with it the folder is whole.
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


def read_once(folder: Path) -> None:
    """Read all weights, so that the next reader finds them in the page cache."""

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(read, folder.glob("*.safetensors")))


def _shards(slots: dict[str, Place], shard_bytes: int) -> Iterator[list[str]]:
    """Names in their order, cut where a shard is full."""
    shard: list[str] = []
    size = 0
    for name, place in slots.items():
        if shard and size + _num_bytes(place) > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += _num_bytes(place)
    yield shard


def _num_bytes(place: Place) -> int:
    return 2 * torch.Size(place.shape).numel()


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    """Weights of norms are 1, others small; bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return (values.fill_(1.0) if len(shape) == 1 else values.normal_(0.0, 0.02)).cpu()
