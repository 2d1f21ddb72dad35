"""Attention over paged keys and values: decoding rows, prefilling chunks, storing tokens.

Heads are those of Llama 3.1 8B (four queries a kv head), or one a kv head ("mha"). Entry point:
`attention_cases`.
"""

import random
from collections.abc import Iterator, Sequence

import torch

from octavo_kernels.fp8_gemm import E4M3
from octavo_kernels.launch import compute_capability
from octavo_kernels.paged_decode import paged_decode, work_of_step
from octavo_kernels.paged_kv import KvScales
from octavo_kernels.paged_prefill import paged_prefill, prefill_work_list
from octavo_kernels.rope_and_cache import rope_and_cache
from octavo_worker.kernel_bench.case import Call, Case, num_sets

_HEADS, _HEAD_DIM, _BLOCK = 32, 128, 16
_ITEM = 2  # bytes of a bf16
_SCALE = _HEAD_DIM**-0.5
_POSITIONS = 8192


def attention_cases() -> list[Case]:
    return [*_decode_cases(), *_prefill_cases(), *_rope_cases()]


def _decode_cases() -> Iterator[Case]:
    for context in (2048, 8192):
        for num_rows in (16, 64, 128, 256):
            yield _decode(f"gqa {num_rows} x {context}", [context] * num_rows, 8)
    ragged = [int(2 ** random.Random(row).uniform(6, 13)) for row in range(128)]
    yield _decode("gqa 128 ragged", ragged, 8)
    for num_rows in (16, 64):
        yield _decode(f"mha {num_rows} x 2048", [2048] * num_rows, 32)
    for kv_heads, name in ((8, "gqa"), (32, "mha")):
        yield _decode(f"{name} 64 x 2048 fp8", [2048] * 64, kv_heads, in_8_bits=True)


def _decode(shape: str, contexts: list[int], kv_heads: int, *, in_8_bits: bool = False) -> Case:
    total, num_rows = sum(contexts), len(contexts)
    kv_bytes = _kv_bytes(total, kv_heads) // (2 if in_8_bits else 1)
    num_bytes = kv_bytes + 2 * num_rows * _HEADS * _HEAD_DIM * _ITEM

    def make() -> list[Call]:
        return [call() for _ in range(num_sets(num_bytes))]

    def call() -> Call:
        lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        q = _random(num_rows, _HEADS, _HEAD_DIM)
        k_cache, v_cache, table = _paged(contexts, kv_heads)
        scales = None
        if in_8_bits:
            k_cache, v_cache = k_cache.to(E4M3), v_cache.to(E4M3)
            scales = KvScales(*torch.ones(2, kv_heads, device="cuda"))
        # Once a step, for all its layers.
        work = work_of_step(lens, _HEADS, q.dtype, k_cache)
        # As decode steps launch it.
        pdl = compute_capability(q.device) >= 90
        return lambda: paged_decode(
            q, k_cache, v_cache, table, lens, _SCALE, kv_scales=scales, work=work, pdl=pdl
        )

    return Case(f"paged_decode {shape}", num_bytes, 4 * _HEADS * _HEAD_DIM * total, make)


def _prefill_cases() -> Iterator[Case]:
    yield _prefill("fresh 4096", [(0, 4096)])
    yield _prefill("fresh 8192", [(0, 8192)])
    yield _prefill("fresh 8 x 1024", [(0, 1024)] * 8)
    yield _prefill("512 after 7680", [(7680, 512)])
    yield _prefill("1024 after 31744", [(31_744, 1024)])
    yield _prefill("8 x 256 after 2048", [(2048, 256)] * 8)


def _prefill(shape: str, chunks: Sequence[tuple[int, int]]) -> Case:
    kv_heads = 8
    lengths = [before + new for before, new in chunks]
    num_tokens = sum(new for _, new in chunks)
    # A chunk's token sees what came before it, and itself.
    num_pairs = sum(before * new + new * (new + 1) // 2 for before, new in chunks)
    num_bytes = _kv_bytes(sum(lengths), kv_heads) + 2 * num_tokens * _HEADS * _HEAD_DIM * _ITEM

    def make() -> list[Call]:
        return [call() for _ in range(num_sets(num_bytes))]

    def call() -> Call:
        q = _random(num_tokens, _HEADS, _HEAD_DIM)
        k_cache, v_cache, table = _paged(lengths, kv_heads)
        borders = torch.tensor([0, *(new for _, new in chunks)], device="cuda").cumsum(0).int()
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        work = prefill_work_list(q, borders, kv_heads)
        return lambda: paged_prefill(q, k_cache, v_cache, table, borders, lens, _SCALE, work=work)

    return Case(f"paged_prefill {shape}", num_bytes, 4 * _HEADS * _HEAD_DIM * num_pairs, make)


def _rope_cases() -> Iterator[Case]:
    for num_tokens in (1, 128, 8192):
        yield _rope(num_tokens)


def _rope(num_tokens: int) -> Case:
    kv_heads = 8
    # q and k in and out, v in, k and v to the cache; a token's cosines and sines, its places.
    vectors = 2 * (_HEADS + kv_heads) + 3 * kv_heads
    num_bytes = num_tokens * (vectors * _HEAD_DIM * _ITEM + _HEAD_DIM * 4 + 16)

    def make() -> list[Call]:
        return [call() for _ in range(num_sets(num_bytes))]

    def call() -> Call:
        heads = _random(num_tokens, _HEADS + 2 * kv_heads, _HEAD_DIM)
        q, k, v = heads.split((_HEADS, kv_heads, kv_heads), dim=1)
        cos_sin = torch.randn(_POSITIONS, 2, _HEAD_DIM // 2, device="cuda")
        positions = torch.arange(num_tokens, device="cuda")
        k_cache, v_cache, table = _paged([num_tokens], kv_heads)
        slots = table[0, positions // _BLOCK].long() * _BLOCK + positions % _BLOCK
        return lambda: rope_and_cache(q, k, v, cos_sin, positions, slots, k_cache, v_cache)

    flops = 3 * num_tokens * (_HEADS + kv_heads) * _HEAD_DIM
    return Case(f"rope_and_cache {num_tokens}", num_bytes, flops, make)


def _kv_bytes(num_tokens: int, kv_heads: int) -> int:
    return 2 * num_tokens * kv_heads * _HEAD_DIM * _ITEM


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _paged(
    lengths: Sequence[int], kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches full of random numbers, the rows' blocks scattered over them, and their table."""
    width = max(-(-length // _BLOCK) for length in lengths)
    num_blocks = len(lengths) * width
    shape = (num_blocks, kv_heads, _BLOCK, _HEAD_DIM)
    table = torch.randperm(num_blocks, device="cuda").int().view(len(lengths), width)
    return _random(*shape), _random(*shape), table
