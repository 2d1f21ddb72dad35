"""What the MLPs of a mixture-of-experts model are, as config.json says it. Entry: `MoeConfig`.

Must not know: tensors, files.
"""

from dataclasses import dataclass

from octavo.errors import ConfigurationError
from octavo_worker.models.fields import Fields, count, flag


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How checkpoints name a layer's experts: `{block}.experts.3.{gate}.weight`, and which of
    config.json's fields says how wide one is."""

    block: str
    gate: str
    up: str
    down: str
    size_field: str


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "intermediate_size")
QWEN_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """`top_k` of `num_experts` experts, each `expert_size` wide, compute a token.

    Their weights are the softmax over all experts' logits; `renormalise`: divided by the sum of
    those chosen, which is the softmax over the chosen ones alone. `shared_size`: width of the
    expert that computes every token, 0 = there is none. `sparse_layers`: a flag a layer; the
    others have one plain MLP. `names`: None = a layer's experts are stored as two tensors.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int
    renormalise: bool
    sparse_layers: tuple[bool, ...]
    names: ExpertNames | None

    @classmethod
    def from_fields(cls, fields: Fields, names: ExpertNames) -> "MoeConfig":
        """Read config.json over the family's defaults; mistakes name the field."""
        # Newer files name the experts of every family as Mixtral's did.
        name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
        num_experts, top_k = count(fields, name), count(fields, "num_experts_per_tok")
        if top_k > num_experts:
            raise ConfigurationError(
                f"config.json: num_experts_per_tok={top_k} is more than {name}={num_experts}"
            )
        has_shared = fields.get("shared_expert_intermediate_size") is not None
        return cls(
            num_experts=num_experts,
            top_k=top_k,
            expert_size=count(fields, names.size_field),
            shared_size=count(fields, "shared_expert_intermediate_size") if has_shared else 0,
            renormalise=flag(fields, "norm_topk_prob"),
            sparse_layers=_sparse_layers(fields),
            names=names,
        )


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step = count(fields, "decoder_sparse_step")
    dense = fields["mlp_only_layers"] or []
    num_layers = count(fields, "num_hidden_layers")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigurationError(f"config.json: mlp_only_layers={dense!r} must be a list of layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))
