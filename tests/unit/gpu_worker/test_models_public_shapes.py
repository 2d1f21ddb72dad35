"""Public models' config.json, as their authors wrote them: the number of parameters comes out.

The counts are those of the released checkpoints. No weights are made: the model is on the meta
device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo_worker.models import Model, ModelConfig
from tests.unit.gpu_worker.test_models_config import write
from tests.unit.gpu_worker.test_models_layouts import CHATGLM3_6B, QWEN_7B


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **fields: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        **fields,
    }


def phi3(hidden: int, inner: int, layers: int, heads: int, vocab: int, **fields: Any) -> Any:
    return llama(hidden, inner, layers, heads, heads, vocab, attention_bias=False) | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        **fields,
    }


def longrope(num_pairs: int) -> dict[str, Any]:
    factors = [1.0 + index / num_pairs for index in range(num_pairs)]
    return {"type": "longrope", "short_factor": factors, "long_factor": [4 * f for f in factors]}


GLM4_9B = llama(
    4096,
    13696,
    40,
    32,
    2,
    151552,
    architectures=["GlmForCausalLM"],
    model_type="glm",
    attention_bias=True,
    head_dim=128,
    max_position_embeddings=131072,
    partial_rotary_factor=0.5,
)
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Yi-6B": (
        llama(4096, 11008, 32, 32, 4, 64000, rope_theta=5e6, max_position_embeddings=4096),
        6_061_035_520,
    ),
    "Yi-34B": (
        llama(7168, 20480, 60, 56, 8, 64000, rope_theta=5e6, max_position_embeddings=4096),
        34_388_917_248,
    ),
    "DeepSeek-LLM-7B": (
        llama(4096, 11008, 30, 32, 32, 102400, max_position_embeddings=4096),
        6_910_365_696,
    ),
    "Phi-3-mini-4k": (
        phi3(3072, 8192, 32, 32, 32064, sliding_window=2047, max_position_embeddings=4096),
        3_821_079_552,
    ),
    "Phi-3-mini-128k": (
        phi3(
            3072,
            8192,
            32,
            32,
            32064,
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            sliding_window=262144,
            rope_scaling=longrope(48),
        ),
        3_821_079_552,
    ),
    "Phi-4": (
        phi3(
            5120,
            17920,
            40,
            40,
            100352,
            num_key_value_heads=10,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            rope_theta=250000,
            sliding_window=None,
        ),
        14_659_507_200,
    ),
    "Phi-4-mini": (
        phi3(
            3072,
            8192,
            32,
            24,
            200064,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rope_scaling=longrope(48),
            sliding_window=262144,
            tie_word_embeddings=True,
        ),
        3_836_021_760,
    ),
    "GLM-4-9B": (GLM4_9B, 9_399_951_360),
    "GLM-4-9B-0414": (
        GLM4_9B | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
        9_400_279_040,
    ),
    "GLM-4-9B in its authors' layout": (
        CHATGLM3_6B
        | {"num_layers": 40, "padded_vocab_size": 151552, "rope_ratio": 500, "seq_length": 131072},
        9_399_951_360,
    ),
    "ChatGLM3-6B": (CHATGLM3_6B, 6_243_584_000),
    "Qwen-7B": (QWEN_7B, 7_721_324_544),
    "Qwen-1.8B": (
        QWEN_7B
        | {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
        1_836_828_672,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_a_public_configuration(name: str, tmp_path: Path) -> None:
    fields, expected = MODELS[name]
    config = ModelConfig.from_folder(write(tmp_path, fields), max_model_len=64)
    model = Model(config, torch.device("meta"), tied=config.tie_word_embeddings)
    assert sum(slot.target.numel() for slot in model.slots().values()) == expected
    stored = config.layout.stored(model.slots(), config.heads)
    assert sum(torch.Size(place.shape).numel() for place in stored.values()) == expected
