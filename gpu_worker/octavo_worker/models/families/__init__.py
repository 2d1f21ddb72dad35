"""The families: what an architecture's name says that its config.json doesn't.

A family is a row of its maker's file, with what doesn't fit into one (other words in config.json,
another order of tensors) beside it. Defaults hold where a key is absent from config.json (null is
not absent), and equal those of transformers' configuration classes. Must not know: tensors, files.
Entry points: `FAMILIES`, `find_family`, `family_of`.
"""

from octavo.errors import ConfigurationError
from octavo_worker.models.families import chatglm, gemma, glm, llama, phi3, qwen, qwen1
from octavo_worker.models.families.family import Family
from octavo_worker.models.fields import Fields
from octavo_worker.models.text_part import text_fields

__all__ = ["FAMILIES", "Family", "family_of", "find_family"]

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *qwen1.FAMILIES,
    *phi3.FAMILIES,
    *glm.FAMILIES,
    *chatglm.FAMILIES,
    *gemma.FAMILIES,
)


def find_family(fields: Fields) -> Family | None:
    """The family that config.json's `architectures` (else its `model_type`) names, if any; of a
    model that takes images, too, that of its text part."""
    fields = text_fields(fields)
    architectures = fields.get("architectures") or []
    for family in FAMILIES:
        named = any(name in architectures for name in (family.architecture, *family.aliases))
        if named or (not architectures and family.model_type == fields.get("model_type")):
            return family
    return None


def family_of(fields: Fields) -> Family:
    """The family of config.json. Raises ConfigurationError that lists the supported ones."""
    family = find_family(fields)
    if family is not None:
        return family
    architectures = fields.get("architectures") or []
    named = ", ".join(map(str, architectures)) or f"of model_type {fields.get('model_type')!r}"
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigurationError(f"architecture {named} isn't supported; supported: {supported}")
