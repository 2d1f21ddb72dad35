"""How many KV blocks fit."""

from dataclasses import dataclass, replace

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo.settings import WorkerSettings
from octavo_worker.kv_cache import (
    KVCacheSize,
    allocate_kv_caches,
    free_memory_bytes,
    parse_bytes,
    size_kv_cache,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = 256
    intermediate_size: int = 512
    vocab_size: int = 1000
    max_model_len: int = 2048
    dtype: torch.dtype = torch.float32


PER_TOKEN = 2 * 4 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5g", 1_500_000_000),
        ("2GB", 2_000_000_000),
        ("1000000", 1_000_000),
        ("64kib", 64 << 10),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text, "kv_cache_memory") == expected


@pytest.mark.parametrize("text", ["4 apples", "-1GiB", "GiB", "4ib", "1e9"])
def test_other_texts_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match="OCTAVO_KV_CACHE_MEMORY"):
        parse_bytes(text, "kv_cache_memory")


def test_blocks_as_set_win_over_memory() -> None:
    settings = WorkerSettings(num_kv_blocks=40, kv_cache_memory="1GiB")
    size = size_kv_cache(Shape(), settings, CPU, 512)
    assert size == KVCacheSize(40, 16, PER_TOKEN)
    assert size.num_bytes == 40 * 16 * PER_TOKEN


@pytest.mark.parametrize("block_size", [16, 32])
def test_memory_as_set_is_filled_with_blocks(block_size: int) -> None:
    settings = WorkerSettings(kv_cache_memory="10MiB", block_size=block_size)
    size = size_kv_cache(Shape(), settings, CPU, 512)
    assert size.num_blocks == (10 << 20) // (PER_TOKEN * block_size)
    half = size_kv_cache(replace(Shape(), dtype=torch.float16), settings, CPU, 512)
    assert half.num_blocks == 2 * size.num_blocks


def test_by_default_a_modest_share_of_free_memory() -> None:
    wide = replace(Shape(), num_layers=64, num_kv_heads=32)
    size = size_kv_cache(wide, WorkerSettings(), CPU, 512)
    assert size.num_bytes <= min(4 << 30, free_memory_bytes() // 3)
    assert size.num_blocks > 1


def test_no_more_than_all_rows_could_fill() -> None:
    settings = WorkerSettings(max_num_seqs=3, kv_cache_memory="1GiB")
    assert size_kv_cache(Shape(), settings, CPU, 512).num_blocks == 3 * 2048 // 16 + 1


def test_a_cache_without_a_usable_block_is_refused() -> None:
    settings = WorkerSettings(kv_cache_memory="100KiB")
    with pytest.raises(ConfigurationError, match=r"a block takes 64\.0 KiB"):
        size_kv_cache(Shape(), settings, CPU, 512)


def test_caches_have_the_layout_of_the_contract() -> None:
    caches = allocate_kv_caches(Shape(), KVCacheSize(5, 16, PER_TOKEN), CPU)
    assert len(caches) == 4
    for k_cache, v_cache in caches:
        assert k_cache.shape == v_cache.shape == (5, 2, 16, 64)
        assert k_cache.is_contiguous()
        assert k_cache.data_ptr() != v_cache.data_ptr()


def test_what_is_said_adds_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        size_kv_cache(Shape(), WorkerSettings(kv_cache_memory="10MiB"), CPU, 512)
    assert [record.message for record in caplog.records] == [
        "KV cache: 2 x 4 layers x 2 kv heads x 64 dims, fp32: 4.0 KiB a token, "
        "64.0 KiB a block of 16",
        "KV cache: 10.0 MiB, as set",
        "KV cache: 160 blocks = 2,544 tokens = 10.0 MiB; 1.2 sequences of 2048 tokens",
    ]
