"""The KV cache: how many blocks fit, said line by line, and their tensors.

Must not know: rows, plans. Entry points: `card_room`, `size_kv_cache`, `allocate_kv_caches`.

N blocks, K kv heads, B block size, D head dim.
"""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from octavo.errors import ConfigurationError
from octavo.settings import WorkerSettings
from octavo_worker.graph_shapes import MOST_CHUNKS, batch_sizes, max_graph_tokens, mixed_shapes
from octavo_worker.spec import kv_scheme_of

_logger = logging.getLogger(__name__)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)
# What a card keeps of a captured step of some hundred kernels, generously.
_GRAPH_BYTES = 8 << 20
# A laptop has other things to do with its memory.
_CPU_SHARE, _CPU_MOST_BYTES = 0.25, 4 << 30


class KVShape(Protocol):
    """What the size depends on; `models.ModelConfig` has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """`num_blocks` counts the null block."""

    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token


class CardRoom(NamedTuple):
    """A card's memory in bytes: all of it, what is used, what the worker may use of it in all, and
    what its steps need beside weights and cache."""

    total: int
    used: int
    usable: int
    scratch: int

    @property
    def left(self) -> int:
        """For the cache."""
        return max(self.usable - self.used - self.scratch, 0)


def parse_bytes(text: str, name: str) -> int:
    """ "4GiB", "512 MB", "1.5g", "1000000". Raises ConfigurationError naming the setting."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"OCTAVO_{name.upper()}={text!r} is no size; write e.g. 4GiB", param=name
        )
    unit = match[2].lower()
    factor = _BINARY_UNITS[unit] if unit.endswith("i") and unit != "i" else _UNITS.get(unit)
    if factor is None:
        raise ConfigurationError(f"OCTAVO_{name.upper()}={text!r}: unknown unit", param=name)
    return int(float(match[1]) * factor)


def kv_dtype_of(shape: KVShape, settings: WorkerSettings) -> torch.dtype:
    """What the cache holds: values of the model's dtype, or 8-bit floats."""
    return torch.float8_e4m3fn if settings.kv_cache_dtype == "fp8" else shape.dtype


def kv_bytes_per_token(shape: KVShape, dtype: torch.dtype | None = None) -> int:
    """Keys and values of one token in all layers, of `dtype` (default: the model's)."""
    itemsize = (dtype or shape.dtype).itemsize
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize


