"""Every kernel, compiled for sm_80 and sm_90 as its launcher would launch it: does it fit?

No card is needed. The gates: nothing spills, shared memory within the card's limit, tensor cores
used where a dot is in 16 bits, and keys and values copied asynchronously.
"""

import pytest
import torch
from torch import Tensor

from octavo_kernels.decode_work import WorkList, work_list_launch
from octavo_kernels.gated_mul import gated_mul_launch
from octavo_kernels.launch import Launch, next_power_of_2
from octavo_kernels.paged_decode import paged_decode_launch
from octavo_kernels.paged_prefill import (
    choose_tiles,
    paged_prefill_launch,
    prefill_work_list_launch,
)
from octavo_kernels.read_probe import read_probe_launch
from octavo_kernels.rms_norm import rms_norm_launch
from octavo_kernels.rope_and_cache import rope_and_cache_launch
from octavo_kernels.sample import sample_launch
from tests.kernels.cases import BLOCK_SIZES, HEAD_DIMS, case_id, pairwise
from tests.kernels.compiled import MAX_SHARED_BYTES, Resources, compile_launch

# ptxas may trade a word or two for occupancy in float32's products, which are made of plain
# multiply-adds and live in registers.
MAX_STACK_BYTES = {torch.float32: 16}

HALVES = (torch.bfloat16, torch.float16)
NUM_TOKENS, MAX_BLOCKS, NUM_ITEMS = 8, 128, 50
# (query heads, kv heads): groups 1, 3, 4, 7.
HEADS = ((16, 16), (9, 3), (32, 8), (28, 4))
ATTENTION = pairwise(
    {"head_dim": HEAD_DIMS, "heads": HEADS, "block_size": BLOCK_SIZES, "dtype": HALVES}, count=20
)
ATTENTION += [
    {"head_dim": head_dim, "heads": (9, 3), "block_size": 16, "dtype": torch.float32}
    for head_dim in (64, 80, 128, 256)
]


_GEMMA = {"head_dim": 256, "heads": (8, 4), "block_size": 16, "dtype": torch.bfloat16}
_MISTRAL = {"head_dim": 128, "heads": (32, 8), "block_size": 16, "dtype": torch.bfloat16}
# Many query heads on a kv head.
_CHATGLM = {"head_dim": 128, "heads": (32, 2), "block_size": 16, "dtype": torch.bfloat16}
_PHI4_MINI = _MISTRAL | {"heads": (24, 8)}
_GLM4_32B = _CHATGLM | {"heads": (48, 2)}
CAPPED = [
    _GEMMA | {"soft_cap": 50.0},
    _GEMMA | {"window": 4096, "soft_cap": 50.0},
    _GEMMA | {"head_dim": 64, "dtype": torch.float32, "window": 512, "soft_cap": 50.0},
]


def _tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.int32)


def _int64(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.int64)


def _float32(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.float32)


def _work(num_kv_heads: int = 1) -> WorkList:
    tickets = _int32(NUM_TOKENS, num_kv_heads)
    return WorkList(_int32(NUM_ITEMS, 3), _int32(NUM_TOKENS + 1), tickets)


def _check(launch: Launch, dtype: torch.dtype = torch.float32) -> dict[int, Resources]:
    return {capability: _check_for(launch, dtype, capability) for capability in MAX_SHARED_BYTES}


def _check_for(launch: Launch, dtype: torch.dtype, capability: int) -> Resources:
    used = compile_launch(launch, capability)
    assert used.local_bytes == 0
    assert used.stack_bytes <= MAX_STACK_BYTES.get(dtype, 0), (capability, used.registers)
    assert used.shared_bytes <= MAX_SHARED_BYTES[capability], capability
    return used


def _check_attention(launch: Launch, dtype: torch.dtype, *, hopper: str) -> None:
    """`hopper`: the instruction of sm_90's dots; sm_80 has mma.sync alone."""
    for capability, used in _check(launch, dtype).items():
        _check_copies_and_dots(used, dtype, hopper if capability >= 90 else "mma.sync")


def _check_copies_and_dots(used: Resources, dtype: torch.dtype, dot: str) -> None:
    other = "mma.sync" if dot != "mma.sync" else "wgmma.mma_async"
    assert (dot in used.ptx) == (dtype in HALVES)
    assert other not in used.ptx
    assert "cp.async.cg.shared.global" in used.ptx


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [576, 4096, 8192])
def test_rms_norm(dtype: torch.dtype, hidden: int) -> None:
    x, weight = _tensor(NUM_TOKENS, hidden, dtype=dtype), _tensor(hidden, dtype=dtype)
    _check(rms_norm_launch(x, None, x, None, weight, 1e-5))
    _check(rms_norm_launch(x, x, x, x, weight, 1e-5))
    _check(rms_norm_launch(x, x, x, x, _float32(hidden), 1e-5))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1536, 14336])
