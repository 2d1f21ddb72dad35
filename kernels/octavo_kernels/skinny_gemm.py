"""Matrix products of a few rows with a wide weight, bound by the reading of the weight.

    out[m, n] = sum over k of x[m, k] * weight[n, k]  (+ bias[n])

The operands are swapped: the weight's rows are the M side of the tensor cores' dot, which takes
64 of them at once, and the few rows of x its N side (16 at least). Where the tiles of N can't
fill the card, K is split; the last program to arrive at a tile adds the parts in fixed order, so
that results don't depend on timing.

What stands between two products of a decoder layer is folded in. With `residual` the result is

    total = residual + product,    scaled = total * next_norm,    sums of squares of total

and a product over `scaled` that is given those sums multiplies each row by its 1 / rms at the
end: an RMSNorm's row factor commutes with the product, so x travels to the tensor cores
untouched. `gated`: out = silu(gate) * up of a weight [2 I, K] whose first half is the gate. Each
rounds once where the separate operations round, but for the norm, whose row factor is applied in
float32. M rows, N outputs, K inputs. A weight is a matrix, or 8-bit floats or 4-bit codes that are
widened on their way (`skinny_weight`); x is never rounded to fewer bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, offset64
from octavo_kernels.skinny_products import product
from octavo_kernels.skinny_tiles import Config, tile_rows
from octavo_kernels.skinny_weight import DENSE, E4M3, Weight, operands, size_of
from octavo_kernels.w4_weight import TILE_K, W4Weight


class Scratch:
    """Parts of split products and the tickets of their tiles; one a device, for one stream.

    Tickets are zero between launches: the last arriver puts its tile's back.
    """

    def __init__(self, device: torch.device, *, num_parts: int = 1 << 22) -> None:
        self.parts = torch.empty(num_parts, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(4096, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(pointers):
    """Ask for the lines of `pointers` to be in L2; results don't depend on it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _gather_parts(
    parts, tile, n_local, m, SPLIT: tl.constexpr, SIZE: tl.constexpr, TILE_M: tl.constexpr
):
    """The sum of a tile's parts, in order. n_local, m: [TILE_N], [TILE_M]."""
    offset = n_local[:, None] * TILE_M + m[None, :]
    total = tl.load(parts + offset64(tile * SPLIT, SIZE) + offset, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + offset64(tile * SPLIT + part, SIZE) + offset, cache_modifier=".cg")
    return total


