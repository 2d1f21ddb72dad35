"""What changes a row's logits before its token is drawn, for the rows that asked for it.

In this order: repetition, presence and frequency penalty, bias with allowed and bad tokens, bad
phrases, ending ids below min_tokens. Rows without any of it cost nothing here. All state is on
the device and indexed by slots, so that a step needs the entries' numbers and nothing else from
the host.

Must not know: plans' checks, models. Entry points: `LogitRules.add`, `apply`, `note`.

E entries (drawn tokens) of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo_worker.bad_phrases import BadPhrases
from octavo_worker.logit_bias import LogitBias, bias_of, ending_mask_of
from octavo_worker.penalties import Penalties
from octavo_worker.plan import I64, RowAdd
from octavo_worker.row_limits import RowLimits
from octavo_worker.rows import RowTensors
from octavo_worker.side_pool import SidePool
from octavo_worker.step_work import RuleEntries


@dataclass(frozen=True, slots=True)
class _Part:
    """The entries that one kind of rule is for, int64 [E'] each, on the device."""

    entries: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class RuledStep:
    """A step's entries by kind of rule; None = no entry has it."""

    penalties: _Part | None
    bias: _Part | None
    phrases: _Part | None
    unfinished: _Part | None


class LogitRules:
    """All rules of all rows; the tables grow with the rows that need them."""

    def __init__(self, limits: RowLimits, rows: RowTensors) -> None:
        self._rows = rows
        self._vocab_size = limits.vocab_size
        num_rows, device = limits.num_rows, rows.device
        self._penalties = Penalties(num_rows, limits.vocab_size, device)
        self._bias = LogitBias(num_rows, limits.vocab_size, device)
        self._phrases = BadPhrases(num_rows, limits.max_model_len, device)
        self._endings = LogitBias(num_rows, limits.vocab_size, device)
        tables = (self._penalties, self._bias, self._phrases, self._endings)
        self._pools = tuple(table.pool for table in tables)

    @property
    def num_slots_used(self) -> int:
        """Of all kinds together."""
        return sum(pool.num_used for pool in self._pools)

    def add(self, adds: Sequence[RowAdd]) -> None:
        """Take in the rules of rows that join."""
        for add in adds:
            # A row that was failed was perhaps never removed.
            self.remove((add.row,))
            if add.sampling.has_penalty:
                self._penalties.add(add)
            if add.sampling.has_bias:
                self._bias.add(add.row, bias_of(add.sampling, self._vocab_size))
            if add.sampling.bad_phrases:
                self._phrases.add(add)
            if add.may_end_too_early:
                self._endings.add(add.row, ending_mask_of(add.sampling, self._vocab_size))

    def remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            for pool in self._pools:
                pool.release(row)

    def clear(self) -> None:
        for pool in self._pools:
            pool.clear()

    def of_step(self, entries: RuleEntries, rows: I64, positions: torch.Tensor) -> RuledStep:
        """The step whose entries are `rows`, drawing the tokens at `positions` (int64 [E])."""
        return RuledStep(
            penalties=self._part(self._penalties.pool, entries.penalties, rows, positions),
            bias=self._part(self._bias.pool, entries.bias, rows, positions),
            phrases=self._part(self._phrases.pool, entries.phrases, rows, positions),
            unfinished=self._part(self._endings.pool, entries.unfinished, rows, positions),
        )

    def _part(
        self, pool: SidePool, entries: I64, rows: I64, positions: torch.Tensor
    ) -> _Part | None:
        if len(entries) == 0:
            return None
        index, slots = self._rows.upload(np.stack([entries, pool.slots_of(rows[entries])]))
        return _Part(index, slots, positions[index])

    def apply(self, step: RuledStep, logits: torch.Tensor) -> None:
        """Change the entries' `logits` fp32 [E, V] in place."""
        if (part := step.penalties) is not None:
            self._penalties.apply(logits, part.entries, part.slots)
        if (part := step.bias) is not None:
            self._bias.apply(logits, part.entries, part.slots)
        if (part := step.phrases) is not None:
            self._phrases.apply(logits, part.entries, part.slots, part.positions)
        if (part := step.unfinished) is not None:
            self._endings.apply(logits, part.entries, part.slots)

    def note(self, step: RuledStep, tokens: torch.Tensor) -> None:
        """The step's entries drew `tokens` (int64 [E])."""
        if (part := step.penalties) is not None:
            self._penalties.note(part.slots, tokens[part.entries])
        if (part := step.phrases) is not None:
            self._phrases.note(part.slots, part.positions, tokens[part.entries])
