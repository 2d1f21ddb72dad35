"""Which experts compute which tokens: the routing of a mixture of experts, and its work list.

    p = softmax(router logits);  weight(t, e) = p(t, e) [/ the sum of p over the chosen]

for the k experts e with the largest logits (the lower one of equals). Shazeer et al., "Outrageously
Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017. Everything in float32.

A *pair* is the j-th best expert of token t, number t * k + j. The pairs are sorted by expert (a
counting sort: within an expert by token, so that nothing depends on timing) and cut into tiles of
at most TILE pairs of one expert, what one program of a grouped GEMM takes. The host knows only
bounds: the table has room for the most tiles that so many pairs can need, and a surplus tile has
no rows. Dead tokens (slot -1) choose nothing: they are in no tile.

One program takes a chunk of tokens as a [tokens, E] matrix. If one chunk holds all, one launch
does everything; else a first launch counts every chunk's experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, offset64

MAX_EXPERTS = 512
_MAX_MATRIX = 4096  # elements of a chunk's [tokens, E]
_MIN_TOKENS, _MAX_TOKENS = 16, 128
_CHUNKS = 32  # chunks' counts added up at a time
# Beyond any logit, and twice it is still finite.
LARGE = tl.constexpr(1e38)
_TILES = 32  # rows of the tile table made at a time


class Routing(NamedTuple):
    """The work list of one layer and step; T tokens, k experts a token, P = T * k pairs.

    weights: float32 [P], of a pair; undefined for dead tokens.
    pairs: int32 [P], pair numbers by expert; only those that tiles name are defined.
    tiles: int32 [max_tiles, 3]: (expert, first index into `pairs`, number of rows).
    """

    weights: Tensor
    pairs: Tensor
    tiles: Tensor


@triton.jit
def _choose(
    router_logits,
    slot_mapping,
    token,
    expert,
    num_tokens,
    stride_logits,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """(place, weight), both [tokens, E]: j where the expert is the token's j-th best, else -1."""
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    is_live = slot >= 0
    mask = is_live[:, None] & (expert < E)[None, :]
    source = router_logits + offset64(token, stride_logits)[:, None] + expert[None, :]
    logit = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
    # A token with a NaN or +inf, or with nothing but -inf, still chooses experts that exist: each
    # logit gets a rank among finite numbers. Its weights are NaN, so the row is seen to be bad.
    key = tl.minimum(tl.maximum(tl.where(logit == logit, logit, -LARGE), -LARGE), LARGE)
    key = tl.where(mask, key, float("-inf"))
    top = tl.where(is_live, tl.max(key, axis=1), 0.0)
    is_bad = tl.max(((logit != logit) | (logit == float("inf"))).to(tl.int32), axis=1) != 0
    is_bad = is_bad | (top == -LARGE)
    mass = tl.exp(key - top[:, None])
    total = tl.where(is_live, tl.sum(mass, axis=1), 1.0)
    probability = tl.where(is_bad[:, None], float("nan"), mass / total[:, None])

    place = tl.full(logit.shape, -1, tl.int32)
    kept = tl.zeros(token.shape, tl.float32)
    for j in tl.static_range(K):
        best = tl.max(key, axis=1)
        first = tl.min(tl.where(key == best[:, None], expert[None, :], E - 1), axis=1)
        is_it = expert[None, :] == first[:, None]
        kept += tl.sum(tl.where(is_it, probability, 0.0), axis=1)
        place = tl.where(is_it & is_live[:, None], j, place)
        key = tl.where(is_it, float("-inf"), key)
    weight = probability
    if RENORMALISE:
        weight = probability / tl.where(is_live, kept, 1.0)[:, None]
    return place, weight


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    counts,  # int32 [chunks, E]
    router_logits,
    slot_mapping,
    num_tokens,
    stride_logits,
    E: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    E_PAD: tl.constexpr,
):
    chunk = tl.program_id(0)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, E_PAD)
    place, _ = _choose(  # pyright: ignore[reportGeneralTypeIssues] - inside a kernel it returns
        router_logits, slot_mapping, token, expert, num_tokens, stride_logits, E, K, False
    )
    count = tl.sum((place >= 0).to(tl.int32), axis=0)
    tl.store(counts + chunk * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "max_tiles"])
