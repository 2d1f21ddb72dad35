"""The mixture of experts, compiled ahead of time at the shapes of models: see `test_compile`."""

import pytest
import torch
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv
from octavo_kernels.moe import moe_launches
from octavo_kernels.moe_routing import Routing, max_tiles, route_launches, tokens_of_chunk
from tests.kernels.compiled import MAX_SHARED_BYTES, Resources, compile_launch

# (experts, experts of a token, hidden, intermediate): Qwen3-30B-A3B, Mixtral 8x7B, and
# Qwen1.5-MoE-A2.7B, whose experts whole blocks don't divide.
QWEN3, MIXTRAL, QWEN2 = (128, 8, 2048, 768), (8, 2, 4096, 14_336), (60, 4, 2048, 1408)
# Two accumulators of 128 x 128 take all registers; sm_80's ordered copies need a few more.
MAX_STACK_BYTES = {(80, 128): 128}


def _tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _routing(num_tokens: int, model: tuple[int, ...], tile: int) -> Routing:
    num_pairs = num_tokens * model[1]
    tiles = (max_tiles(num_pairs, model[0], tile), 3)
    return Routing(
        _tensor(num_pairs, dtype=torch.float32),
        _tensor(num_pairs, dtype=torch.int32),
        _tensor(*tiles, dtype=torch.int32),
    )


def _compile(launch: Launch, tile: int, capability: int) -> Resources:
    used = compile_launch(launch, capability)
    assert used.local_bytes == 0
    assert used.stack_bytes <= MAX_STACK_BYTES.get((capability, tile), 0), used.registers
    assert used.shared_bytes <= MAX_SHARED_BYTES[capability]
    return used


@pytest.mark.parametrize(
    ("model", "tile", "dtype", "capability"),
    [
        (QWEN3, 16, torch.bfloat16, 90),
        (QWEN3, 128, torch.bfloat16, 90),
        pytest.param(QWEN3, 16, torch.float32, 90, marks=pytest.mark.slow),
        pytest.param(QWEN3, 64, torch.bfloat16, 90, marks=pytest.mark.slow),
        pytest.param(QWEN2, 16, torch.bfloat16, 90, marks=pytest.mark.slow),
        pytest.param(QWEN2, 128, torch.float16, 90, marks=pytest.mark.slow),
        pytest.param(MIXTRAL, 16, torch.float16, 90, marks=pytest.mark.slow),
        pytest.param(QWEN3, 16, torch.bfloat16, 80, marks=pytest.mark.slow),
        pytest.param(QWEN3, 128, torch.bfloat16, 80, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts(model: tuple[int, ...], tile: int, dtype: torch.dtype, capability: int) -> None:
    num_tokens = 24
    num_experts, top_k, hidden, inner_size = model
    x = _tensor(num_tokens, hidden, dtype=dtype)
    *products, total = moe_launches(
        *(x, _tensor(num_tokens * top_k, hidden, dtype=dtype)),
        *(_tensor(num_tokens * top_k, inner_size, dtype=dtype), x),
        _tensor(num_experts, 2 * inner_size, hidden, dtype=dtype),
        _tensor(num_experts, hidden, inner_size, dtype=dtype),
        _tensor(num_tokens, dtype=torch.int64),
        *(_routing(num_tokens, model, tile), tile),
    )
    _compile(total, tile, capability)
    expected = "wgmma.mma_async" if capability >= 90 else "mma.sync"
    for launch in products:
        ptx = _compile(launch, tile, capability).ptx
        assert (expected in ptx) == (dtype != torch.float32)
        assert "cp.async.cg.shared.global" in ptx
        # Whole lines of the results are written, not a column's elements one by one.
        assert "st.global.b16" not in ptx


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [
        (QWEN3, 1),
        (QWEN3, 4096),
        pytest.param(MIXTRAL, 24, marks=pytest.mark.slow),
        pytest.param(MIXTRAL, 4096, marks=pytest.mark.slow),
        pytest.param(QWEN2, 1, marks=pytest.mark.slow),
        pytest.param(QWEN2, 4096, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_routing(model: tuple[int, ...], num_tokens: int) -> None:
    num_chunks = cdiv(num_tokens, tokens_of_chunk(num_tokens, model[0]))
    launches = route_launches(
        _routing(num_tokens, model, 64),
        _tensor(num_chunks, model[0], dtype=torch.int32),
        _tensor(num_tokens, model[0], dtype=torch.bfloat16),
        _tensor(num_tokens, dtype=torch.int64),
        renormalise=True,
        tile=64,
    )
    assert len(launches) == (1 if num_chunks == 1 else 2)
    for launch in launches:
        _compile(launch, 64, 90)
