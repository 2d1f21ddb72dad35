"""What a scheduler says it serves, as the router uses it.

Must not know: the wire, HTTP. Entry point: `ServedModel`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.blocks import BlockHashRoot, chain


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a cell. All fields but the two lengths and the ids enter the block hashes.

    `max_model_len`: longest prompt and answer together, in tokens. `max_request_tokens`: what
    the largest worker's KV pool can hold, 0 = not known.
    """

    name: str
    revision: str
    block_size: int
    kv_scheme: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_request_tokens: int = 0

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
