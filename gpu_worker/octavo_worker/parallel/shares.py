"""What of a model one of several ranks holds: whole heads, a part of the MLP and vocabulary.

Must not know: tensors, processes. Entry point: `Share`.
"""

import dataclasses
from dataclasses import dataclass

from octavo.errors import ConfigurationError
from octavo_worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Share:
    """The part of rank `rank`, of `size` that count from 0."""

    rank: int
    size: int

    def of_config(self, config: ModelConfig) -> ModelConfig:
        """What this rank computes with: its own heads and its part of the MLP.

        Key and value heads that are fewer than the ranks are held by several of them. The
        vocabulary stays whole: its parts are put together before anyone looks at logits.
        Raises ConfigurationError naming the field that can't be shared out.
        """
        self._require("num_attention_heads", config.num_heads)
        self._require("intermediate_size", config.intermediate_size)
        num_kv_heads = config.num_kv_heads
        if self.size % num_kv_heads:
            self._require("num_key_value_heads", num_kv_heads)
        if config.moe is not None:
            self._require("moe_intermediate_size", config.moe.expert_size)
            self._require("shared_expert_intermediate_size", config.moe.shared_size)
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=len(self.of_heads(num_kv_heads)),
            intermediate_size=config.intermediate_size // self.size,
        )

    def of_heads(self, num_heads: int) -> range:
        """Whole heads: as many for every rank, or one for several ranks."""
        if num_heads >= self.size:
            return self.of_values(num_heads)
        head = self.rank * num_heads // self.size
        return range(head, head + 1)

    def of_values(self, size: int) -> range:
        """This rank's of equal parts."""
        assert size % self.size == 0, (size, self.size)
        count = size // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def of_vocabulary(self, vocab_size: int) -> range:
        """Token ids whose rows this rank holds; shorter, even empty, at the vocabulary's end."""
        count = self.vocab_rows(vocab_size)
        return range(min(self.rank * count, vocab_size), min((self.rank + 1) * count, vocab_size))

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of every rank's part of the vocabulary, padding included."""
        return -(-vocab_size // self.size)

    def _require(self, field: str, value: int) -> None:
        if value % self.size:
            raise ConfigurationError(
                f"OCTAVO_TENSOR_PARALLEL={self.size}: config.json's {field}={value} can't be "
                "shared out evenly by so many ranks",
                param="tensor_parallel",
            )
