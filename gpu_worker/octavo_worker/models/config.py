"""A model's configuration: config.json, checked and normalised.

`read_fields` reads it in one vocabulary, `ModelConfig.from_folder` says what the decoder, the KV
cache and the runner need. Every mistake in the files is a ConfigurationError that names file
and field. Must not know: weights, backends, requests. No code of the folder is ever run.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from octavo.errors import ConfigurationError
from octavo_worker.attention_inputs import AttentionOptions
from octavo_worker.models.families import Family, family_of
from octavo_worker.models.fields import Fields, count, flag, optional, positive
from octavo_worker.models.folder import eos_token_ids, read_gptq_fields, read_json
from octavo_worker.models.layout import Heads, Layout
from octavo_worker.models.moe_config import MoeConfig
from octavo_worker.models.per_layer import Windows
from octavo_worker.models.rope import RopeConfig
from octavo_worker.models.text_part import text_fields
from octavo_worker.quant import (
    BlockScales,
    Fp8Format,
    Quantization,
    has_kv_scales,
    quantization_of,
)


def read_fields(folder: Path) -> Fields:
    """config.json in the words of Llama's, over the family's defaults."""
    fields = read_json(folder / "config.json")
    family = family_of(fields)
    return family.translate({**family.defaults, **text_fields(fields)})


class Activation(Enum):
    """What gates an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


