"""What a kernel must fulfil, on whatever device: kernel = reference within its dtype's tolerance.

Called by the interpreter's and the card's tests with the cases of `cases`.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octavo_kernels.gated_mul import (
    gelu_mul,
    gelu_mul_reference,
    silu_mul,
    silu_mul_reference,
)
from octavo_kernels.paged_decode import decode_work_list, paged_decode, paged_decode_reference
from octavo_kernels.paged_prefill import (
    paged_prefill,
    paged_prefill_reference,
    prefill_work_list,
)
from octavo_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from octavo_kernels.rope_and_cache import (
    rope_and_cache,
    rope_and_cache_reference,
    rope_and_store,
)
from octavo_kernels.sample import sample, sample_reference
from tests.kernels.cases import (
    NULL_BLOCK,
    far_apart,
    logits_of,
    normal,
    paged_kv,
    poisoned_outputs,
    sampling_parameters,
    strided_rows,
)

EPS = 1e-5
# (rtol, atol): two roundings of the dtype, on values of about 1.
_TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = _TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def check_rms_norm(case: dict[str, Any], device: str) -> None:
    """With weights of x's dtype, and in float32."""
    shape = (case["num_rows"], case["width"])
    x = normal(*shape, dtype=case["dtype"], device=device, seed=1) * 3
    x = strided_rows(x) if case["is_strided"] else x
    for dtype in (case["dtype"], torch.float32):
        weight = normal(case["width"], dtype=dtype, device=device, seed=2)
        with poisoned_outputs():
            out = rms_norm(x, weight, EPS)
        assert_near(out, rms_norm_reference(x, weight, EPS))


def check_add_rms_norm(case: dict[str, Any], device: str) -> None:
    shape = (case["num_rows"], case["width"])
    x = normal(*shape, dtype=case["dtype"], device=device, seed=1)
    residual = normal(*shape, dtype=case["dtype"], device=device, seed=3) * 5
    if case["is_strided"]:
        x, residual = strided_rows(x), strided_rows(residual)
    inputs = x.clone(), residual.clone()
    for dtype in (case["dtype"], torch.float32):
        weight = normal(case["width"], dtype=dtype, device=device, seed=2)
        with poisoned_outputs():
            out, total = add_rms_norm(x, residual, weight, EPS)
        expected_out, expected_total = add_rms_norm_reference(x, residual, weight, EPS)
        assert torch.equal(total, expected_total)
        assert_near(out, expected_out)
    assert torch.equal(x, inputs[0])
    assert torch.equal(residual, inputs[1])


def check_gated_mul(case: dict[str, Any], device: str) -> None:
    shape = (case["num_rows"], 2 * case["width"])
    gate_up = normal(*shape, dtype=case["dtype"], device=device, seed=4) * 4
    gate_up = strided_rows(gate_up) if case["is_strided"] else gate_up
    with poisoned_outputs():
        silu, gelu = silu_mul(gate_up), gelu_mul(gate_up)
    assert_near(silu, silu_mul_reference(gate_up))
    assert_near(gelu, gelu_mul_reference(gate_up))


