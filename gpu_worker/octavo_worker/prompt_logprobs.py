"""Log-probabilities of the prompt's own tokens, from a step's hidden states.

Logits are made and reduced a slice at a time: V floats a position are more than a long chunk
may hold at once.

Must not know: rows, samplers. Entry points: `gather_piece`, `to_prompt_logprobs`.

T tokens of a step, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch

from octavo_worker.logprobs import LogprobTensors, gather_logprobs
from octavo_worker.plan import PromptLogprobs
from octavo_worker.prompt_piece import PromptPiece

# 128 MiB of fp32.
_MOST_LOGITS = 1 << 25


def gather_piece(
    piece: PromptPiece,
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> LogprobTensors:
    """The piece's values, still on the device, from the step's states `hidden` [T, hidden size]."""
    num_tokens = len(piece.token_ids)
    states = hidden[piece.first_state : piece.first_state + num_tokens]
    tokens = torch.from_numpy(piece.token_ids).to(hidden.device)
    size = max(1, _MOST_LOGITS // vocab_size)
    parts = [
        gather_logprobs(to_logits(some_states), some_tokens, piece.num_alternatives)
        for some_states, some_tokens in zip(states.split(size), tokens.split(size), strict=True)
    ]
    return LogprobTensors(*(torch.cat(column) for column in zip(*parts, strict=True)))


def to_prompt_logprobs(piece: PromptPiece, tensors: LogprobTensors) -> PromptLogprobs:
    """On the host, once the step is done."""
    return PromptLogprobs(
        row=piece.row,
        generation=piece.generation,
        start=piece.start,
        logprobs=tensors.logprob.tolist(),
        ranks=tensors.rank.tolist(),
        top_token_ids=tensors.top_ids.numpy().astype(np.uint32),
        top_logprobs=tensors.top_logprobs.numpy(),
    )
