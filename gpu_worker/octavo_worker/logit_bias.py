"""What is added to a row's logits: bias, and -inf for ids that it must not draw.

Each row's is one dense vector that stays the same for the row's whole life, whatever there is in
it: one addition a draw. `bias_of` is for all draws, `ending_mask_of` for those below min_tokens.

Must not know: plans' checks, samplers. Entry points: `LogitBias.add`, `apply`, `bias_of`,
`ending_mask_of`.

P slots, V vocabulary, E entries of a step, E' of them with a bias.
"""

import numpy as np
import numpy.typing as npt
import torch

from octavo_worker.plan import Sampling
from octavo_worker.side_pool import SidePool, enlarge

F32 = npt.NDArray[np.float32]


def bias_of(sampling: Sampling, vocab_size: int) -> F32:
    """logit_bias, allowed_token_ids and the bad words of one token, [V]."""
    bias = np.zeros(vocab_size, np.float32)
    if sampling.allowed_token_ids:
        bias[:] = -np.inf
        bias[list(sampling.allowed_token_ids)] = 0.0
    bias[list(sampling.logit_bias_ids)] += np.array(sampling.logit_bias_values, np.float32)
    bias[list(sampling.bad_ids)] = -np.inf
    return bias


def ending_mask_of(sampling: Sampling, vocab_size: int) -> F32:
    """-inf for the ids that end the row, [V]; ids that no token has are nobody's."""
    mask = np.zeros(vocab_size, np.float32)
    mask[[token for token in sampling.stop_token_ids if token < vocab_size]] = -np.inf
    return mask


class LogitBias:
    """fp32 [P, V] on the device, for the rows with a bias only."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.pool = SidePool(num_rows)
        self._vocab_size = vocab_size
        self._bias = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)

    def add(self, row: int, bias: F32) -> None:
        """Take in the bias [V] of a row that joins."""
        slot = self.pool.take(row)
        self._bias = enlarge(self._bias, (self.pool.num_slots, self._vocab_size))
        self._bias[slot] = torch.from_numpy(bias).to(self._bias.device)

    def apply(self, logits: torch.Tensor, entries: torch.Tensor, slots: torch.Tensor) -> None:
        """Change `logits` fp32 [E, V] at `entries`, whose slots are `slots` (int64 [E'] both)."""
        logits.index_add_(0, entries, self._bias[slots])
