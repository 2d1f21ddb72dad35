"""The physical limit of a workload on one H200, to print a measurement's fraction of it.

T_step = max(weight bytes / BW, 2 params B / F) + KV bytes read / BW, with B rows in the step;
a prefill computes 2 params a token. Of a mixture of experts the params are those that compute one
token, and the weight bytes those of the experts that B tokens hit if they choose evenly. BW and F
were measured on the card (read bandwidth, large bf16 GEMM); attention's arithmetic is left out.
Must not know: how anything was measured.
Entry point: `limit_s`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cli.workloads import BenchRequest

READ_BYTES_PER_S = 4.19e12
FLOPS = 686e12
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def limit_s(
    config: Mapping[str, Any],
    dtype: str,
    requests: Sequence[BenchRequest],
    kv_dtype: str | None = None,
) -> float:
    """Least seconds in which the card can serve `requests`, all sent at once.

    `kv_dtype`: of the KV cache, None = `dtype`.
    """
    flops_s = 2 * matmul_params(config) / FLOPS

    def weight_s(num_tokens: int) -> float:
        return weight_bytes(config, dtype, num_tokens) / READ_BYTES_PER_S

    kv_s = kv_bytes_per_token(config, kv_dtype or dtype) / READ_BYTES_PER_S
    num_prompt_tokens = sum(len(request.token_ids) for request in requests)
    # The prefill yields each request's first token; decode step n the token n + 1.
    decode_s = 0.0
    steps = max(request.num_output_tokens for request in requests)
    for step in range(1, steps):
        rows = [request for request in requests if request.num_output_tokens > step]
        context = sum(len(request.token_ids) + step for request in rows)
        decode_s += max(weight_s(len(rows)), flops_s * len(rows)) + kv_s * context
    return max(flops_s * num_prompt_tokens, weight_s(num_prompt_tokens)) + decode_s


def matmul_params(config: Mapping[str, Any]) -> int:
    """Weights that a token is multiplied with: all but the embedding table and other experts."""
    return _params(config, config.get("num_experts_per_tok", 0))


def read_params(config: Mapping[str, Any], num_tokens: int) -> float:
    """Weights that a step of so many tokens reads at least."""
    if "num_experts_per_tok" not in config:
        return matmul_params(config)
    num_experts, top_k = _num_experts(config), config["num_experts_per_tok"]
    return _params(config, num_experts * (1 - (1 - top_k / num_experts) ** num_tokens))


def _params(config: Mapping[str, Any], num_experts: float) -> Any:
    """All but the embedding table, with `num_experts` experts a layer."""
    hidden, head_dim = config["hidden_size"], _head_dim(config)
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    attention = hidden * (2 * q_size + 2 * kv_size)
    mlp = 3 * hidden * config["intermediate_size"]
    if "num_experts_per_tok" in config:
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        width = num_experts * width + config.get("shared_expert_intermediate_size", 0)
        mlp = hidden * (_num_experts(config) + 3 * width)
    layers = config["num_hidden_layers"] * (attention + mlp)
    return layers + hidden * config["vocab_size"]


def weight_bytes(config: Mapping[str, Any], dtype: str, num_tokens: int = 1) -> float:
    """Of what a step of so many tokens reads: the head in `dtype`, layers as quantised."""
    head = config["hidden_size"] * config["vocab_size"]
    layers = read_params(config, num_tokens) - head
    return head * _BYTES[dtype] + layers * _bytes_a_weight(config, dtype)


def quant_method(config: Mapping[str, Any]) -> str | None:
    """The format that config.json names; None = weights as they are."""
    quantization = config.get("quantization_config") or {}
    return quantization.get("quant_method")


def knows_weights(config: Mapping[str, Any]) -> bool:
    """Whether `weight_bytes` can tell how weights are stored."""
    quantization = config.get("quantization_config")
    return not quantization or {"bits", "group_size"} <= quantization.keys()


def _bytes_a_weight(config: Mapping[str, Any], dtype: str) -> float:
    quantization = config.get("quantization_config")
    if not quantization:
        return _BYTES[dtype]
    bits, group_size = quantization["bits"], quantization["group_size"]
    # A group's scale is a 16-bit float, its zero point a code.
    of_group = 0 if group_size == -1 else (16 + bits) / group_size
    return (bits + of_group) / 8


def _num_experts(config: Mapping[str, Any]) -> int:
    return config.get("num_experts") or config["num_local_experts"]


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """KV cache of one token, all layers."""
    heads = config["num_key_value_heads"] * _head_dim(config)
    return 2 * config["num_hidden_layers"] * heads * _BYTES[dtype]


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
