"""What is added to a row's logits at every draw: bias, and -inf for ids that it must not draw.

Holds logit_bias, allowed_token_ids and the bad words of one token, which stay the same for the
row's whole life, as one dense row each: one addition, whatever there is of them.

Must not know: plans' checks, samplers. Entry points: `LogitBias.add`, `apply`.

P slots, V vocabulary, E entries of a step, E' of them with a bias.
"""

import numpy as np
import torch

from octavo_worker.plan import RowAdd
from octavo_worker.side_pool import SidePool, enlarge


class LogitBias:
    """fp32 [P, V] on the device, for the rows with a bias only."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.pool = SidePool(num_rows)
        self._vocab_size = vocab_size
        self._bias = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)

    def add(self, add: RowAdd) -> None:
        """Take in the bias of a row that joins."""
        slot = self.pool.take(add.row)
        self._bias = enlarge(self._bias, (self.pool.num_slots, self._vocab_size))
        sampling = add.sampling
        bias = np.zeros(self._vocab_size, np.float32)
        if sampling.allowed_token_ids:
            bias[:] = -np.inf
            bias[list(sampling.allowed_token_ids)] = 0.0
        bias[list(sampling.logit_bias_ids)] += np.array(sampling.logit_bias_values, np.float32)
        bias[list(sampling.bad_ids)] = -np.inf
        self._bias[slot] = torch.from_numpy(bias).to(self._bias.device)

    def apply(self, logits: torch.Tensor, entries: torch.Tensor, slots: torch.Tensor) -> None:
        """Change `logits` fp32 [E, V] at `entries`, whose slots are `slots` (int64 [E'] both)."""
        logits.index_add_(0, entries, self._bias[slots])