def size_kv_cache(
    shape: KVShape, settings: WorkerSettings, device: torch.device, max_num_batched_tokens: int
) -> KVCacheSize:
    """How many blocks: as set, or by the memory set, or by what is free after loading.

    Never more than all rows could fill at their longest. Raises ConfigurationError if not
    even one block fits.
    """
    dtype = kv_dtype_of(shape, settings)
    per_token = kv_bytes_per_token(shape, dtype)
    per_block = per_token * settings.block_size
    _logger.info(
        "KV cache: 2 x %d layers x %d kv heads x %d dims, %s: %s a token, %s a block of %d",
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        kv_scheme_of(dtype),
        _human(per_token),
        _human(per_block),
        settings.block_size,
    )
    most = most_blocks(shape, settings)
    if settings.num_kv_blocks:
        num_blocks = settings.num_kv_blocks
        _logger.info("KV cache: %s blocks, as set", f"{num_blocks:,}")
    else:
        budget = _budget(shape, settings, device, max_num_batched_tokens)
        num_blocks = min(budget // per_block, most)
        if num_blocks == most:
            _logger.info(
                "KV cache: %d sequences of %d tokens need no more",
                settings.max_num_seqs,
                shape.max_model_len,
            )
    if num_blocks < 2:
        raise ConfigurationError(
            f"no room for the KV cache: a block takes {_human(per_block)}; "
            "give more memory (OCTAVO_KV_CACHE_MEMORY) or a smaller model",
            param="kv_cache_memory",
        )
    size = KVCacheSize(num_blocks, settings.block_size, per_token)
    num_tokens = (num_blocks - 1) * settings.block_size
    _logger.info(
        "KV cache: %s blocks = %s tokens = %s; %.1f sequences of %d tokens",
        f"{num_blocks:,}",
        f"{num_tokens:,}",
        _human(size.num_bytes),
        num_tokens / shape.max_model_len,
        shape.max_model_len,
    )
    return size


def most_blocks(shape: KVShape, settings: WorkerSettings) -> int:
    """What all rows fill at their longest, and the null block."""
    return settings.max_num_seqs * -(-shape.max_model_len // settings.block_size) + 1


def card_room(
    shape: KVShape, settings: WorkerSettings, device: torch.device, max_num_batched_tokens: int
) -> CardRoom:
    """Of a card, as of now."""
    free, total = torch.cuda.mem_get_info(device)
    captured = graph_tokens(shape, settings, max_num_batched_tokens)
    scratch = scratch_bytes(shape, settings.max_num_seqs, max_num_batched_tokens, captured)
    return CardRoom(total, total - free, int(total * settings.memory_utilization), scratch)


def allocate_kv_caches(
    shape: KVShape, size: KVCacheSize, device: torch.device, dtype: torch.dtype | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) of every layer, [N, K, B, D], of `dtype` (default: the model's); their
    content is never read unwritten."""
    dims = (size.num_blocks, shape.num_kv_heads, size.block_size, shape.head_dim)

    def cache() -> torch.Tensor:
        # Not zeros: on a CPU these would take all the memory, and seconds, at once.
        return torch.empty(dims, dtype=dtype or shape.dtype, device=device)

    return [(cache(), cache()) for _ in range(shape.num_layers)]


def _budget(
    shape: KVShape, settings: WorkerSettings, device: torch.device, max_num_batched_tokens: int
) -> int:
    """Bytes that the cache may take."""
    if settings.kv_cache_memory:
        budget = parse_bytes(settings.kv_cache_memory, "kv_cache_memory")
        _logger.info("KV cache: %s, as set", _human(budget))
        return budget
    if device.type == "cpu":
        free = free_memory_bytes()
        budget = min(int(free * _CPU_SHARE), _CPU_MOST_BYTES) // settings.tensor_parallel
        _logger.info(
            "KV cache: %s of memory free; %d %% of it, at most %s, for %d rank(s): %s each",
            _human(free),
            100 * _CPU_SHARE,
            _human(_CPU_MOST_BYTES),
            settings.tensor_parallel,
            _human(budget),
        )
        return budget
    room = card_room(shape, settings, device, max_num_batched_tokens)
    _logger.info("KV cache: card has %s, %s of it used", _human(room.total), _human(room.used))
    _logger.info("KV cache: %s usable at %g", _human(room.usable), settings.memory_utilization)
    _logger.info("KV cache: %s kept for activations and logits", _human(room.scratch))
    _logger.info("KV cache: leaves %s", _human(room.left))
    return room.left


def graph_tokens(shape: KVShape, settings: WorkerSettings, max_num_batched_tokens: int) -> int:
    """The prompt tokens of a step up to which it is captured: as set, or by the model's size."""
    most = settings.max_graph_tokens
    return min(max_graph_tokens(shape) if most is None else most, max_num_batched_tokens)


def scratch_bytes(
    shape: KVShape,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    captured_tokens: int | None = None,
) -> int:
    """A generous bound of what a step needs beside weights and cache, and captured steps keep.

    `captured_tokens`: see `graph_tokens`; None = by the model's size.
    """
    if captured_tokens is None:
        captured_tokens = min(max_graph_tokens(shape), max_num_batched_tokens)
    widest = 8 * shape.hidden_size + 3 * shape.intermediate_size
    shapes = mixed_shapes(captured_tokens, max_num_seqs)
    # Captured steps share their memory: the largest one's is all of theirs.
    num_captured = captured_tokens + max_num_seqs if shapes else 0
    activations = (max_num_batched_tokens + num_captured) * widest * shape.dtype.itemsize
    logits = 4 * (max_num_seqs + MOST_CHUNKS) * shape.vocab_size * 4
    graphs = (len(batch_sizes(max_num_seqs)) + len(shapes)) * _GRAPH_BYTES
    return activations + logits + graphs + (256 << 20)


def free_memory_bytes() -> int:
    """Memory that this process may still take, its container's limit respected."""
    free = _meminfo_available()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used, 0))
    return free


def _meminfo_available() -> int:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        # No /proc (macOS): half of what is built in stands for what is free.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _human(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