def _route_kernel(
    weights,
    pairs,
    tiles,
    counts,  # not touched if IS_ALONE
    router_logits,
    slot_mapping,
    num_tokens,
    num_chunks,
    max_tiles,
    stride_logits,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    IS_ALONE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
):
    chunk = tl.program_id(0)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, E_PAD)
    place, weight = _choose(  # pyright: ignore[reportGeneralTypeIssues] - as above
        *(router_logits, slot_mapping, token, expert, num_tokens, stride_logits),
        *(E, K, RENORMALISE),
    )
    is_chosen = (place >= 0).to(tl.int32)

    # Pairs of each expert in all chunks, and in those before this one.
    total = tl.sum(is_chosen, axis=0)
    before = tl.zeros([E_PAD], tl.int32)
    if not IS_ALONE:
        total = tl.zeros([E_PAD], tl.int32)
        for start in range(0, num_chunks, CHUNKS):
            other = start + tl.arange(0, CHUNKS)
            mask = (other < num_chunks)[:, None] & (expert < E)[None, :]
            count = tl.load(counts + other[:, None] * E + expert[None, :], mask=mask, other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where((other < chunk)[:, None], count, 0), axis=0)
    first = tl.cumsum(total, axis=0) - total

    rank = tl.cumsum(is_chosen, axis=0) - is_chosen
    position = (first + before)[None, :] + rank
    pair = token[:, None] * K + place
    tl.store(pairs + position, pair, mask=place >= 0)
    tl.store(weights + pair, weight, mask=place >= 0)

    # The tile table: every program makes a part of it.
    num_tiles = (total + TILE - 1) // TILE
    tiles_end = tl.cumsum(num_tiles, axis=0)
    tiles_start = tiles_end - num_tiles
    for start in range(chunk * TILES, max_tiles, num_chunks * TILES):
        tile = start + tl.arange(0, TILES)
        within = (tile[:, None] - tiles_start[None, :]) * TILE
        # One expert's lane for a tile, none for a surplus tile.
        mine = (tiles_start[None, :] <= tile[:, None]) & (tile[:, None] < tiles_end[None, :])
        tile_expert = tl.sum(tl.where(mine, expert[None, :], 0), axis=1)
        tile_first = tl.sum(tl.where(mine, first[None, :] + within, 0), axis=1)
        num_rows = tl.sum(tl.where(mine, tl.minimum(total[None, :] - within, TILE), 0), axis=1)
        mask = tile < max_tiles
        tl.store(tiles + tile * 3, tile_expert, mask=mask)
        tl.store(tiles + tile * 3 + 1, tile_first, mask=mask)
        tl.store(tiles + tile * 3 + 2, num_rows, mask=mask)


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """The most tiles that `num_pairs` pairs can need: every expert that is hit may have a tile
    of one pair, and the other pairs fill whole tiles."""
    num_hit = min(num_pairs, num_experts)
    return num_hit + (num_pairs - num_hit) // tile


def tokens_of_chunk(num_tokens: int, num_experts: int) -> int:
    """Tokens that one program routes: one of two sizes, so that little is compiled."""
    large = _MAX_MATRIX // next_power_of_2(num_experts)
    large = min(max(large, _MIN_TOKENS), _MAX_TOKENS)
    return _MIN_TOKENS if num_tokens <= _MIN_TOKENS else large


def route_launches(
    routing: Routing,
    counts: Tensor,
    router_logits: Tensor,
    slot_mapping: Tensor,
    *,
    renormalise: bool,
    tile: int,
) -> tuple[Launch, ...]:
    """One launch, or two if `counts` (int32 [chunks, E]) has more than one chunk."""
    num_tokens, num_experts = router_logits.shape
    num_chunks = counts.shape[0]
    chunk_tokens = tokens_of_chunk(num_tokens, num_experts)
    padded = next_power_of_2(num_experts)
    sizes = {
        "E": num_experts,
        "K": routing.weights.shape[0] // num_tokens,
        "TOKENS": chunk_tokens,
        "E_PAD": padded,
    }
    num_warps = max(1, min(8, chunk_tokens * padded // 256))
    count = Launch(
        kernel=_count_kernel,
        grid=(num_chunks,),
        args=(counts, router_logits, slot_mapping, num_tokens, router_logits.stride(0)),
        constants=sizes,
        num_warps=num_warps,
    )
    route = Launch(
        kernel=_route_kernel,
        grid=(num_chunks,),
        args=(
            *(*routing, counts, router_logits, slot_mapping),
            *(num_tokens, num_chunks, routing.tiles.shape[0], router_logits.stride(0)),
        ),
        constants=sizes
        | {"RENORMALISE": renormalise, "IS_ALONE": num_chunks == 1, "TILE": tile}
        | {"CHUNKS": _CHUNKS, "TILES": _TILES},
        num_warps=num_warps,
    )
    return (route,) if num_chunks == 1 else (count, route)


def route(
    router_logits: Tensor, slot_mapping: Tensor, *, top_k: int, renormalise: bool, tile: int
) -> Routing:
    """The work list of T > 0 tokens: router_logits [T, E], slot_mapping int64 [T] (-1 = dead)."""
    num_tokens, num_experts = router_logits.shape
    assert router_logits.stride(1) == 1, router_logits.stride()
    assert slot_mapping.shape == (num_tokens,), (slot_mapping.shape, router_logits.shape)
    assert slot_mapping.is_contiguous()
    assert 0 < top_k <= num_experts <= MAX_EXPERTS, (top_k, num_experts)
    device = router_logits.device
    num_pairs = num_tokens * top_k
    assert num_pairs < 2**31

    def int32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    routing = Routing(
        weights=torch.empty(num_pairs, dtype=torch.float32, device=device),
        pairs=int32(num_pairs),
        tiles=int32(max_tiles(num_pairs, num_experts, tile), 3),
    )
    counts = int32(cdiv(num_tokens, tokens_of_chunk(num_tokens, num_experts)), num_experts)
    for launch in route_launches(
        routing, counts, router_logits, slot_mapping, renormalise=renormalise, tile=tile
    ):
        launch.run()
    return routing


def choose_reference(
    router_logits: Tensor, *, top_k: int, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """(weights float32, experts int64), both [T, k], best first."""
    wide = router_logits.float()
    # A stable sort puts the lower one of equal experts first.
    order = wide.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = wide.softmax(-1).gather(1, order)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, order
