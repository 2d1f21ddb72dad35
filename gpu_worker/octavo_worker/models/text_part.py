"""The text part of models that take images, too: it is a family's model under other names.

config.json describes it in `text_config`, over the defaults of its own class; checkpoints store it
behind a prefix, beside tensors of the other parts, which aren't read. Must not know: families,
files. Entry points: `text_fields`, `has_other_parts`, `text_name`.
"""

from octavo.errors import ConfigurationError
from octavo_worker.models.fields import Fields

# Architectures whose text part attends as the same model alone does, when there is no image.
TEXT_PARTS = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
# What is said of the whole model.
_OF_ALL = (
    *("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "initializer_range"),
    *("quantization_config", "compression_config"),
)
# Stored prefix -> that of the text model alone.
_PREFIXES = {"model.language_model.": "model.", "language_model.": "", "lm_head.": "lm_head."}


def has_other_parts(fields: Fields) -> bool:
    """Whether config.json is of such a model."""
    return any(name in TEXT_PARTS for name in fields.get("architectures") or ())


def text_fields(fields: Fields) -> Fields:
    """config.json as if of the text part alone, told by its `model_type`; others as they are.

    Raises ConfigurationError if it isn't described.
    """
    if not has_other_parts(fields):
        return fields
    inner = fields.get("text_config")
    if not isinstance(inner, dict):
        raise ConfigurationError(f"config.json: text_config={inner!r:.200} must be an object")
    of_all = {name: fields[name] for name in _OF_ALL if fields.get(name) is not None}
    return {**inner, **of_all, "architectures": []}


def text_name(stored: str) -> str | None:
    """A stored tensor's name in the text model; None: it belongs to another part."""
    for prefix, own in _PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None
