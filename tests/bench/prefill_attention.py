"""Every way a card can attend to prompts: is it right, and how fast is it?

Ours (in several tilings), cuDNN through NVIDIA's front end (if it is installed), cuDNN and flash
through torch; over un-cached prompts and over paged prefixes, with the heads of Llama 3.1 8B. Each
way is checked first: against float32, on ragged chunks; and whether a NaN in one chunk stays there.
A line is printed as soon as it is measured; what fails says so; nothing starts after the time is
up.

Run on a card: python -m tests.bench.prefill_attention
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from octavo_kernels import paged_prefill
from octavo_kernels.paged_kv import attention_reference
from octavo_kernels.paged_prefill import Tiles
from octavo_worker.attention_inputs import AttentionOptions, StepInputs
from octavo_worker.backends.cudnn_prefill import CudnnPrefill

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
# (tokens before, tokens of the chunk)
RAGGED = [(0, 700), (0, 1), (0, 513), (0, 129), (0, 1024)]
CACHED = [(1000, 600), (0, 513), (16, 1), (333, 257)]
FRESH_SHAPES = {
    "4 x 4000": [(0, 4000)] * 4,
    "1 x 8192": [(0, 8192)],
    "16 x 512": [(0, 512)] * 16,
    "ragged 8192": [(0, new) for new in (3000, 517, 1701, 64, 2910)],
}
CACHED_SHAPES = {
    "2048 after 30720": [(30_720, 2048)],
    "512 after 8192": [(8192, 512)],
    "8 x 256 after 2048": [(2048, 256)] * 8,
}
# The first is what the kernel takes by itself.
TILES = (
    Tiles(128, 64, 8, 3),
    Tiles(128, 128, 8, 2),
    Tiles(128, 128, 8, 3),
    Tiles(128, 64, 8, 5),
    Tiles(64, 64, 4, 3),
    Tiles(128, 32, 8, 3),
)
_SECONDS_A_SHAPE = 0.12
WORST_ERROR = 0.03  # of bf16, values of about 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks with their contexts in scattered blocks, and their own keys and values aside."""

    chunks: Sequence[tuple[int, int]]
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, K, D]
    v: Tensor  # like k; its rows lie apart, as in a fused projection
    k_cache: Tensor
    v_cache: Tensor
    inputs: StepInputs

    @property
    def flops(self) -> int:
        pairs = sum(before * new + new * (new + 1) // 2 for before, new in self.chunks)
        return 4 * HEADS * HEAD_DIM * pairs

    @property
    def borders(self) -> list[int]:
        return self.inputs.cu_seqlens_q.tolist()


Call = Callable[[], Tensor]
Way = Callable[[Batch], Call]


def make_batch(
    chunks: Sequence[tuple[int, int]], device: str, dtype: torch.dtype = torch.bfloat16
) -> Batch:
    lengths = [before + new for before, new in chunks]
    num_tokens = sum(new for _, new in chunks)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    width = -(-max(lengths) // BLOCK)
    num_blocks = 1 + width * len(chunks)
    order = 1 + torch.randperm(num_blocks - 1, generator=generator, device=device)
    table = order.int().view(len(chunks), width)
    caches = [normal(num_blocks, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2)]
    own: list[Tensor] = []
    for cache in caches:
        parts = [
            _context(cache, table[row], length)[before:]
            for row, (length, (before, _)) in enumerate(zip(lengths, chunks, strict=True))
        ]
        own.append(torch.cat(parts))
    wide = normal(num_tokens, 3 * KV_HEADS, HEAD_DIM)
    wide[:, -KV_HEADS:] = own[1]
    borders = torch.tensor([0, *(new for _, new in chunks)], device=device).cumsum(0).int()
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    inputs = StepInputs(
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        num_prefill_tokens=num_tokens,
        cu_seqlens_q=borders,
        prefill_context_lens=context_lens,
        prefill_block_table=table,
        max_seqlen_q=max(new for _, new in chunks),
        max_context_prefill=max(lengths),
        decode_context_lens=nothing,
        decode_block_table=nothing.view(0, 0),
        max_context_decode=0,
        is_fresh=all(before == 0 for before, _ in chunks),
    )
    q = normal(num_tokens, HEADS, HEAD_DIM)
    return Batch(chunks, q, own[0], wide[:, -KV_HEADS:], *caches, inputs)


def _context(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` tokens [length, K, D] of a row."""
    return cache[blocks.long()].transpose(1, 2).flatten(0, 1)[:length]


def expected(batch: Batch) -> Tensor:
    """By float32."""
    outputs: list[Tensor] = []
    for row, ((before, new), (start, end)) in enumerate(
        zip(batch.chunks, pairwise(batch.borders), strict=True)
    ):
        blocks = batch.inputs.prefill_block_table[row]
        k, v = (_context(c, blocks, before + new).float() for c in (batch.k_cache, batch.v_cache))
        outputs.append(attention_reference(batch.q[start:end].float(), k, v, before, SCALE))
    return torch.cat(outputs)


def spoil(batch: Batch, chunk: int) -> None:
    """All keys and values of one chunk become NaN."""
    start, end = batch.borders[chunk : chunk + 2]
    batch.k[start:end] = batch.v[start:end] = torch.nan
    blocks = batch.inputs.prefill_block_table[chunk].long()
    batch.k_cache[blocks] = batch.v_cache[blocks] = torch.nan


# Ways ---------------------------------------------------------------------------------


def triton(tiles: Tiles) -> Way:
    def way(batch: Batch) -> Call:
        inputs, out = batch.inputs, torch.empty_like(batch.q)
        borders = inputs.cu_seqlens_q
        items = paged_prefill.prefill_work_list(batch.q, borders, KV_HEADS, tiles)
        launch = paged_prefill.paged_prefill_launch(
            *(out, batch.q, batch.k_cache, batch.v_cache, inputs.prefill_block_table, items),
            *(borders, inputs.prefill_context_lens, SCALE),
            tiles=tiles,
        )

        def call() -> Tensor:
            launch.run()
            return out

        return call

    return way


def cudnn_fresh(cudnn: CudnnPrefill) -> Way:
    options = AttentionOptions(SCALE)
    return lambda batch: (
        lambda: cudnn.attend_fresh(batch.q, batch.k, batch.v, batch.inputs, options)
    )


def cudnn_paged(cudnn: CudnnPrefill) -> Way:
    options = AttentionOptions(SCALE)
    return lambda batch: (
        lambda: cudnn.attend_paged(batch.q, batch.k_cache, batch.v_cache, batch.inputs, options)
    )


def torch_flash(batch: Batch) -> Call:
    borders, longest = batch.inputs.cu_seqlens_q, batch.inputs.max_seqlen_q
    return lambda: torch.ops.aten._flash_attention_forward(
        *(batch.q, batch.k, batch.v, borders, borders, longest, longest, 0.0, True, False),
        scale=SCALE,
    )[0]


def torch_cudnn_by_chunk(batch: Batch) -> Call:
    def call() -> Tensor:
        v = batch.v.contiguous()
        outputs: list[Tensor] = []
        for start, end in spans:
            parts = (x[start:end].transpose(0, 1)[None] for x in (batch.q, batch.k, v))
            out = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *parts, None, False, 0.0, True, False, scale=SCALE
            )[0]
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    spans = list(pairwise(batch.borders))
    return call


def torch_cudnn_ragged(batch: Batch) -> Call:
    borders, longest = batch.inputs.cu_seqlens_q, batch.inputs.max_seqlen_q
    return lambda: torch.ops.aten._cudnn_attention_forward(
        *(batch.q, batch.k, batch.v, None, borders, borders, longest, longest),
        *(False, 0.0, True, False),
        scale=SCALE,
    )[0]


# Checks and times ---------------------------------------------------------------------


def check(way: Way, chunks: Sequence[tuple[int, int]], device: str = "cuda") -> tuple[float, bool]:
    """(the largest difference from float32, whether a NaN stays in its chunk)."""
    batch = make_batch(chunks, device)
    difference = float((way(batch)().float() - expected(batch)).abs().max())
    bad = 2
    spoil(batch, bad)
    start, end = batch.borders[bad : bad + 2]
    out = way(batch)()
    others = torch.cat([out[:start], out[end:]])
    return difference, bool(others.isfinite().all())


def time_ms(call: Call) -> tuple[float, float]:
    """(median of a call, the first one: what is compiled or planned)."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first_ms = 1e3 * (time.perf_counter() - began)
    times: list[float] = []
    deadline = time.perf_counter() + _SECONDS_A_SHAPE
    while time.perf_counter() < deadline or len(times) < 2:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), first_ms


def ways() -> Iterator[tuple[str, Callable[[], Way], bool]]:
    """(name, how to get it, whether it attends to cached prefixes); the surest first."""
    for tiles in TILES:
        name = "triton " + "x".join(map(str, tiles))
        yield name, lambda tiles=tiles: triton(tiles), True
    yield "torch flash", lambda: torch_flash, False
    yield "torch cudnn, chunk by chunk", lambda: torch_cudnn_by_chunk, False
    yield "cudnn, fresh", lambda: cudnn_fresh(CudnnPrefill()), False
    yield "cudnn, paged", lambda: cudnn_paged(CudnnPrefill()), True
    yield "torch cudnn, ragged", lambda: torch_cudnn_ragged, False


def measure(
    name: str, get: Callable[[], Way], *, is_paged: bool, is_up: Callable[[], bool]
) -> None:
    way = get()
    for chunks in (RAGGED, CACHED) if is_paged else (RAGGED,):
        difference, is_contained = check(way, chunks)
        verdict = "right" if difference < WORST_ERROR else "WRONG"
        nan = "stays" if is_contained else "SPREADS"
        print(f"{name:28} {verdict}: within {difference:.4f} of float32; a NaN {nan}", flush=True)
    for shape, chunks in (FRESH_SHAPES | CACHED_SHAPES if is_paged else FRESH_SHAPES).items():
        if is_up():
            return
        batch = make_batch(chunks, "cuda")
        ms, first_ms = time_ms(way(batch))
        tflop_s = batch.flops / ms / 1e9
        print(
            f"{name:28} {shape:18} {ms:8.3f} ms {tflop_s:6.1f} TFLOP/s, first {first_ms:.0f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40, help="start nothing after these")
    parser.add_argument("--only", default="", help="ways with this in their name")
    arguments = parser.parse_args()
    # Without it torch's cuDNN makes a plan for each length; it is read at the first call.
    os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    deadline = time.monotonic() + arguments.seconds

    def is_up() -> bool:
        return time.monotonic() > deadline

    print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
    for name, get, is_paged in ways():
        if arguments.only not in name:
            continue
        if is_up():
            print(f"{name:28} out of time", flush=True)
            continue
        try:
            measure(name, get, is_paged=is_paged, is_up=is_up)
        except Exception as error:
            print(f"{name:28} failed: {type(error).__name__}: {error}"[:600], flush=True)


if __name__ == "__main__":
    main()
