"""What plans are checked against: a worker's bounds, and what can be wrong with a new row.

Must not know: row states, tensors. Entry points: `RowLimits`, `problem_of`.
"""

import math
from dataclasses import dataclass

from octavo.request_limits import MAX_ALTERNATIVES
from octavo_worker.plan import I64, RowAdd, Sampling


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The bounds that plans are checked against."""

    num_rows: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int

    @property
    def max_blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def has_row(self, row: int) -> bool:
        return 0 <= row < self.num_rows


def problem_of(add: RowAdd, limits: RowLimits) -> str | None:
    """Why a row can't be what `add` says; None if it can."""
    if len(add.block_ids) > limits.max_blocks_per_row:
        return f"{len(add.block_ids)} blocks: at most {limits.max_blocks_per_row} fit a row"
    if not _are_below(limits.num_blocks, add.block_ids, least=1):
        return f"a block id is outside 1 .. {limits.num_blocks - 1}"
    if not 0 < add.max_total_tokens <= limits.max_model_len:
        return f"max_total_tokens {add.max_total_tokens}: must be 1 .. {limits.max_model_len}"
    if add.num_computed_tokens > len(add.block_ids) * limits.block_size:
        return f"{add.num_computed_tokens} computed tokens exceed {len(add.block_ids)} blocks"
    if (name := _wrong_parameter(add.sampling, limits.vocab_size)) is not None:
        return f"sampling parameter out of range: {name}"
    return _problem_of_history(add, limits)


def _wrong_parameter(sampling: Sampling, vocab_size: int) -> str | None:
    """Name of the first parameter that is out of its range."""
    wanted = (sampling.logprobs or 0, sampling.prompt_logprobs or 0)
    bias = sampling.logit_bias_values
    id_lists = (sampling.logit_bias_ids, sampling.allowed_token_ids, *sampling.bad_words)
    checks = {
        "temperature": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "top_k": sampling.top_k >= 0,
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
        "logprobs": max(wanted) <= MAX_ALTERNATIVES,
        "logit_bias": len(bias) == len(sampling.logit_bias_ids) and all(map(math.isfinite, bias)),
        "bad_words": all(sampling.bad_words),
        "token ids": all(max(ids, default=0) < vocab_size for ids in id_lists),
    }
    return next((name for name, is_right in checks.items() if not is_right), None)


def _problem_of_history(add: RowAdd, limits: RowLimits) -> str | None:
    """The history is there if it is needed, and can index tables."""
    history = add.history_token_ids
    if not add.sampling.needs_history:
        return None
    if not 0 < add.num_prompt_tokens <= len(history) <= limits.max_model_len:
        return f"a history of {len(history)} tokens with a prompt of {add.num_prompt_tokens}"
    if not _are_below(limits.vocab_size, history):
        return f"token id {history.max()}: the vocabulary has {limits.vocab_size}"
    return None


def _are_below(limit: int, ids: I64, least: int = 0) -> bool:
    return len(ids) == 0 or bool(ids.min() >= least and ids.max() < limit)
