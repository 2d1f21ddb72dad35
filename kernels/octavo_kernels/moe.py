"""A mixture of experts as two grouped GEMMs over the pairs that a routing made.

    out[t] = sum over the k experts e chosen by t of
             weight(t, e) * down[e] (silu(gate[e] x[t]) * up[e] x[t])

with gate[e] and up[e] the halves of gate_up[e]. A program takes one tile of one expert's pairs
(`moe_routing`) and a block of the expert's outputs: an expert that nobody chose is never read, a
surplus tile ends at once, and the grid depends on shapes alone. The weights are the first operand
of the dots, so that their outputs fill the 64 rows of a tensor core's tile however few pairs
there are. Every pair has a row of its own in what the second GEMM writes, and a token's k rows are
added in the order of its experts: whoever else is in the batch, a row's sum is the same.

Rounded to x's dtype where transformers does: gate, up, silu, their product, each expert's output
before and after its weight. The sum over the experts is in float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, offset64
from octavo_kernels.moe_routing import Routing, choose_reference, route

_MAX_SUM_TILE = 1024


@triton.jit
def _load_tile(tiles):
    """(expert, first place among the pairs, rows) of the program's tile; 0 rows: none."""
    entry = tiles + tl.program_id(1) * 3
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _load_pairs(pairs, first, num_rows, TILE: tl.constexpr):
    """(pair, whether there is one) [TILE] of a tile's rows.

    A missing row computes the tile's first pair again, and stores nothing.
    """
    row = tl.arange(0, TILE)
    is_pair = row < num_rows
    return tl.load(pairs + first + tl.where(is_pair, row, 0)), is_pair


