"""A family of models: what an architecture's name says that its config.json doesn't.

Must not know: tensors, files. Entry points: `Family`, `DEFAULTS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from octavo_worker.models.fields import Fields
from octavo_worker.models.layout import LLAMA, Layout
from octavo_worker.models.moe_config import ExpertNames
from octavo_worker.models.per_layer import Ropes, Windows, no_windows, rope_everywhere
from octavo_worker.models.rope import RopeConfig

# What absent fields mean, unless a family says otherwise.
DEFAULTS: Fields = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": None,
    "final_logit_softcapping": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32_768,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "query_pre_attn_scalar": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table. Bias flags: None = what the config's flag says, else fixed.

    `aliases`: other names of the architecture. `translate`: the fields, in the words of Llama's.
    `partial_rotary`: whether `partial_rotary_factor` may be below 1. `offset_norms`: norms store
    their weights minus 1. `scaled_embedding`: embeddings are multiplied by sqrt(hidden size).
    `experts`: how those of a mixture of experts are stored.
    """

    architecture: str
    model_type: str
    defaults: Fields
    aliases: tuple[str, ...] = ()
    layout: Layout = LLAMA
    translate: Callable[[Fields], Fields] = dict
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    offset_norms: bool = False
    sandwich_norms: bool = False
    scaled_embedding: bool = False
    partial_rotary: bool = False
    experts: ExpertNames | None = None
    windows: Callable[[Fields], Windows] = no_windows
    ropes: Callable[[Fields, RopeConfig], Ropes] = rope_everywhere
