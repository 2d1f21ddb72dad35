"""octavo.cli.limits: what a card can reach at most, against numbers worked out by hand."""

import pytest

from octavo.cli.limits import (
    knows_weights,
    kv_bytes_per_token,
    limit_s,
    matmul_params,
    quant_method,
    read_params,
    weight_bytes,
)
from octavo.cli.workloads import BenchRequest, load_shapes


def test_limits_are_the_cards() -> None:
    """Against numbers worked out by hand from the shapes (in GB, KiB, tokens/s)."""
    shapes = load_shapes()
    assert matmul_params(shapes["llama8b"]) == pytest.approx(7.50e9, rel=1e-2)
    assert kv_bytes_per_token(shapes["llama8b"], "bfloat16") == 128 << 10
    assert kv_bytes_per_token(shapes["llama2-7b"], "bfloat16") == 512 << 10
    assert kv_bytes_per_token(shapes["qwen3-0.6b"], "bfloat16") == 112 << 10

    def rate(batch: int) -> float:
        # A thousand steps around a context of 1,024.
        requests = [BenchRequest((1,) * 524, 1001)] * batch
        prefill_only = [BenchRequest((1,) * 524, 1)] * batch
        seconds = limit_s(shapes["llama8b"], "bfloat16", requests)
        return batch * 1000 / (seconds - limit_s(shapes["llama8b"], "bfloat16", prefill_only))

    assert rate(1) == pytest.approx(278, rel=0.01)
    assert rate(32) == pytest.approx(7_000, rel=0.02)
    assert rate(128) == pytest.approx(16_700, rel=0.01)
    assert rate(256) == pytest.approx(18_500, rel=0.01)
    prefill = [BenchRequest((1,) * 4000, 1)] * 64
    seconds = limit_s(shapes["llama8b"], "bfloat16", prefill)
    assert 64 * 4000 / seconds == pytest.approx(46_000, rel=0.01)


def test_limits_of_quantised_shapes() -> None:
    """4 bits and a group's 20 more for 6.98e9 weights, the head of 0.525e9 in 16 bits: 4.68 GB."""
    shape = load_shapes()["llama8b-awq"]
    assert quant_method(shape) == "awq"
    assert weight_bytes(shape, "float16") == pytest.approx(4.68e9, rel=0.005)
    assert weight_bytes(load_shapes()["llama8b"], "float16") == pytest.approx(15.0e9, rel=0.005)
    gptq = {**shape, "quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}
    assert weight_bytes(gptq, "float16") == pytest.approx(8.03e9, rel=0.005)
    other = {**shape, "quantization_config": {"quant_method": "compressed-tensors"}}
    assert [knows_weights(config) for config in (shape, gptq, other)] == [True, True, False]


def test_limits_of_experts_are_those_that_are_hit() -> None:
    shape = load_shapes()["qwen3-30b-a3b"]
    # 30.5e9 parameters and 3.3e9 active ones, less the embedding's 0.31e9.
    assert matmul_params(shape) == pytest.approx(3.04e9, rel=1e-2)
    assert read_params(shape, 1) == pytest.approx(matmul_params(shape))
    assert read_params(shape, 32) == pytest.approx(1.23e9 + 0.873 * 28.99e9, rel=1e-2)
    assert weight_bytes(shape, "bfloat16", 32) == 2 * read_params(shape, 32)
    assert read_params(shape, 4096) == pytest.approx(30.2e9, rel=1e-2)
    mixtral = {**load_shapes()["llama8b"], "num_local_experts": 8, "num_experts_per_tok": 2}
    # Llama's shape with two of eight MLPs.
    assert matmul_params(mixtral) == pytest.approx(
        matmul_params(load_shapes()["llama8b"]) + 5.64e9, rel=1e-2
    )
    assert read_params(load_shapes()["llama8b"], 8) == matmul_params(load_shapes()["llama8b"])