# Every number of rows is one compilation: they differ from step to step.
@triton.jit(do_not_specialize=["num_m"])
def _skinny_gemm_kernel(
    out,  # [M, N]
    x,
    weight,  # [N, K] or, gated, [2 N, K]; in FORM
    factors,  # E4M3: scales [N] float32; W4: its groups
    bias,
    squares_in,  # [SQUARES_IN, M] float32: sums of squares, by the tiles of who wrote x
    residual,
    next_norm,  # [N]
    scaled,  # [M, N]
    squares_out,  # [tiles, M] float32
    parts,
    tickets,
    num_m,
    num_n,  # of the output: gated, half the weight's rows
    num_k,
    padded_n,  # of W4
    stride_x,
    eps,
    norm_scale,
    FORM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    GATED: tl.constexpr,
    JOINT: tl.constexpr,  # gate and up in one loop
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SQUARES_IN: tl.constexpr,
    SQUARES_IN_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_n = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    tile_m = tl.program_id(1)
    n_local = tl.arange(0, TILE_N)
    m_local = tl.arange(0, TILE_M)
    n = tile_n * TILE_N + n_local
    m = tile_m * TILE_M + m_local
    num_steps = num_k // TILE_K
    k_begin = split * num_steps // SPLIT * TILE_K
    k_end = (split + 1) * num_steps // SPLIT * TILE_K

    if PDL:
        # The weight is nobody's result: its first tile travels while the steps before end. More
        # tiles than one gained nothing.
        if FORM == DENSE:
            lines = tl.arange(0, max(TILE_K // 64, 1)) * 64
            _prefetch(weight + offset64(n, num_k)[:, None] + k_begin + lines[None, :])
        elif FORM == E4M3:
            _prefetch(weight + offset64(n, num_k // 4) + k_begin // 4)
        else:
            _prefetch(weight + (k_begin // 128 * padded_n + n) * 16)
        gdc_wait()
        if FORM == DENSE:
            gdc_launch_dependents()

    acc, up = product(  # pyright: ignore[reportGeneralTypeIssues] - kernels may return pairs
        *(weight, factors, x, n, m, num_n, num_m, num_k, padded_n, stride_x),
        *(num_n, k_begin, k_end, FORM, JOINT, TILE_N, TILE_M, EVEN_N, TILE_K, STAGES, PRECISION),
        *(GROUP, RUNS_PER_GROUP, ONE, ASM, CODE, SCALE),
    )
    if GATED and not JOINT:
        up, _ = product(
            *(weight, factors, x, n + num_n, m, 2 * num_n, num_m, num_k, padded_n, stride_x),
            *(num_n, k_begin, k_end, FORM, False, TILE_N, TILE_M, EVEN_N, TILE_K, STAGES),
            *(PRECISION, GROUP, RUNS_PER_GROUP, ONE, ASM, CODE, SCALE),
        )

    if PDL and FORM != DENSE:
        # Several programs of narrow weights share a multiprocessor. The next kernel's, if let in
        # before, lay unevenly in the room beside them, and the fullest were waited for.
        gdc_launch_dependents()
    if SPLIT > 1:
        SIZE: tl.constexpr = TILE_N * TILE_M * (2 if GATED else 1)
        tile = tile_m * (tl.num_programs(0) // SPLIT) + tile_n
        mine = parts + offset64(tile * SPLIT + split, SIZE)
        offset = n_local[:, None] * TILE_M + m_local[None, :]
        tl.store(mine + offset, acc)
        if GATED:
            tl.store(mine + TILE_N * TILE_M + offset, up)
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
        if ticket < SPLIT - 1:
            return
        tl.store(tickets + tile, 0)
        acc = _gather_parts(parts, tile, n_local, m_local, SPLIT, SIZE, TILE_M)
        if GATED:
            up = _gather_parts(parts + TILE_N * TILE_M, tile, n_local, m_local, SPLIT, SIZE, TILE_M)

    if HAS_NORM:
        tiles = tl.arange(0, SQUARES_IN_PAD)
        squares_mask = (tiles < SQUARES_IN)[:, None] & (m < num_m)[None, :]
        at = squares_in + tiles[:, None] * num_m + m[None, :]
        squares = tl.sum(tl.load(at, mask=squares_mask, other=0.0), axis=0)
        inverse_rms = (norm_scale * tl.rsqrt(squares / num_k + eps))[None, :]
        acc *= inverse_rms
        up *= inverse_rms
    dtype = out.dtype.element_ty
    mask = (n < num_n)[:, None] & (m < num_m)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < num_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + num_n + n, mask=n < num_n, other=0.0).to(tl.float32)[:, None]
    result = acc.to(dtype)
    if GATED:
        gate = result.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
        result = (silu.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    to = offset64(m, num_n)[None, :] + n[:, None]
    if HAS_RESIDUAL:
        other = tl.load(residual + to, mask=mask, other=0.0)
        wide = result.to(tl.float32) + other.to(tl.float32)
        result = wide.to(dtype)
        wide = tl.where(mask, result.to(tl.float32), 0.0)
        tl.store(squares_out + tile_n * num_m + m, tl.sum(wide * wide, axis=0), mask=m < num_m)
        factor = tl.load(next_norm + n, mask=n < num_n, other=0.0).to(tl.float32)
        tl.store(scaled + to, (wide * factor[:, None]).to(dtype), mask=mask)
    tl.store(out + to, result, mask=mask)


def skinny_gemm_launch(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    scratch: Scratch,
    config: Config,
    *,
    bias: Tensor | None = None,
    squares_in: Tensor | None = None,
    eps: float = 0.0,
    norm_scale: float = 1.0,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    scaled: Tensor | None = None,
    squares_out: Tensor | None = None,
    gated: bool = False,
    pdl: bool = False,
) -> Launch:
    own = operands(weight, x.dtype)
    num_m, num_k = x.shape
    num_n = size_of(weight)[0] // (2 if gated else 1)
    tile_m = tile_rows(num_m)
    num_tiles = cdiv(num_n, config.tile_n) * cdiv(num_m, tile_m)
    if config.split_k > 1:
        num_parts = num_tiles * config.split_k * config.tile_n * tile_m * (2 if gated else 1)
        assert num_parts <= scratch.parts.numel(), (num_parts, config)
        assert num_tiles <= scratch.tickets.numel(), (num_tiles, config)
    num_squares = 0 if squares_in is None else squares_in.shape[0]

    def or_any(tensor: Tensor | None) -> Tensor:
        """Some address, for a kernel that doesn't touch it."""
        return x if tensor is None else tensor

    return Launch(
        kernel=_skinny_gemm_kernel,
        grid=(cdiv(num_n, config.tile_n) * config.split_k, cdiv(num_m, tile_m)),
        args=(
            *(out, x, own.values, or_any(own.factors), or_any(bias)),
            scratch.parts if squares_in is None else squares_in,
            *(or_any(residual), or_any(next_norm), or_any(scaled)),
            scratch.parts if squares_out is None else squares_out,
            *(scratch.parts, scratch.tickets, num_m, num_n, num_k, own.padded_n),
            *(x.stride(0), eps, norm_scale),
        ),
        constants=own.constants
        | {
            "TILE_N": config.tile_n,
            "TILE_M": tile_m,
            "TILE_K": config.tile_k,
            "SPLIT": config.split_k,
            "STAGES": config.num_stages,
            "EVEN_N": num_n % config.tile_n == 0,
            "GATED": gated,
            "JOINT": gated and config.joint,
            "HAS_BIAS": bias is not None,
            "HAS_NORM": squares_in is not None,
            "HAS_RESIDUAL": residual is not None,
            "SQUARES_IN": num_squares,
            "SQUARES_IN_PAD": next_power_of_2(num_squares),
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "PDL": pdl,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )


class Sum(NamedTuple):
    """A product added to the residual stream, and what a product of its RMSNorm reads.

    total, scaled (= total * the norm's weight): [M, N]. squares: of total, float32 [tiles, M].
    """

    total: Tensor
    scaled: Tensor
    squares: Tensor


def skinny_gemm(
    x: Tensor,
    weight: Weight,
    scratch: Scratch,
    config: Config,
    *,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    norm_scale: float = 1.0,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """x [M, K] times weight [N, K]: [M, N]; K a multiple of the config's tile.

    A matrix is of x's dtype. `squares`: x is `Sum.scaled`, these are its `Sum.squares`; the
    product is then that of the RMSNorm with `eps`, times `norm_scale`. `gated`: weight is
    [2 N, K]; 4-bit codes then want N to be a multiple of the config's tile.
    """
    num_n = _check(x, weight, config, gated=gated)
    out = torch.empty(x.shape[0], num_n, dtype=x.dtype, device=x.device)
    skinny_gemm_launch(
        *(out, x, weight, scratch, config),
        bias=bias,
        squares_in=squares,
        eps=eps,
        norm_scale=norm_scale,
        gated=gated,
        pdl=pdl,
    ).run()
    return out


def skinny_gemm_add(
    x: Tensor,
    weight: Weight,
    scratch: Scratch,
    config: Config,
    residual: Tensor,
    next_norm: Tensor,
    *,
    pdl: bool = False,
) -> Sum:
    """residual [M, N] plus x [M, K] times weight [N, K], made ready for the norm after it.

    next_norm: that norm's weight [N].
    """
    num_n = _check(x, weight, config, gated=False)
    assert residual.shape == (x.shape[0], num_n)
    assert residual.is_contiguous()
    assert next_norm.shape == (num_n,)
    tiles = cdiv(num_n, config.tile_n)
    done = Sum(
        torch.empty_like(residual),
        torch.empty_like(residual),
        torch.empty(tiles, x.shape[0], dtype=torch.float32, device=x.device),
    )
    skinny_gemm_launch(
        *(done.total, x, weight, scratch, config),
        residual=residual,
        next_norm=next_norm,
        scaled=done.scaled,
        squares_out=done.squares,
        pdl=pdl,
    ).run()
    return done


def _check(x: Tensor, weight: Weight, config: Config, *, gated: bool) -> int:
    """The number of outputs."""
    height, num_k = size_of(weight)
    num_n = height // (2 if gated else 1)
    assert x.shape[1] == num_k, (x.shape, num_k)
    assert num_k % config.tile_k == 0, (num_k, config)
    assert x.stride(1) == 1
    if isinstance(weight, Tensor):
        assert x.dtype == weight.dtype
        assert weight.is_contiguous()
    elif isinstance(weight, W4Weight):
        assert config.tile_k == TILE_K, config
        assert not gated or num_n % config.tile_n == 0, (num_n, config)
    return num_n


def skinny_gemm_reference(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    product = x.double() @ weight.double().T
    if squares is not None:
        product *= torch.rsqrt(squares.double().sum(0) / x.shape[1] + eps)[:, None]
    if bias is not None:
        product += bias.double()
    if not gated:
        return product.to(x.dtype)
    gate, up = product.to(x.dtype).double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate).to(x.dtype).double() * up).to(x.dtype)


def skinny_gemm_add_reference(
    x: Tensor, weight: Tensor, residual: Tensor, next_norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(total, scaled, sums of squares float32 [M])."""
    product = skinny_gemm_reference(x, weight)
    total = (residual.float() + product.float()).to(x.dtype)
    scaled = (total.float() * next_norm.float()).to(x.dtype)
    return total, scaled, total.float().pow(2).sum(-1)
