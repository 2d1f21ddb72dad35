"""What cuDNN is asked to compute, and how a step's chunks are laid out for it."""

from dataclasses import replace

import pytest
import torch

from octavo_worker.attention_inputs import AttentionOptions, KvScales
from octavo_worker.backends.cudnn_prefill import covers, lay_out
from tests.bench.prefill_attention import make_batch

CHUNKS = [(0, 600), (0, 1), (0, 30)]


def test_layers_that_the_kernel_keeps() -> None:
    batch = make_batch(CHUNKS, "cpu")
    options = AttentionOptions(scale=0.1)
    assert covers(batch.q, batch.k_cache, batch.inputs, options)
    for other in (
        replace(options, window=4096),
        replace(options, soft_cap=50.0),
        replace(options, kv_scales=KvScales(torch.ones(8), torch.ones(8))),
    ):
        assert not covers(batch.q, batch.k_cache, batch.inputs, other)
    assert not covers(batch.q.float(), batch.k_cache.float(), batch.inputs, options)
    short = make_batch([(4096, 511)], "cpu")
    assert not covers(short.q, short.k_cache, short.inputs, options)


@pytest.mark.parametrize("block_size", [0, 16], ids=["fresh", "paged"])
def test_sizes_are_rounded_up_and_fillers_are_empty(block_size: int) -> None:
    batch = make_batch(CHUNKS, "cpu")
    chunks = lay_out(batch.inputs, (4096, 1024, 6144), 4096, block_size)
    assert (chunks.num_chunks, chunks.max_q) == (4, 1024)
    assert chunks.max_kv == 1024
    tensors = {uid.name: tensor.tolist() for uid, tensor in chunks.tensors.items()}
    assert tensors["LENS_Q"] == tensors["LENS_KV"] == [600, 1, 30, 0]
    borders = [0, 600, 601, 631, 631]
    assert tensors["OFFSETS_Q"] == tensors["OFFSETS_OUT"] == [4096 * token for token in borders]
    if block_size == 0:
        assert tensors["OFFSETS_V"] == [6144 * token for token in borders]
    else:
        table = batch.inputs.prefill_block_table
        assert torch.tensor(tensors["TABLE_K"])[:3, : table.shape[1]].equal(table.long())
        assert [len(tensors["TABLE_V"]), len(tensors["TABLE_V"][0])] == [4, 64]
