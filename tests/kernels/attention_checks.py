"""What paged attention and its work lists must fulfil, on whatever device."""

from itertools import pairwise
from typing import Any

import torch

from octavo_kernels.decode_work import decode_work_list
from octavo_kernels.paged_decode import paged_decode, paged_decode_reference
from octavo_kernels.paged_prefill import (
    paged_prefill,
    paged_prefill_reference,
    prefill_work_list,
)
from octavo_kernels.rope_and_cache import rope_and_cache, rope_and_cache_reference
from tests.kernels.cases import (
    NULL_BLOCK,
    far_apart,
    normal,
    paged_kv,
    poisoned_outputs,
    strided_rows,
)
from tests.kernels.checks import assert_near


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
    if window is None or 4 * window > 5 * min_chunk:  # a quarter more isn't cut off by itself
        assert int(counts.max()) > 1
    elif window <= min_chunk:
        assert int(counts.max()) == 1
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


def check_even_cuts(device: str) -> None:
    """Items that all run at once where that is even, smaller ones otherwise; for few rows no more
    of them than run at once, and enough for whatever lengths."""

    def cut(lengths: list[int]) -> tuple[int, list[list[int]]]:
        context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        work = decode_work_list(context_lens, 8, per_sm=3, min_chunk=128, num_sms=132)
        offsets = work.item_offsets.tolist()
        sizes = (work.items[:, 2] - work.items[:, 1]).tolist()
        return len(sizes), [sizes[start:end] for start, end in pairwise(offsets)]

    at_once = 3 * 132 // 8
    assert cut([2048] * 16)[1] == [[768, 768, 512]] * 16
    assert cut([2048] * 64)[1] == [[1024, 1024]] * 64
    assert cut([1300] * 64)[1] == [[768, 532]] * 64
    assert cut([1303] * 128)[1] == [[1303]] * 128
    assert cut([400]) == (at_once, [[128, 128, 128, 16]])
    # Few rows: whatever their lengths, all parts run at once.
    for lengths in ([30_000], [30_000, *[1] * 11], [8000] * 8, [1, 5000, 0, 77, 129, 12_345]):
        num_items, parts = cut(lengths)
        assert num_items == at_once
        assert sum(map(len, parts)) <= at_once
        assert [sum(sizes) for sizes in parts] == lengths
        assert max(map(max, parts)) <= max(128, -(-2 * sum(lengths) // at_once))


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


def check_no_queries(device: str) -> None:
    """Empty results of the right shape."""
    q = torch.empty((0, 4, 64), dtype=torch.float16, device=device)
    cache = torch.empty((2, 1, 16, 64), dtype=torch.float16, device=device)
    table = torch.empty((0, 3), dtype=torch.int32, device=device)
    lens = torch.empty(0, dtype=torch.int32, device=device)
    borders = torch.zeros(1, dtype=torch.int32, device=device)
    assert paged_decode(q, cache, cache, table, lens, 1.0).shape == q.shape
    assert paged_prefill(q, cache, cache, table, borders, lens, 1.0).shape == q.shape