def test_gated_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = _tensor(NUM_TOKENS, 2 * width, dtype=dtype)
    out = _tensor(NUM_TOKENS, width, dtype=dtype)
    _check(gated_mul_launch(out, gate_up, is_gelu=False))
    _check(gated_mul_launch(out, gate_up, is_gelu=True))


@pytest.mark.parametrize(
    "case",
    [
        *ATTENTION,
        _CHATGLM | {"rotated": 0.5},
        _PHI4_MINI | {"rotated": 0.75},
        _CHATGLM | {"rotated": 2 / 128},
    ],
    ids=case_id,
)
def test_rope_and_cache(case: dict) -> None:
    dtype, head_dim, (num_heads, num_kv_heads) = case["dtype"], case["head_dim"], case["heads"]
    q = _tensor(NUM_TOKENS, num_heads, head_dim, dtype=dtype)
    kv = _tensor(NUM_TOKENS, num_kv_heads, head_dim, dtype=dtype)
    cache = _tensor(100, num_kv_heads, case["block_size"], head_dim, dtype=dtype)
    places = (_int64(NUM_TOKENS), _int64(NUM_TOKENS))
    cos_sin = _float32(2048, 2, int(head_dim * case.get("rotated", 1)) // 2)
    _check(rope_and_cache_launch(q, kv, q, kv, kv, cos_sin, *places, cache, cache))


@pytest.mark.parametrize("case", [*ATTENTION, _GLM4_32B, *CAPPED[1:]], ids=case_id)
def test_paged_decode(case: dict) -> None:
    dtype, head_dim, (num_heads, num_kv_heads) = case["dtype"], case["head_dim"], case["heads"]
    q = _tensor(NUM_TOKENS, num_heads, head_dim, dtype=dtype)
    cache = _tensor(100, num_kv_heads, case["block_size"], head_dim, dtype=dtype)
    partial_out = _float32(NUM_ITEMS, num_heads, head_dim)
    partial_lse = _float32(NUM_ITEMS, num_heads)
    table = _int32(NUM_TOKENS, MAX_BLOCKS)
    attend = paged_decode_launch(
        *(q, partial_out, partial_lse, q, cache, cache, table, _work(num_kv_heads), 0.125),
        soft_cap=case.get("soft_cap"),
    )
    # 16 or 32 rows are too few for wgmma, which takes 64.
    _check_attention(attend, dtype, hopper="mma.sync")


@pytest.mark.parametrize(
    "case", [*ATTENTION, _GLM4_32B, *CAPPED, _MISTRAL | {"window": 4096}], ids=case_id
)
def test_paged_prefill(case: dict) -> None:
    dtype, head_dim, (num_heads, num_kv_heads) = case["dtype"], case["head_dim"], case["heads"]
    q = _tensor(NUM_TOKENS, num_heads, head_dim, dtype=dtype)
    cache = _tensor(100, num_kv_heads, case["block_size"], head_dim, dtype=dtype)
    table = _int32(NUM_TOKENS, MAX_BLOCKS)
    for capability in MAX_SHARED_BYTES:
        launch = paged_prefill_launch(
            *(q, q, cache, cache, table, _int32(NUM_ITEMS, 2)),
            *(_int32(NUM_TOKENS + 1), _int32(NUM_TOKENS), 0.125),
            window=case.get("window"),
            soft_cap=case.get("soft_cap"),
            tiles=choose_tiles(
                dtype, next_power_of_2(head_dim), num_heads // num_kv_heads, capability
            ),
        )
        dot = "wgmma.mma_async" if capability >= 90 else "mma.sync"
        _check_copies_and_dots(_check_for(launch, dtype, capability), dtype, dot)


@pytest.mark.parametrize("window", [None, 4096])
def test_work_list(window: int | None) -> None:
    _check(work_list_launch(_work(), _int32(NUM_TOKENS), at_once=49, min_chunk=128, window=window))


def test_prefill_work_list() -> None:
    borders = _int32(NUM_TOKENS + 1)
    _check(prefill_work_list_launch(_int32(NUM_ITEMS, 2), borders, 512, 64))


def test_read_probe() -> None:
    launch = read_probe_launch(_int32(1000), _int32(8_192_000))
    assert "ld.global.v4" in _check(launch)[90].ptx


@pytest.mark.parametrize("vocab_size", [49_152, 128_256, 151_936, 50_257])
def test_sample(vocab_size: int) -> None:
    parameters = (_float32, _float32, _int32, _float32, _int64, _int64, _int32)
    _check(
        sample_launch(
            _int64(NUM_TOKENS),
            _float32(NUM_TOKENS, vocab_size),
            *(make(NUM_TOKENS) for make in parameters),
        )
    )
