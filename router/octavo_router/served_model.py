"""What a scheduler says it serves, as the router uses it.

Must not know: the wire, HTTP. Entry point: `ServedModel`.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from octavo.blocks import BlockHashRoot, chain
from octavo.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ServedModel(ModelSpec):
    """The model of a cell. `max_request_tokens`: what its largest worker's KV pool can hold, in
    tokens of prompt and answer together; 0 = not known."""

    max_request_tokens: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, max_request_tokens: int = 0) -> "ServedModel":
        """`spec`, and what its scheduler says besides."""
        facts = {item.name: getattr(spec, item.name) for item in fields(ModelSpec)}
        return cls(**facts, max_request_tokens=max_request_tokens)

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and answer together: as the model and the largest KV pool allow."""
        return min(self.max_model_len, self.max_request_tokens or self.max_model_len)

    def root_hash(self, salt: str | None) -> bytes:
        """The 16 bytes that precede the first block; `salt` (blocks.salt_of) None = shared by
        all."""
        root = BlockHashRoot(
            model=self.name,
            revision=self.revision,
            block_size=self.block_size,
            kv_scheme=self.kv_scheme,
            salt=salt,
        )
        return root.digest()

    def hash_prompt(self, token_ids: npt.NDArray[np.uint32], salt: str | None) -> "PromptHashes":
        """Hashes of the prompt's full blocks: about 2 us a block, so call it in a thread."""
        root = self.root_hash(salt)
        return PromptHashes(root, tuple(chain(root, token_ids, self.block_size)), self.block_size)


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """The chain of a prompt: `blocks[i]` covers the ids up to `(i + 1) * block_size`."""

    root: bytes
    blocks: tuple[bytes, ...]
    block_size: int
