"""Repetition, presence and frequency penalties: counts of what a row's tokens were.

    repetition  x / r if x > 0 else x * r     for every token in the prompt or the answer so far
    presence    x - p                         for every token that was generated
    frequency   x - f * times                 for every token, by how often it was generated

in this order (Keskar et al., "CTRL", 2019; the others as OpenAI's API defines them).

Must not know: plans' checks, samplers. Entry points: `Penalties.add`, `apply`, `note`.

P slots, V vocabulary, E entries of a step, E' of them with penalties.
"""

import numpy as np
import torch

from octavo_worker.plan import RowAdd
from octavo_worker.side_pool import SidePool, enlarge


class Penalties:
    """Counts on the device, for the rows with penalties only: 5 bytes a token of the vocabulary."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.pool = SidePool(num_rows)
        self._vocab_size = vocab_size
        self._num_generated = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._is_known = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        # fp32 [P, 3]: repetition, presence, frequency.
        self._factors = torch.zeros((0, 3), dtype=torch.float32, device=device)

    def add(self, add: RowAdd) -> None:
        """Count the known tokens of a row that joins."""
        slot = self.pool.take(add.row)
        size = self.pool.num_slots
        self._num_generated = enlarge(self._num_generated, (size, self._vocab_size))
        self._is_known = enlarge(self._is_known, (size, self._vocab_size))
        self._factors = enlarge(self._factors, (size, 3))
        sampling, device = add.sampling, self._factors.device
        factors = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._factors[slot] = torch.tensor(factors, device=device)
        known = torch.from_numpy(add.history_token_ids).to(device)
        self._is_known[slot] = False
        self._is_known[slot, known] = True
        generated = add.history_token_ids[add.num_prompt_tokens :]
        counts = np.bincount(generated, minlength=self._vocab_size).astype(np.int32)
        self._num_generated[slot] = torch.from_numpy(counts).to(device)

    def apply(self, logits: torch.Tensor, entries: torch.Tensor, slots: torch.Tensor) -> None:
        """Change `logits` fp32 [E, V] at `entries`, whose slots are `slots` (int64 [E'] both)."""
        x = logits[entries]
        repetition, presence, frequency = self._factors[slots].T[:, :, None]
        x = torch.where(
            self._is_known[slots], torch.where(x > 0, x / repetition, x * repetition), x
        )
        count = self._num_generated[slots]
        x -= presence * (count > 0)
        x -= frequency * count
        logits[entries] = x

    def note(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """The rows of `slots` drew `tokens` (int64 [E'] both)."""
        self._num_generated[slots, tokens] += 1
        self._is_known[slots, tokens] = True