def check_rope_and_cache(case: dict[str, Any], device: str) -> None:
    """As two outputs; and q alone, its heads and k's normalised first."""
    dtype, head_dim, block_size = case["dtype"], case["head_dim"], case["block_size"]
    num_kv_heads = case["num_kv_heads"]
    num_heads = num_kv_heads * case["group_size"]
    half = int(head_dim * case["rotated"]) // 2
    num_tokens, num_blocks, num_positions = 5, 4, 50
    heads = normal(
        num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device, seed=5
    )
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angle = normal(num_positions, half, dtype=torch.float32, device=device, seed=6) * 3
    cos_sin = torch.stack((angle.cos(), angle.sin()), dim=1)
    positions = torch.tensor([0, 49, 7, 8, 23], device=device)
    # Two dead rows; the last slot of all; the others in one block.
    slots = [-1, num_blocks * block_size - 1, block_size, 2 * block_size - 1, -1]
    where = (cos_sin, positions, torch.tensor(slots, device=device))
    cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    caches = [cache.clone().to(device) for _ in range(8)]
    weights = [normal(head_dim, dtype=dtype, device=device, seed=seed) for seed in (7, 8)]
    with poisoned_outputs():
        actual = rope_and_cache(q, k, v, *where, *caches[:2])
        alone = rope_and_store(q, k, v, *where, *caches[4:6], norms=(*weights, EPS))
    expected = rope_and_cache_reference(q, k, v, *where, *caches[2:4])
    for x, y in zip(actual, expected, strict=True):
        assert_near(x, y)
    normed = [rms_norm_reference(x, w, EPS) for x, w in zip((q, k), weights, strict=True)]
    of_normed, _ = rope_and_cache_reference(*normed, v, *where, *caches[6:])
    assert_near(alone, of_normed)
    rtol, atol = _TOLERANCE[dtype]
    for mine, theirs in ((0, 2), (1, 3), (4, 6), (5, 7)):
        # Equal NaNs: nothing was written but the live slots.
        torch.testing.assert_close(
            caches[mine], caches[theirs], rtol=rtol, atol=atol, equal_nan=True
        )


def _options(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("window", "soft_cap") if name in case}


def decode_lengths(block_size: int, tile: int, chunk: int) -> list[int]:
    borders = (block_size, tile, chunk, 2 * chunk)
    around = {border + delta for border in borders for delta in (-1, 0, 1)}
    return [0, 1, *sorted(around), 0]


def check_paged_decode(case: dict[str, Any], device: str, *, min_chunk: int, long: int) -> None:
    """Contexts around every border, most of them split; `long` is one more context."""
    dtype, head_dim, num_kv_heads = case["dtype"], case["head_dim"], case["num_kv_heads"]
    window, options = case.get("window"), _options(case)
    lengths = [*decode_lengths(case["block_size"], 64, min_chunk), long]
    kv = paged_kv(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=case["block_size"],
        dtype=dtype,
        device=device,
        first_seen=None if window is None else [length - window for length in lengths],
    )
    num_heads = num_kv_heads * case["group_size"]
    q = strided_rows(normal(len(lengths), num_heads, head_dim, dtype=dtype, device=device, seed=7))
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    arguments = (q, kv.k_cache, kv.v_cache, kv.block_table, context_lens, scale)
    expected = paged_decode_reference(*arguments, **options)
    with poisoned_outputs():
        work = decode_work_list(
            context_lens, num_kv_heads, window=window, num_sms=8, min_chunk=min_chunk
        )
        split = paged_decode(*arguments, **options, work=work)
        whole = decode_work_list(
            context_lens, num_kv_heads, window=window, num_sms=1, min_chunk=2**20
        )
        alone = paged_decode(*arguments, **options, work=whole)
    assert int(whole.item_offsets.diff().max()) == 1
    counts = work.item_offsets.diff()
    assert bool((counts >= 1).all())
    assert (int(counts.max()) > 1) == (window is None or window > min_chunk)
    assert_near(split, expected)
    assert_near(alone, expected)
    assert bool((split[context_lens == 0] == 0).all())


