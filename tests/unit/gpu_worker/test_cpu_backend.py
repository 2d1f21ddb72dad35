"""The CPU backend's operations against their definitions, on poisoned caches."""

import os
import subprocess
import sys

import pytest
import torch

from octavo_worker.attention_inputs import AttentionOptions, StepInputs
from octavo_worker.backends.cpu import CpuBackend

torch.set_num_threads(1)
SCALE = 0.3
PLAIN = AttentionOptions(scale=SCALE)


class Context:
    """Random keys and values of several sequences, scattered over a cache full of NaN."""

    def __init__(
        self,
        lens: list[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lens))
        num_columns = max(1, *(-(-length // block_size) for length in lens)) + 1
        num_blocks = 1 + len(lens) * num_columns
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.block_table = order[: len(lens) * num_columns].view(len(lens), -1).to(torch.int32)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.k_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.v_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for row, length in enumerate(lens):
            k, v = torch.randn((2, length, num_kv_heads, head_dim), generator=generator).to(dtype)
            for position in range(length):
                block = self.block_table[row, position // block_size]
                self.k_cache[block, :, position % block_size] = k[position]
                self.v_cache[block, :, position % block_size] = v[position]
            self.keys.append(k)
            self.values.append(v)

    def poison_before(self, row: int, position: int) -> None:
        """Nothing may read the keys and values of the row before `position` any more."""
        for index in range(position):
            block = self.block_table[row, index // self.k_cache.shape[2]]
            self.k_cache[block, :, index % self.k_cache.shape[2]] = torch.nan
            self.v_cache[block, :, index % self.k_cache.shape[2]] = torch.nan

    def attention(self, row: int, q: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """fp32 [Tq, H, D]: causal attention of the last Tq positions' queries."""
        k, v = self.keys[row].float(), self.values[row].float()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
        num_queries, length = q.shape[0], k.shape[0]
        is_seen = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        if options.window is not None:
            is_seen = is_seen.triu(length - num_queries - options.window + 1)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def step_inputs(
    context: Context, chunk_lens: list[int], lens: list[int], num_decodes: int
) -> StepInputs:
    """The first rows are chunks (the last `chunk_lens` tokens of each), the others decode."""
    num_chunks = len(chunk_lens)
    none = torch.empty(0, dtype=torch.int64)
    return StepInputs(
        input_ids=none,
        positions=none,
        slot_mapping=none,
        num_prefill_tokens=sum(chunk_lens),
        cu_seqlens_q=torch.tensor([0, *chunk_lens]).cumsum(0).to(torch.int32),
        prefill_context_lens=torch.tensor(lens[:num_chunks], dtype=torch.int32),
        prefill_block_table=context.block_table[:num_chunks],
        max_seqlen_q=max(chunk_lens, default=0),
        max_context_prefill=max(lens[:num_chunks], default=0),
        decode_context_lens=torch.tensor(lens[num_chunks:], dtype=torch.int32),
        decode_block_table=context.block_table[num_chunks:],
        max_context_decode=max(lens[num_chunks:], default=0),
    )


KINDS = [
    (1, 1, 64, 16, torch.float32),
    (3, 2, 80, 16, torch.float32),
    (4, 3, 96, 32, torch.float16),
    (7, 2, 128, 16, torch.bfloat16),
    (8, 1, 256, 32, torch.float32),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


OPTIONS = {
    "plain": PLAIN,
    "soft cap": AttentionOptions(SCALE, soft_cap=2.0),
    "window 1": AttentionOptions(SCALE, window=1),
    "window 17": AttentionOptions(SCALE, window=17),
    "window 64, soft cap": AttentionOptions(SCALE, window=64, soft_cap=5.0),
    "window 1000": AttentionOptions(SCALE, window=1000),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize(("group", "num_kv_heads", "head_dim", "block_size", "dtype"), KINDS)
def test_attention_over_scattered_blocks(
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    options: AttentionOptions,
) -> None:
    chunk_lens = [1, 5, block_size, 40, 33]
    histories = [0, 0, block_size - 1, 70, 2 * block_size]
    lens = [a + b for a, b in zip(chunk_lens, histories, strict=True)]
    decode_lens = [1, 0, block_size, 200, 2, block_size + 1, 0, 65, 63, 129]
    lens += decode_lens
    context = Context(
        lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    if options.window is not None:
        for row, length in enumerate(lens):
            queries = chunk_lens[row] if row < len(chunk_lens) else 1
            context.poison_before(row, length - queries - options.window + 1)
    inputs = step_inputs(context, chunk_lens, lens, len(decode_lens))
    backend, tolerance = CpuBackend(), TOLERANCE[dtype]
    num_heads = group * num_kv_heads
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):  # a second layer of the step
        q = torch.randn((sum(chunk_lens), num_heads, head_dim), generator=generator).to(dtype)
        out = backend.prefill_attention(q, context.k_cache, context.v_cache, inputs, options)
        assert out.shape == q.shape
        assert out.dtype == dtype
        for row, (part, queries) in enumerate(
            zip(out.split(chunk_lens), q.split(chunk_lens), strict=True)
        ):
            expected = context.attention(row, queries, options)
            torch.testing.assert_close(part.float(), expected, atol=tolerance, rtol=tolerance)
        q = torch.randn((len(decode_lens), num_heads, head_dim), generator=generator).to(dtype)
        out = backend.decode_attention(q, context.k_cache, context.v_cache, inputs, options)
        assert out.dtype == dtype
        for row, length in enumerate(decode_lens):
            if length == 0:
                assert out[row].eq(0).all()
                continue
            expected = context.attention(len(chunk_lens) + row, q[row : row + 1], options)
            torch.testing.assert_close(
                out[row : row + 1].float(), expected, atol=tolerance, rtol=tolerance
            )


def test_every_row_dead() -> None:
    context = Context([0, 0], num_kv_heads=1, head_dim=8, block_size=16, dtype=torch.float32)
    inputs = step_inputs(context, [], [0, 0], 2)
    q = torch.ones((2, 3, 8))
    out = CpuBackend().decode_attention(q, context.k_cache, context.v_cache, inputs, PLAIN)
    assert out.eq(0).all()


@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_rotates_the_first_dims_by_halves_and_stores(rotated: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((3, 4, 8), generator=generator)
    k, v = torch.randn((2, 3, 2, 8), generator=generator)
    angles = torch.randn((10, rotated // 2), generator=generator)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
    positions, slots = torch.tensor([2, 9, 0]), torch.tensor([21, -1, 16])
    k_cache, v_cache = torch.full((2, 3, 2, 16, 8), torch.nan)
    rotated_q, rotated_k = CpuBackend().rope_and_cache(
        q, k, v, cos_sin, positions, slots, k_cache, v_cache
    )
    half = rotated // 2
    for before, after in ((q, rotated_q), (k, rotated_k)):
        for token, position in enumerate(positions):
            pairs = torch.complex(
                before[token, :, :half].contiguous(), before[token, :, half:rotated].contiguous()
            )
            turned = pairs * torch.polar(torch.ones(half), angles[position])
            expected = torch.cat([turned.real, turned.imag, before[token, :, rotated:]], dim=-1)
            torch.testing.assert_close(after[token], expected)
    for token, slot in ((0, 21), (2, 16)):
        torch.testing.assert_close(k_cache[slot // 16, :, slot % 16], rotated_k[token])
        torch.testing.assert_close(v_cache[slot // 16, :, slot % 16], v[token])
    # Two slots were written, and nothing else outside the null block.
    assert k_cache[1:].isfinite().sum() == v_cache[1:].isfinite().sum() == 2 * 2 * 8


def test_norms_and_gate() -> None:
    x = torch.randn((5, 12), generator=torch.Generator().manual_seed(0))
    residual, weight = x.flip(0), x[0]
    backend = CpuBackend()
    expected = torch.nn.functional.rms_norm(x, (12,), weight, 1e-6)
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-6), expected)
    normed, total = backend.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, backend.rms_norm(x + residual, weight, 1e-6))
    gated = backend.silu_mul(x)
    torch.testing.assert_close(gated, x[:, :6] * x[:, :6].sigmoid() * x[:, 6:])
    twice_u = (8 / torch.pi) ** 0.5 * (x[:, :6] + 0.044715 * x[:, :6] ** 3)
    torch.testing.assert_close(backend.gelu_mul(x), x[:, :6] * twice_u.sigmoid() * x[:, 6:])


def test_a_cpu_worker_imports_no_triton() -> None:
    script = (
        "import sys, octavo_worker.loading, octavo_worker.server\n"
        "from octavo_worker.backends import choose_backend\n"
        "backend, device = choose_backend('cpu')\n"
        "assert (backend.name, device.type) == ('cpu', 'cpu')\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in "
        "('triton', 'octavo_kernels')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(given: str | None, expected: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    script = (
        "import sys, os, octavo_worker\n"
        "assert 'torch' not in sys.modules\n"
        f"assert os.environ['OMP_WAIT_POLICY'] == {expected!r}\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