@triton.jit
def _store_pairs(out, value, pair, is_pair, column, is_column, SIZE: tl.constexpr):
    """Write value [BLOCK, TILE] to the pairs' rows of out [P, SIZE]."""
    target = out + offset64(pair, SIZE)[:, None] + column[None, :]
    tl.store(target, tl.trans(value), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _gate_up_kernel(
    out,  # [P, I], by pair
    x,
    gate_up,
    pairs,
    tiles,
    stride_x,
    stride_expert,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,  # of the outputs
    STEP: tl.constexpr,  # of the inputs
):
    expert, first, num_rows = _load_tile(  # pyright: ignore[reportGeneralTypeIssues] - it returns
        tiles
    )
    if num_rows == 0:
        return
    pair, is_pair = _load_pairs(pairs, first, num_rows, TILE)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < INNER
    step = tl.arange(0, STEP)
    source = x + offset64(pair // K, stride_x)[:, None] + step[None, :]
    gate_row = gate_up + offset64(expert, stride_expert) + (column * HIDDEN)[:, None]
    gate_row += step[None, :]
    up_row = gate_row + INNER * HIDDEN

    gate = tl.zeros([BLOCK, TILE], tl.float32)
    up = tl.zeros([BLOCK, TILE], tl.float32)
    for start in range(0, HIDDEN, STEP):
        if HIDDEN % STEP == 0 and INNER % BLOCK == 0:
            token = tl.load(source + start)
            gate_weight = tl.load(gate_row + start)
            up_weight = tl.load(up_row + start)
        else:
            is_in = step < HIDDEN - start
            mask = is_column[:, None] & is_in[None, :]
            token = tl.load(source + start, mask=is_in[None, :], other=0.0)
            gate_weight = tl.load(gate_row + start, mask=mask, other=0.0)
            up_weight = tl.load(up_row + start, mask=mask, other=0.0)
        token = tl.trans(token)
        gate = tl.dot(gate_weight, token, gate, input_precision="ieee")
        up = tl.dot(up_weight, token, up, input_precision="ieee")

    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    inner = (silu.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    _store_pairs(out, inner, pair, is_pair, column, is_column, INNER)


@triton.jit
def _down_kernel(
    out,  # [P, Hid], by pair
    inner,  # [P, I], by pair
    down,
    weights,
    pairs,
    tiles,
    stride_expert,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    expert, first, num_rows = _load_tile(  # pyright: ignore[reportGeneralTypeIssues] - as above
        tiles
    )
    if num_rows == 0:
        return
    pair, is_pair = _load_pairs(pairs, first, num_rows, TILE)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < HIDDEN
    step = tl.arange(0, STEP)
    source = inner + offset64(pair, INNER)[:, None] + step[None, :]
    weight_row = down + offset64(expert, stride_expert) + (column * INNER)[:, None]
    weight_row += step[None, :]

    total = tl.zeros([BLOCK, TILE], tl.float32)
    for start in range(0, INNER, STEP):
        if INNER % STEP == 0 and HIDDEN % BLOCK == 0:
            value = tl.load(source + start)
            weight = tl.load(weight_row + start)
        else:
            is_in = step < INNER - start
            mask = is_column[:, None] & is_in[None, :]
            value = tl.load(source + start, mask=is_in[None, :], other=0.0)
            weight = tl.load(weight_row + start, mask=mask, other=0.0)
        total = tl.dot(weight, tl.trans(value), total, input_precision="ieee")

    dtype = out.dtype.element_ty
    scaled = total.to(dtype).to(tl.float32) * tl.load(weights + pair)[None, :]
    _store_pairs(out, scaled.to(dtype), pair, is_pair, column, is_column, HIDDEN)


@triton.jit
def _sum_kernel(
    out,  # [T, Hid]
    parts,  # [P, Hid]
    slot_mapping,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    # Nobody wrote a dead token's parts.
    if tl.load(slot_mapping + token) >= 0:
        for j in tl.static_range(K):
            part = parts + offset64(token * K + j, HIDDEN) + column
            total += tl.load(part, mask=mask, other=0.0).to(tl.float32)
    target = out + offset64(token, HIDDEN) + column
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


class _Tiling(NamedTuple):
    """Sizes of a program's part of a GEMM, and how it's compiled."""

    block: int
    step: int
    num_warps: int
    num_stages: int


# By rows of a tile. 16: bound by reading the experts, so several programs a multiprocessor with
# deep pipelines; 128: bound by the tensor cores, so few and large.
_GATE_UP = {16: _Tiling(64, 64, 4, 4), 64: _Tiling(64, 64, 4, 3), 128: _Tiling(128, 64, 8, 3)}
_DOWN = {16: _Tiling(64, 128, 4, 4), 64: _Tiling(128, 64, 8, 4), 128: _Tiling(128, 64, 8, 4)}
# float32 uses no tensor cores: its products live in registers.
_FLOAT32 = _Tiling(32, 32, 4, 2)
TILES = tuple(_GATE_UP)


def tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: the least that holds an expert's even share of the pairs."""
    share = num_pairs / min(num_experts, num_pairs)
    if dtype == torch.float32:
        return TILES[0]
    return next((tile for tile in TILES if share <= tile), TILES[-1])


def moe_launches(
    out: Tensor,
    parts: Tensor,
    inner: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slot_mapping: Tensor,
    routing: Routing,
    tile: int,
) -> tuple[Launch, Launch, Launch]:
    """Gate-up, down, sum; parts [P, Hid] and inner [P, I] are scratch."""
    num_tokens, hidden = x.shape
    num_pairs, inner_size = inner.shape
    is_wide = x.dtype == torch.float32
    sizes = {"HIDDEN": hidden, "INNER": inner_size, "TILE": tile}
    top_k = num_pairs // num_tokens
    first = _FLOAT32 if is_wide else _GATE_UP[tile]
    gate_up_launch = Launch(
        kernel=_gate_up_kernel,
        grid=(cdiv(inner_size, first.block), routing.tiles.shape[0]),
        args=(
            *(inner, x, gate_up, routing.pairs, routing.tiles),
            *(x.stride(0), gate_up.stride(0)),
        ),
        constants=sizes | {"K": top_k, "BLOCK": first.block, "STEP": first.step},
        num_warps=first.num_warps,
        num_stages=first.num_stages,
    )
    second = _FLOAT32 if is_wide else _DOWN[tile]
    down_launch = Launch(
        kernel=_down_kernel,
        grid=(cdiv(hidden, second.block), routing.tiles.shape[0]),
        args=(parts, inner, down, *routing, down.stride(0)),
        constants=sizes | {"BLOCK": second.block, "STEP": second.step},
        num_warps=second.num_warps,
        num_stages=second.num_stages,
    )
    block = min(_MAX_SUM_TILE, next_power_of_2(hidden))
    sum_launch = Launch(
        kernel=_sum_kernel,
        grid=(num_tokens, cdiv(hidden, block)),
        args=(out, parts, slot_mapping),
        constants={"HIDDEN": hidden, "K": top_k, "BLOCK": block},
        num_warps=max(1, block // 256),
    )
    return gate_up_launch, down_launch, sum_launch


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slot_mapping: Tensor,
    *,
    top_k: int,
    renormalise: bool,
    tile: int | None = None,
) -> Tensor:
    """[T, Hid] in x's dtype; zeros for dead tokens, whatever their x and logits hold.

    x: [T, Hid], rows may be strided. router_logits: [T, E], any floating dtype. gate_up:
    [E, 2 I, Hid] and down: [E, Hid, I]; an expert's matrix is contiguous. slot_mapping: int64
    [T], -1 = dead. `renormalise`: the chosen experts' weights are divided by their sum. `tile`:
    16, 64 or 128 rows (None: by the number of pairs).
    """
    num_tokens, hidden = x.shape
    num_experts, inner_size = router_logits.shape[1], down.shape[2]
    assert gate_up.shape == (num_experts, 2 * inner_size, hidden), (gate_up.shape, x.shape)
    assert down.shape == (num_experts, hidden, inner_size), (down.shape, x.shape)
    assert gate_up.dtype == down.dtype == x.dtype, (gate_up.dtype, down.dtype, x.dtype)
    assert gate_up[0].is_contiguous()
    assert down[0].is_contiguous()
    assert 2 * inner_size * hidden < 2**31, gate_up.shape  # within an expert 32 bits do
    assert router_logits.shape[0] == num_tokens, (router_logits.shape, x.shape)
    assert x.stride(1) == 1, x.stride()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    num_pairs = num_tokens * top_k
    tile = tile or tile_rows(num_pairs, num_experts, x.dtype)
    routing = route(router_logits, slot_mapping, top_k=top_k, renormalise=renormalise, tile=tile)
    parts = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    inner = torch.empty((num_pairs, inner_size), dtype=x.dtype, device=x.device)
    for launch in moe_launches(out, parts, inner, x, gate_up, down, slot_mapping, routing, tile):
        launch.run()
    return out


class Work(NamedTuple):
    """What the mathematics asks of a card, whatever kernel does it."""

    num_bytes: int
    num_flops: int


def moe_work(
    num_tokens: int, num_hit: int, hidden: int, inner_size: int, top_k: int, itemsize: int
) -> Work:
    """Reading the `num_hit` chosen experts and the tokens and writing the results, once each;
    three products a pair."""
    num_weights = num_hit * 3 * hidden * inner_size
    num_flops = 2 * num_tokens * top_k * 3 * hidden * inner_size
    return Work((num_weights + 2 * num_tokens * hidden) * itemsize, num_flops)


def moe_reference(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slot_mapping: Tensor,
    *,
    top_k: int,
    renormalise: bool,
) -> Tensor:
    weights, chosen = choose_reference(router_logits, top_k=top_k, renormalise=renormalise)
    out = torch.zeros_like(x)
    for token in (slot_mapping >= 0).nonzero().flatten().tolist():
        total = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate.float()).to(x.dtype) * up
            total += ((down[expert] @ inner) * weight).to(x.dtype).float()
        out[token] = total.to(x.dtype)
    return out
