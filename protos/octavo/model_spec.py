"""What a worker serves: the facts on which a cell's workers, its scheduler and routers agree.

`common.proto`'s ModelSpec as plain data, with its translation: all three services hold it, and
whatever one of them adds to it is its own. Must not know: any service. Entry points: `ModelSpec`,
`spec_from_proto`, `spec_to_proto`.
"""

from dataclasses import dataclass

from octavo.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A served model; the fields before `max_model_len` enter the block hashes.

    `block_size` and `max_model_len` (prompt and answer together) count tokens; ids are in
    [0, vocab_size); an id of `eos_token_ids` ends a sequence unless its request says ignore_eos.
    """

    name: str
    revision: str
    block_size: int
    kv_scheme: str
    hash_version: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def spec_from_proto(message: common_pb2.ModelSpec) -> ModelSpec:
    """The spec of a message."""
    return ModelSpec(
        name=message.name,
        revision=message.revision,
        block_size=message.block_size,
        kv_scheme=message.kv_scheme,
        hash_version=message.hash_version,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
    )


def spec_to_proto(spec: ModelSpec) -> common_pb2.ModelSpec:
    """The message of a spec."""
    return common_pb2.ModelSpec(
        name=spec.name,
        revision=spec.revision,
        block_size=spec.block_size,
        kv_scheme=spec.kv_scheme,
        hash_version=spec.hash_version,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
    )
