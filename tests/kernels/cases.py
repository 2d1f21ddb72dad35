"""Cases that the interpreter's tests and the card's tests share: shapes and poisoned tensors.

Everything that a kernel must not read holds NaN: blocks that no row owns, slots behind a row's
context, the null block, and (with `poisoned_outputs`) every output before the launch.
"""

import mmap
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUP_SIZES = (1, 3, 4, 7, 8)
BLOCK_SIZES = (16, 32)
NULL_BLOCK = 0


def pairwise(factors: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """At least `count` cases in which every pair of values of two factors occurs."""
    rng = random.Random(0)
    names = list(factors)

    def pairs_of(case: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in combinations(names, 2)}

    missing = {
        (a, x, b, y) for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    cases: list[dict[str, Any]] = []
    while missing or len(cases) < count:
        candidates = [{name: rng.choice(factors[name]) for name in names} for _ in range(64)]
        best = max(candidates, key=lambda case: len(missing & pairs_of(case)))
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def case_id(case: Mapping[str, Any]) -> str:
    values = (str(value).removeprefix("torch.") for value in case.values())
    return "-".join(values)


@contextmanager
def poisoned_outputs() -> Generator[None]:
    """`torch.empty` gives NaN (integers: their maximum), so a store that is missing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def strided_rows(x: Tensor) -> Tensor:
    """x [T, ...] with NaN between its rows: what a view of a fused projection looks like."""
    wide = torch.full((x.shape[0], 2 * x[0].numel() + 16), torch.nan, dtype=x.dtype)
    wide = wide.to(x.device)
    inner = wide[:, 16 : 16 + x[0].numel()]
    inner.copy_(x.flatten(1))
    return inner.view(x.shape)


def far_apart(num_rows: int, width: int, *, dtype: torch.dtype, device: str) -> Tensor:
    """[num_rows, width] whose rows lie 2**30 elements apart: from row 2 on, an offset in 32 bits
    wraps. On the host the space between is never touched and costs no memory."""
    num_elements = (num_rows - 1) * 2**30 + width
    if device == "cpu":
        map_noreserve = 0x4000
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve
        storage = torch.frombuffer(
            mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype
        )
    else:
        storage = torch.empty(num_elements, dtype=dtype, device=device)
    return storage.as_strided((num_rows, width), (2**30, 1))


@dataclass(frozen=True, slots=True)
class PagedKv:
    """Caches [N, K, B, D] with the contexts' tokens, NaN elsewhere, and their block table."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor  # int32 [rows, M]; the entries behind a context name a NaN block


def paged_kv(
    context_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    first_seen: Sequence[int] | None = None,
) -> PagedKv:
    """`first_seen`: tokens of a context before it are NaN too, as no window shows them."""
    blocks_of = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(blocks_of) + 2
    poison_block = num_blocks - 1
    order = list(range(1, poison_block))
    random.Random(seed).shuffle(order)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype)
    v_cache = torch.full(shape, torch.nan, dtype=dtype)
    table = torch.full((len(context_lens), max(blocks_of) + 1), poison_block, dtype=torch.int32)
    for row, length in enumerate(context_lens):
        for index in range(blocks_of[row]):
            block = order.pop()
            table[row, index] = block
            num_tokens = min(block_size, length - index * block_size)
            live = (num_kv_heads, num_tokens, head_dim)
            k_cache[block, :, :num_tokens] = normal(
                *live, dtype=dtype, device="cpu", seed=seed + 2 * block
            )
            v_cache[block, :, :num_tokens] = normal(
                *live, dtype=dtype, device="cpu", seed=seed + 2 * block + 1
            )
            if first_seen is not None:
                num_hidden = max(first_seen[row] - index * block_size, 0)
                k_cache[block, :, :num_hidden] = torch.nan
                v_cache[block, :, :num_hidden] = torch.nan
    return PagedKv(k_cache.to(device), v_cache.to(device), table.to(device))


def elementwise_factors(dtypes: Sequence[torch.dtype]) -> dict[str, Sequence[Any]]:
    """Rows x width, odd ones among them."""
    return {
        "num_rows": (1, 2, 7, 33),
        "width": (1, 2, 24, 127, 576, 1024),
        "dtype": dtypes,
        "is_strided": (False, True),
    }


def rope_factors(dtypes: Sequence[torch.dtype]) -> dict[str, Sequence[Any]]:
    return {
        "head_dim": HEAD_DIMS,
        "group_size": GROUP_SIZES,
        "num_kv_heads": (1, 3),
        "block_size": BLOCK_SIZES,
        "rotated": (1.0, 0.5, 0.25),  # part of the head dim
        "dtype": dtypes,
    }


def attention_factors(dtypes: Sequence[torch.dtype]) -> dict[str, Sequence[Any]]:
    return {
        "head_dim": HEAD_DIMS,
        "group_size": GROUP_SIZES,
        "num_kv_heads": (1, 2),
        "block_size": BLOCK_SIZES,
        "dtype": dtypes,
    }


def window_factors(dtypes: Sequence[torch.dtype]) -> dict[str, Sequence[Any]]:
    """Windows around the borders of tiles and blocks, and one that hides nothing."""
    return {
        "head_dim": (64, 80),
        "group_size": (1, 4),
        "num_kv_heads": (1, 2),
        "block_size": BLOCK_SIZES,
        "dtype": dtypes,
        "window": (1, 16, 65, 1000),
        "soft_cap": (None, 30.0),
    }


def sample_factors() -> dict[str, Sequence[Any]]:
    return {
        "vocab_size": (1, 5, 301, 4099),
        "shape": ("flat", "normal", "peaked", "tied", "masked"),
        "temperature": (0.0, 1e-20, 0.7, 1.0, 3.0),
        "top_p": (0.0, 0.3, 0.9, 1.0),
        "top_k": (0, 1, 5, 2**31 - 1),
        "min_p": (0.0, 0.1, 1.0),
    }


def logits_of(shape: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """float32 [num_rows, vocab_size]."""
    logits = normal(num_rows, vocab_size, dtype=torch.float32, device="cpu", seed=seed)
    if shape == "flat":
        return torch.zeros_like(logits)
    if shape == "peaked":
        return logits * 20
    if shape == "tied":  # few values, many tokens each
        return logits.round()
    if shape == "masked":  # all but about a quarter, but never all
        return logits.masked_fill((logits < 0.7) & (logits < logits.amax(1, True)), -torch.inf)
    return logits * 2


def sampling_parameters(
    num_rows: int, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> dict[str, Tensor]:
    """The sampler's keyword arguments: one setting, a seed (all 64 bits) and a place a row."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "temperature": torch.full((num_rows,), temperature),
        "top_p": torch.full((num_rows,), top_p),
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int32),
        "min_p": torch.full((num_rows,), min_p),
        "seed": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        "position": torch.randint(0, 2**32, (num_rows,), generator=generator),
        "sequence_index": torch.randint(0, 128, (num_rows,), generator=generator).int(),
    }