def check_paged_prefill(
    case: dict[str, Any], device: str, chunks: list[tuple[int, int]], num_padding: int = 0
) -> None:
    """`chunks`: (computed tokens before, tokens of the chunk)."""
    dtype, head_dim, num_kv_heads = case["dtype"], case["head_dim"], case["num_kv_heads"]
    window, options = case.get("window"), _options(case)
    lengths = [history + length for history, length in chunks]
    kv = paged_kv(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=case["block_size"],
        dtype=dtype,
        device=device,
        first_seen=None if window is None else [history - window + 1 for history, _ in chunks],
    )
    borders = torch.tensor([0, *(length for _, length in chunks)]).cumsum(0)
    # Some tokens lie behind the last chunk: they get zeros.
    num_tokens = int(borders[-1]) + num_padding
    num_heads = num_kv_heads * case["group_size"]
    q = strided_rows(normal(num_tokens, num_heads, head_dim, dtype=dtype, device=device, seed=8))
    arguments = (
        *(q, kv.k_cache, kv.v_cache, kv.block_table),
        borders.to(device, torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        head_dim**-0.5,
    )
    with poisoned_outputs():
        out = paged_prefill(*arguments, **options)
    assert_near(out, paged_prefill_reference(*arguments, **options))


def check_far_caches(dtype: torch.dtype, device: str) -> None:
    """Block ids times strides beyond 32 bits: store tokens there, then attend to them."""
    num_kv_heads, block_size, head_dim, num_tokens = 2, 16, 64, 20
    width = num_kv_heads * block_size * head_dim
    shape = (3, num_kv_heads, block_size, head_dim)
    storage = far_apart(3, 2 * width, dtype=dtype, device=device)
    k_cache, v_cache = (
        part.unflatten(1, shape[1:]) for part in (storage[:, :width], storage[:, width:])
    )
    near_k = torch.zeros(shape, dtype=dtype, device=device)
    near_v = torch.zeros(shape, dtype=dtype, device=device)
    blocks = [2, 1]
    q = normal(num_tokens, 4, head_dim, dtype=dtype, device=device, seed=9)
    k = normal(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device, seed=10)
    v = normal(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device, seed=11)
    positions = torch.arange(num_tokens, device=device)
    slots = torch.tensor(blocks, device=device)[positions // block_size] * block_size
    slots += positions % block_size
    cos_sin = torch.ones((num_tokens, 2, head_dim // 2), device=device)
    rope_and_cache(q, k, v, cos_sin, positions, slots, k_cache, v_cache)
    rope_and_cache_reference(q, k, v, cos_sin, positions, slots, near_k, near_v)

    table = torch.tensor([blocks], dtype=torch.int32, device=device)
    lens = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    borders = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    out = paged_decode(q[:1], k_cache, v_cache, table, lens, 0.1)
    assert_near(out, paged_decode_reference(q[:1], near_k, near_v, table, lens, 0.1))
    out = paged_prefill(q, k_cache, v_cache, table, borders, lens, 0.1)
    assert_near(
        out,
        paged_prefill_reference(q, near_k, near_v, table, borders, lens, 0.1),
    )
    assert NULL_BLOCK not in blocks


def check_far_rows(device: str) -> None:
    """Rows times row strides beyond 32 bits."""
    x = far_apart(3, 128, dtype=torch.float16, device=device)
    x.copy_(normal(3, 128, dtype=torch.float16, device=device, seed=12))
    weight = normal(128, dtype=torch.float16, device=device, seed=13)
    assert_near(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    assert_near(silu_mul(x), silu_mul_reference(x))
    assert_near(gelu_mul(x), gelu_mul_reference(x))
    for out, expected in zip(
        add_rms_norm(x, x, weight, EPS), add_rms_norm_reference(x, x, weight, EPS), strict=True
    ):
        assert_near(out, expected)
    del x
    logits = far_apart(3, 100, dtype=torch.float32, device=device)
    logits.copy_(logits_of("normal", 3, 100, seed=14))
    parameters = sampling_parameters(3, 1.0, 0.9, 0, 0.0, seed=15)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    assert torch.equal(sample(logits, **parameters), sample_reference(logits, **parameters))


def check_sample(case: dict[str, Any], device: str, num_rows: int) -> None:
    filters = {name: case[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    logits = logits_of(case["shape"], num_rows, case["vocab_size"], seed=16)
    parameters = sampling_parameters(num_rows, **filters, seed=17)
    on_device = {name: value.to(device) for name, value in parameters.items()}
    with poisoned_outputs():
        tokens = sample(strided_rows(logits.to(device)), **on_device)
    assert tokens.tolist() == sample_reference(logits, **parameters).tolist()


def check_parts(device: str, *, vocab_size: int, parts: int) -> None:
    """Rows of every kind, each row's first race cut into `parts`."""
    logits = logits_of("normal", 7, vocab_size, seed=18) * 3
    logits[3, 5], logits[4], logits[5, ::2] = torch.nan, -torch.inf, -torch.inf
    parameters = sampling_parameters(7, temperature=1.0, top_p=0.8, top_k=0, min_p=0.0, seed=19)
    parameters["temperature"][0] = 0.0
    parameters["top_p"][1] = 1.0
    parameters["top_k"][2] = 5
    expected = sample_reference(logits, **parameters).tolist()
    on_device = {name: value.to(device) for name, value in parameters.items()}
    with poisoned_outputs():
        tokens = sample(logits.to(device), **on_device, parts=parts)
    assert tokens.tolist() == expected


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 0, "min_p": 0.0},
    {"temperature": 1.5, "top_p": 1.0, "top_k": 5, "min_p": 0.0},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 6, "min_p": 0.1},
]


def check_filters(filters: dict[str, Any], device: str, num_rows: int) -> None:
    """Twelve distinct tokens, so that every filter's border is met often."""
    logits = torch.linspace(1.5, -1.5, 12).expand(num_rows, -1)
    parameters = sampling_parameters(num_rows, **filters, seed=27)
    on_device = {name: value.to(device) for name, value in parameters.items()}
    tokens = sample(logits.to(device), **on_device).tolist()
    assert tokens == sample_reference(logits, **parameters).tolist()
    allowed = filtered_probabilities(logits[0], **filters).nonzero().flatten().tolist()
    assert set(tokens) <= set(allowed)


def check_bad_rows(device: str) -> None:
    """A bad row gets -1, greedy or not, filtered or not; its neighbours what they'd get alone."""
    vocab_size = 301
    logits = logits_of("normal", 12, vocab_size, seed=18)
    bad_values = (torch.nan, torch.inf, -torch.inf)
    for row, value in enumerate(bad_values * 2):
        # -inf is bad only if it is all there is.
        logits[2 * row, slice(None) if value == -torch.inf else slice(300, 301)] = value
    parameters = sampling_parameters(12, 0.8, 1.0, 0, 0.0, seed=19)
    parameters["temperature"][6:] = 0.0
    for top_p in (1.0, 0.5):
        parameters["top_p"].fill_(top_p)
        on_device = {name: value.to(device) for name, value in parameters.items()}
        tokens = sample(logits.to(device), **on_device).tolist()
        assert tokens[::2] == [-1] * 6
        assert tokens == sample_reference(logits, **parameters).tolist()
        assert all(0 <= token < vocab_size for token in tokens[1::2])


def check_batch_invariance(device: str) -> None:
    """A row draws the same alone, in a batch, and in another place of it."""
    num_rows = 9
    logits = logits_of("normal", num_rows, 301, seed=20).to(device)
    parameters = sampling_parameters(num_rows, 1.0, 0.8, 40, 0.01, seed=21)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    together = sample(logits, **parameters).tolist()
    backwards = {name: value.flip(0) for name, value in parameters.items()}
    assert sample(logits.flip(0), **backwards).tolist() == together[::-1]
    for row in range(num_rows):
        alone = {name: value[row : row + 1] for name, value in parameters.items()}
        assert sample(logits[row : row + 1], **alone).tolist() == [together[row]]


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic of drawn tokens; tokens of probability 0 must not occur."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    is_possible = probabilities > 0
    assert int(counts[~is_possible].sum()) == 0
    return float(((counts - expected).square() / expected)[is_possible].sum())


def chi_square_limit(num_values: int) -> float:
    """The 99.99 % quantile for so many values (Wilson and Hilferty's approximation)."""
    degrees = max(num_values - 1, 1)
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3


def filtered_probabilities(
    logits: Tensor, temperature: float, top_p: float, top_k: int, min_p: float
) -> Tensor:
    """[V] by sorting: a token stays if the mass and the count of the likelier ones allow it."""
    probabilities = (logits.double() / temperature).softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    stays = ordered.cumsum(-1) - ordered < top_p
    stays &= ordered >= min_p * ordered[0]
    if top_k > 0:
        stays[top_k:] = False
    kept = torch.zeros_like(probabilities)
    kept[order[stays]] = ordered[stays]
    return kept / kept.sum()


def draw_many(
    logits_row: Tensor,
    num_draws: int,
    device: str,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Tensor:
    """Draws of one row at positions 0, 1, ..., for one seed."""
    parameters = sampling_parameters(num_draws, temperature, top_p, top_k, min_p, seed=22)
    parameters["seed"].fill_(2026)
    parameters["sequence_index"].zero_()
    parameters["position"] = torch.arange(num_draws)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    return sample(logits_row.to(device).expand(num_draws, -1), **parameters)


def check_work_list(device: str) -> None:
    """Items cover what each row sees of its context exactly, in order, whatever the split."""
    for lengths in ([0], [1], [0, 0, 0], [5000], [300, 0, 17, 4096, 1, 256, 257, 0], [64] * 130):
        context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        for num_kv_heads, num_sms, window in ((1, 2, None), (8, 32, None), (1, 2, 600)):
            with poisoned_outputs():
                work = decode_work_list(context_lens, num_kv_heads, window=window, num_sms=num_sms)
            items, offsets = work.items.tolist(), work.item_offsets.tolist()
            assert offsets[0] == 0
            assert offsets[-1] <= len(items)
            for row, length in enumerate(lengths):
                mine = items[offsets[row] : offsets[row + 1]]
                assert all(item[0] == row for item in mine)
                cuts = [item[1] for item in mine] + [item[2] for item in mine[-1:]]
                if length == 0:  # one empty item, which writes the row's zeros
                    assert cuts == [0, 0]
                    continue
                assert cuts == sorted(set(cuts))
                assert [item[2] for item in mine] == cuts[1:]
                assert cuts[0] == (max(length - window, 0) if window else 0)
                assert cuts[-1] == length
            assert all(start >= end for _, start, end in items[offsets[-1] :])


def check_prefill_work_list(device: str) -> None:
    """Items cover every chunk's tokens once, the last ones first, and what lies behind them."""
    for lengths, num_padding in (([1], 0), ([128, 0, 129, 63], 0), ([5, 300], 200), ([0], 7)):
        borders = [0, *torch.tensor(lengths).cumsum(0).tolist(), sum(lengths) + num_padding]
        q = torch.empty((borders[-1], 2, 64), dtype=torch.float16, device=device)
        cu_seqlens_q = torch.tensor(borders[:-1], dtype=torch.int32, device=device)
        with poisoned_outputs():
            items = prefill_work_list(q, cu_seqlens_q, num_kv_heads=1).tolist()
        expected = [
            [chunk, first]
            for chunk, (start, end) in enumerate(pairwise(borders))
            for first in reversed(range(0, end - start, 64))
        ]
        assert items[: len(expected)] == expected
        assert all(chunk == -1 for chunk, _ in items[len(expected) :])


def check_empty_inputs(device: str) -> None:
    """No token, no row: empty results of the right shape."""

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    weight, cache = empty(64), empty(2, 1, 16, 64)
    q, kv, none = empty(0, 4, 64), empty(0, 1, 64), empty(0, dtype=torch.int64)
    table, lens = empty(0, 3, dtype=torch.int32), empty(0, dtype=torch.int32)
    assert rms_norm(empty(0, 64), weight, EPS).shape == (0, 64)
    assert add_rms_norm(empty(0, 64), empty(0, 64), weight, EPS)[1].shape == (0, 64)
    assert silu_mul(empty(0, 64)).shape == (0, 32)
    cos_sin = empty(8, 2, 32, dtype=torch.float32)
    assert rope_and_cache(q, kv, kv, cos_sin, none, none, cache, cache)[0].shape == q.shape
    assert paged_decode(q, cache, cache, table, lens, 1.0).shape == q.shape
    borders = torch.zeros(1, dtype=torch.int32, device=device)
    assert paged_prefill(q, cache, cache, table, borders, lens, 1.0).shape == q.shape
    parameters = sampling_parameters(0, 1.0, 1.0, 0, 0.0, seed=0)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    assert sample(empty(0, 9, dtype=torch.float32), **parameters).shape == (0,)