# By the names that config.json has for them.
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder is made of. By layer: `ropes`, its positions (None = it knows none), and
    `attention`, how it attends. `layout` says how checkpoints store it, `sandwich_norms` that what
    attention and MLP give is normed too, `offset_norms` that stored norms lack 1. `embed_scale`:
    embeddings are multiplied by it; `final_soft_cap`: logits become c tanh(logit / c); None = not.
    `quantization`: None = none; `block_scales`: of layers that are widened while they are loaded;
    `has_kv_scales`: the checkpoint brings scales for a cache in 8 bits.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    ropes: tuple[RopeConfig | None, ...]
    attention: tuple[AttentionOptions, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    offset_norms: bool
    sandwich_norms: bool
    moe: MoeConfig | None
    activation: Activation
    embed_scale: float | None
    final_soft_cap: float | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    initializer_range: float
    dtype: torch.dtype
    layout: Layout
    quantization: Quantization | Fp8Format | None = None
    block_scales: BlockScales | None = None
    has_kv_scales: bool = False

    @classmethod
    def from_folder(
        cls, folder: Path, *, dtype: torch.dtype = torch.float32, max_model_len: int = 0
    ) -> "ModelConfig":
        """Read `folder`. `max_model_len` 0 = the longest that the model allows."""
        fields = read_fields(folder)
        family = family_of(fields)
        _refuse_what_is_not_computed(fields)
        stored = quantization_of(fields, read_gptq_fields(folder))
        is_widened = isinstance(stored, BlockScales)
        quantization, block_scales = (None, stored) if is_widened else (stored, None)
        num_heads = count(fields, "num_attention_heads")
        num_kv_heads = _kv_heads(fields, num_heads)
        hidden_size = count(fields, "hidden_size")
        head_dim = _head_dim(fields, hidden_size, num_heads)
        count(fields, "max_position_embeddings")
        num_layers = count(fields, "num_hidden_layers")
        rope = RopeConfig.from_fields(
            fields, head_dim=head_dim, can_be_partial=family.partial_rotary
        )
        longest = _max_model_len(fields, rope, max_model_len)
        return cls(
            architecture=family.architecture,
            vocab_size=count(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count(fields, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=longest,
            rms_norm_eps=positive(fields, "rms_norm_eps"),
            rope=rope,
            ropes=family.ropes(fields, rope),
            attention=_attention(fields, head_dim, family.windows(fields), longest),
            qkv_bias=flag(fields, "attention_bias", family.qkv_bias),
            o_bias=flag(fields, "attention_bias", family.o_bias),
            mlp_bias=flag(fields, "mlp_bias", family.mlp_bias),
            qk_norm=family.qk_norm,
            offset_norms=family.offset_norms,
            sandwich_norms=family.sandwich_norms,
            moe=_moe(fields, family, quantization),
            activation=_activation(fields),
            embed_scale=_embed_scale(hidden_size, dtype) if family.scaled_embedding else None,
            final_soft_cap=optional(fields, "final_logit_softcapping"),
            tie_word_embeddings=flag(fields, "tie_word_embeddings"),
            eos_token_ids=eos_token_ids(folder, fields),
            initializer_range=positive(fields, "initializer_range"),
            dtype=dtype,
            layout=family.layout,
            quantization=quantization,
            block_scales=block_scales,
            has_kv_scales=has_kv_scales(fields),
        )

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """A flag a layer: its MLP is a mixture of experts."""
        return self.moe.sparse_layers if self.moe else (False,) * self.num_layers

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def heads(self) -> Heads:
        """What a layout has to know of the heads."""
        return Heads(self.q_size, self.kv_size, self.head_dim, self.rope.rotary_dim)


def _moe(
    fields: Fields, family: Family, quantization: Quantization | Fp8Format | None
) -> MoeConfig | None:
    if family.experts is None:
        return None
    if quantization is not None:
        raise ConfigurationError(
            f"config.json: {quantization}: quantized experts aren't supported; "
            f"{family.architecture} needs a checkpoint in float32, float16, bfloat16 or "
            "8-bit floats with a scale a block"
        )
    if _activation(fields) is not Activation.SILU:
        raise ConfigurationError(
            f"config.json: hidden_act={fields['hidden_act']!r} isn't supported for experts; "
            "supported: silu"
        )
    return MoeConfig.from_fields(fields, family.experts)


def _kv_heads(fields: Fields, num_heads: int) -> int:
    if fields["num_key_value_heads"] is None:
        return num_heads
    num_kv_heads = count(fields, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"config.json: num_attention_heads={num_heads} is no multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields["head_dim"] is None:
        if hidden_size % num_heads:
            raise ConfigurationError(
                f"config.json: hidden_size={hidden_size} is no multiple of "
                f"num_attention_heads={num_heads}, and there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = count(fields, "head_dim")
    if head_dim % 2:
        raise ConfigurationError(f"config.json: head_dim={head_dim} must be even")
    return head_dim


def _attention(
    fields: Fields, head_dim: int, windows: Windows, max_model_len: int
) -> tuple[AttentionOptions, ...]:
    """A layer each."""
    scale = (optional(fields, "query_pre_attn_scalar") or head_dim) ** -0.5
    soft_cap = optional(fields, "attn_logit_softcapping")
    # A window that no query ever leaves is none.
    limited = (window if window and window < max_model_len else None for window in windows)
    return tuple(AttentionOptions(scale, window, soft_cap) for window in limited)


def _embed_scale(hidden_size: int, dtype: torch.dtype) -> float:
    """sqrt(hidden size), rounded to float32 and then to `dtype`, as transformers does."""
    return torch.tensor(hidden_size**0.5).to(dtype).item()


def _activation(fields: Fields) -> Activation:
    activation = _ACTIVATIONS.get(fields["hidden_act"])
    if activation is None:
        raise ConfigurationError(
            f"config.json: hidden_act={fields['hidden_act']!r} isn't supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return activation


def _refuse_what_is_not_computed(fields: Fields) -> None:
    if fields.get("per_layer_config"):
        raise ConfigurationError(
            f"config.json: per_layer_config isn't supported: {fields['per_layer_config']!r:.200}"
        )


def _max_model_len(fields: Fields, rope: RopeConfig, requested: int) -> int:
    limit = rope.max_position(fields["max_position_embeddings"])
    if requested > limit:
        raise ConfigurationError(
            f"OCTAVO_MAX_MODEL_LEN={requested}: this model allows at most {limit} tokens",
            param="max_model_len",
        )
    return requested or limit
