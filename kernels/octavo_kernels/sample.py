"""Sampling without a sort: an exponential race, then accept or raise the pivot.

    drawn = argmax over allowed t of  logit_t / temperature - log(e_t)

with e_t standard exponentials (`philox`) draws from softmax(logit / temperature) over the allowed
tokens. The first round allows all. The drawn token is accepted if the mass of the tokens strictly
likelier than it is < top_p, their count is < top_k (if top_k > 0) and p_t >= min_p * max p; else
the next round, with new exponentials, allows only the strictly likelier ones. Every round draws
proportionally to p from a superset of the filtered set, so the first accepted token is a draw from
the filtered distribution: rejection sampling with a pivot, as FlashInfer's sampler does (2024).

Temperature 0 is greedy: the first of the largest logits. A row that has a NaN or +inf, or no
finite logit, gets token -1 and harms no other row; -inf masks a token out.

A round reads the row once, twice if it filters. Few rows are cut into parts, so that the first
race runs on the whole card; the last part to arrive draws, and runs further rounds alone.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, num_multiprocessors, offset64
from octavo_kernels.philox import exponentials, exponentials_reference, log32

BAD_ROW = -1
_MAX_TILE = 4096
_MOST_PARTS = 64
# Below it logit / temperature could overflow; the race is long decided.
_MIN_TEMPERATURE = 1e-30
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _first_of_max(value, token):
    """(max value, the smallest token that has it) over lanes."""
    largest = tl.max(value, axis=0)
    return largest, tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0)


@triton.jit
def _race(
    logits,
    temperature,
    seed,
    position,
    sequence_index,
    draw_round,
    pivot,
    begin,  # a multiple of TILE
    end,
    IS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
):
    """(best key, its token, max logit, is bad) among the logits [begin, end) above the pivot."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    bad = tl.zeros([TILE], tl.int32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
        bad |= ((logit != logit) | (logit == float("inf"))).to(tl.int32)
        top = tl.maximum(top, logit)
        if IS_GREEDY:
            key = logit
        else:
            e = exponentials(seed, start // 4, position, sequence_index, draw_round, TILE // 4)
            key = tl.where(logit > pivot, tl.div_rn(logit, temperature) - log32(e), float("-inf"))
        is_better = key > best
        best = tl.where(is_better, key, best)
        best_token = tl.where(is_better, token, best_token)
    best, best_token = _first_of_max(best, best_token)
    return best, best_token, tl.max(top, axis=0), tl.max(bad, axis=0)


@triton.jit
def _likelier(logits, temperature, top, pivot, vocab_size, TILE: tl.constexpr):
    """(mass of all, mass above the pivot, count above the pivot), masses in units of max p."""
    total = tl.zeros([TILE], tl.float32)
    above = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.int32)
    # A sum's order decides its last digits anyway, so no division is needed here.
    scale = _LOG2_E / temperature
    for start in range(0, vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        logit = logit.to(tl.float32)
        mass = tl.exp2((logit - top) * scale)
        total += mass
        above += tl.where(logit > pivot, mass, 0.0)
        count += (logit > pivot).to(tl.int32)
    return tl.sum(total, axis=0), tl.sum(above, axis=0), tl.sum(count, axis=0)


@triton.jit
def _join_parts(
    keys,
    tokens,
    tops,
    bads,
    tickets,
    row,
    best,
    token,
    top,
    bad,
    MOST_PARTS: tl.constexpr,
):
    """(is last, best key, its token, max logit, is bad) of all parts; right for the last alone."""
    num_parts = tl.num_programs(1)
    at = row * num_parts + tl.program_id(1)
    tl.store(keys + at, best)
    tl.store(tokens + at, token)
    tl.store(tops + at, top)
    tl.store(bads + at, bad)
    # All of this program's stores come before its ticket; who draws the last sees all others'.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu")
    is_last = ticket == num_parts - 1
    part = tl.arange(0, MOST_PARTS)
    mask = (part < num_parts) & is_last
    at = row * num_parts + part
    key = tl.load(keys + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    name = tl.load(tokens + at, mask=mask, other=0, cache_modifier=".cg")
    best = tl.max(key, axis=0)
    token = tl.min(tl.where(key == best, name, 0x7FFFFFFF), axis=0)
    top = tl.max(tl.load(tops + at, mask=mask, other=float("-inf"), cache_modifier=".cg"), axis=0)
    bad = tl.max(tl.load(bads + at, mask=mask, other=0, cache_modifier=".cg"), axis=0)
    return is_last, best, token, top, bad


@triton.jit
def _sample_kernel(
    out,  # int64 [S]
    logits,  # [S, V]
    keys,  # [S, parts] float32, int32, float32, int32; not touched unless IS_CUT
    tokens,
    tops,
    bads,
    tickets,  # int32 [S], zero between launches
    temperature,
    top_p,
    top_k,
    min_p,
    seed,
    position,
    sequence_index,
    stride_logits,
    vocab_size,
    part_size,  # a multiple of TILE
    MIN_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
    IS_CUT: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    logits += offset64(row, stride_logits)
    heat = tl.load(temperature + row)
    is_greedy = heat <= 0.0
    heat = tl.maximum(heat, MIN_TEMPERATURE)
    row_seed = tl.load(seed + row)
    row_position = tl.load(position + row)
    row_sequence = tl.load(sequence_index + row)
    row_top_p = tl.load(top_p + row)
    row_top_k = tl.load(top_k + row)
    row_min_p = tl.load(min_p + row)
    is_filtered = (row_top_p < 1.0) | (row_top_k > 0) | (row_min_p > 0.0)

    begin = tl.program_id(1) * part_size
    end = tl.minimum(begin + part_size, vocab_size)
    draw_round = tl.zeros([], tl.int32)
    pivot = tl.full([], float("-inf"), tl.float32)
    if is_greedy:
        best, drawn, top, bad = _race(logits, heat, 0, 0, 0, 0, 0.0, begin, end, True, TILE)
    else:
        best, drawn, top, bad = _race(
            *(logits, heat, row_seed, row_position, row_sequence, draw_round, pivot),
            *(begin, end, False, TILE),
        )
    if IS_CUT:
        is_last, best, drawn, top, bad = _join_parts(
            *(keys, tokens, tops, bads, tickets, row, best, drawn, top, bad, MOST_PARTS)
        )
        if not is_last:
            return
        tl.store(tickets + row, 0)

    is_good = (bad == 0) & (best > float("-inf"))
    token = tl.where(is_good, drawn, -1)
    is_drawing = is_good & is_filtered & (not is_greedy)
    while is_drawing:
        pivot = tl.load(logits + drawn).to(tl.float32)
        total, above, count = _likelier(logits, heat, top, pivot, vocab_size, TILE)
        p_of_max = tl.exp(tl.div_rn(pivot, heat) - tl.div_rn(top, heat))
        is_drawing = (
            ((row_top_p < 1.0) & (above >= row_top_p * total))
            | ((row_top_k > 0) & (count >= row_top_k))
            | (p_of_max < row_min_p)
        )
        if is_drawing:
            draw_round += 1
            best, drawn, _, _ = _race(
                *(logits, heat, row_seed, row_position, row_sequence, draw_round, pivot),
                *(0, vocab_size, False, TILE),
            )
            # Nothing was above the pivot: it is the maximum, which not even the filter accepted
            # (top_p = 0): it stays the answer.
            is_drawing = best > float("-inf")
            token = tl.where(is_drawing, drawn, token)
    tl.store(out + row, token.to(tl.int64))


class Parts(NamedTuple):
    """Where the parts of a row's first race meet; each [S, parts], tickets int32 [S] of zeros."""

    keys: Tensor
    tokens: Tensor
    tops: Tensor
    bads: Tensor
    tickets: Tensor


def num_parts(num_rows: int, vocab_size: int, num_sms: int) -> int:
    """So many parts a row that the card is full, each at least a tile."""
    wanted = max(1, 2 * num_sms // max(num_rows, 1))
    return min(wanted, cdiv(vocab_size, _MAX_TILE), _MOST_PARTS)


def make_parts(num_rows: int, parts: int, device: torch.device) -> Parts:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, parts), dtype=dtype, device=device)

    tickets = torch.zeros(num_rows, dtype=torch.int32, device=device)
    integers, floats = torch.int32, torch.float32
    return Parts(empty(floats), empty(integers), empty(floats), empty(integers), tickets)


def sample_launch(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    sequence_index: Tensor,
    *,
    parts: Parts | None = None,
) -> Launch:
    num_rows, vocab_size = logits.shape
    tile = max(16, min(_MAX_TILE, next_power_of_2(vocab_size)))
    parameters = (temperature, top_p, top_k, min_p, seed, position, sequence_index)
    count = 1 if parts is None else parts.keys.shape[1]
    places = parts or (logits, logits, logits, logits, logits)
    part_size = cdiv(cdiv(vocab_size, count), tile) * tile
    return Launch(
        kernel=_sample_kernel,
        grid=(num_rows, count),
        args=(out, logits, *places, *parameters, logits.stride(0), vocab_size, part_size),
        constants={
            "MIN_TEMPERATURE": _MIN_TEMPERATURE,
            "TILE": tile,
            # The number of parts itself is no constant: each would be another compilation.
            "IS_CUT": count > 1,
            "MOST_PARTS": _MOST_PARTS,
        },
        num_warps=max(1, tile // 128),
        # One rounding more or less could decide a race: as on the host, none is fused away.
        enable_fp_fusion=False,
    )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    sequence_index: Tensor,
    *,
    parts: int | None = None,
) -> Tensor:
    """One token per row: int64 [S]; -1 for a bad row.

    logits: float32, bfloat16 or float16 [S, V]. temperature (0 = greedy), top_p (1 = off), min_p
    (0 = off): float32 [S]. top_k: int32 [S], 0 = off. seed: int64 [S], the bits of an unsigned
    seed. position: int64 [S] < 2**32, the index in its sequence of the token drawn.
    sequence_index: int32 [S]. `parts`: of a row's first race; None = so many that they fill the
    card.
    """
    assert logits.ndim == 2, logits.shape
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert 0 < logits.shape[1] < 2**30, logits.shape
    for parameter, dtype in (
        (temperature, torch.float32),
        (top_p, torch.float32),
        (top_k, torch.int32),
        (min_p, torch.float32),
        (seed, torch.int64),
        (position, torch.int64),
        (sequence_index, torch.int32),
    ):
        assert parameter.shape == logits.shape[:1], (parameter.shape, logits.shape)
        assert parameter.dtype == dtype, (parameter.dtype, dtype)
        assert parameter.is_contiguous()
    out = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    if out.numel():
        num_rows, vocab_size = logits.shape
        if parts is None:
            parts = num_parts(num_rows, vocab_size, num_multiprocessors(logits.device))
        sample_launch(
            *(out, logits, temperature, top_p, top_k, min_p, seed, position, sequence_index),
            parts=make_parts(num_rows, parts, logits.device) if parts > 1 else None,
        ).run()
    return out


def _sample_row_reference(
    logits: Tensor,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    position: int,
    sequence_index: int,
) -> int:
    if (
        bool(logits.isnan().any())
        or bool((logits == torch.inf).any())
        or not bool(logits.isfinite().any())
    ):
        return BAD_ROW
    if temperature <= 0.0:
        return int((logits == logits.max()).nonzero()[0])
    scaled = logits / max(temperature, _MIN_TEMPERATURE)
    mass = (scaled - scaled.max()).exp()
    token, pivot, draw_round = BAD_ROW, float("-inf"), 0
    while bool((logits > pivot).any()):
        e = exponentials_reference(seed, len(logits), position, sequence_index, draw_round)
        key = (scaled - e.log()).masked_fill(logits <= pivot, float("-inf"))
        token = int((key == key.max()).nonzero()[0])
        pivot = float(logits[token])
        likelier = logits > pivot
        if (
            (top_p >= 1.0 or float(mass[likelier].sum()) < top_p * float(mass.sum()))
            and (top_k <= 0 or int(likelier.sum()) < top_k)
            and float(mass[token]) >= min_p
        ):
            break
        draw_round += 1
    return token


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    sequence_index: Tensor,
) -> Tensor:
    """On the host whatever the device, row by row."""
    rows = logits.cpu()
    parameters = (temperature, top_p, top_k, min_p, seed, position, sequence_index)
    tokens = [
        _sample_row_reference(rows[row], *values)
        for row, values in enumerate(zip(*(p.tolist() for p in parameters), strict=True))
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
