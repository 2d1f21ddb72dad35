"""Bad words of several tokens: the token that would complete one is not drawn.

Holds the rows' token histories on the device, so that the tokens before a draw need no host. A
phrase longer than the whole context never counts, as in transformers' processor.

Must not know: plans' checks, samplers. Entry points: `BadPhrases.add`, `apply`, `note`.

P slots, N phrases a slot, L tokens before a phrase's last, E entries of a step, E' of them with
bad phrases.
"""

import numpy as np
import torch

from octavo_worker.plan import RowAdd
from octavo_worker.side_pool import SidePool, enlarge

# Stands for any token, in the places that a short phrase leaves unused.
_ANY = -1
# The length of a phrase that isn't there: longer than every context.
_NEVER = 2**31 - 1


class BadPhrases:
    """Histories and phrases on the device, for the rows with phrases only."""

    def __init__(self, num_rows: int, max_model_len: int, device: torch.device) -> None:
        self.pool = SidePool(num_rows)
        self._max_model_len = max_model_len
        self._history = torch.zeros((0, max_model_len), dtype=torch.int32, device=device)
        # [P, N, L]: the tokens before the last one, nearest first.
        self._before = torch.zeros((0, 1, 1), dtype=torch.int32, device=device)
        self._last = torch.zeros((0, 1), dtype=torch.int64, device=device)
        self._length = torch.zeros((0, 1), dtype=torch.int64, device=device)

    def add(self, add: RowAdd) -> None:
        """Take in the known tokens and the phrases of a row that joins."""
        phrases = add.sampling.bad_phrases
        slot = self.pool.take(add.row)
        size = (self.pool.num_slots, len(phrases))
        self._history = enlarge(self._history, (size[0], self._max_model_len))
        num_before = max(len(phrase) for phrase in phrases) - 1
        self._before = enlarge(self._before, (*size, num_before), _ANY)
        self._last = enlarge(self._last, size)
        self._length = enlarge(self._length, size, _NEVER)
        before = np.full(self._before.shape[1:], _ANY, np.int32)
        last = np.zeros(self._last.shape[1], np.int64)
        length = np.full(self._length.shape[1], _NEVER, np.int64)
        for index, phrase in enumerate(phrases):
            before[index, : len(phrase) - 1] = phrase[-2::-1]
            last[index], length[index] = phrase[-1], len(phrase)
        for tensor, values in ((self._before, before), (self._last, last), (self._length, length)):
            tensor[slot] = torch.from_numpy(values).to(tensor.device)
        known = torch.from_numpy(add.history_token_ids.astype(np.int32))
        self._history[slot, : len(known)] = known.to(self._history.device)

    def apply(
        self,
        logits: torch.Tensor,
        entries: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Change `logits` fp32 [E, V] at `entries`, which draw the tokens at `positions`.

        `entries`, `slots` and `positions` are int64 [E'].
        """
        before = self._before[slots]
        distance = torch.arange(1, before.shape[2] + 1, device=logits.device)
        index = (positions[:, None] - distance).clamp_(min=0)
        context = self._history[slots[:, None], index]
        is_next = ((before == context[:, None]) | (before == _ANY)).all(dim=2)
        is_next &= self._length[slots] <= positions[:, None]
        mask = torch.zeros(is_next.shape, device=logits.device).masked_fill_(is_next, -torch.inf)
        logits.index_put_((entries[:, None], self._last[slots]), mask, accumulate=True)

    def note(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """The rows of `slots` drew `tokens` at `positions` (int64 [E'] all)."""
        self._history[slots, positions] = tokens.to(torch.int32)
