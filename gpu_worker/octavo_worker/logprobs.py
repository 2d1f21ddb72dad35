"""Log-probabilities of tokens, drawn or given, under the raw logits.

Raw: before penalties, bias, masks, temperature and filters. So a token that those favoured or
barred is reported as the model alone sees it, with its rank even outside the alternatives.

Must not know: rows, plans' checks. Entry points: `gather_logprobs`, `to_entries`.

E' entries that asked, V vocabulary, A alternatives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from octavo_worker.plan import EntryLogprobs


class LogprobTensors(NamedTuple):
    """On the device, or on their way to the host."""

    logprob: torch.Tensor  # fp32 [E']
    rank: torch.Tensor  # int64 [E'], 0 = the likeliest
    top_ids: torch.Tensor  # int64 [E', A]
    top_logprobs: torch.Tensor  # fp32 [E', A]


def gather_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_alternatives: int
) -> LogprobTensors:
    """Of `tokens` (int64 [E']) under `logits` fp32 [E', V], with that many alternatives."""
    chosen = logits.gather(1, tokens[:, None])
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(min(num_alternatives, logits.shape[1]), dim=-1)
    return LogprobTensors(
        logprob=(chosen - normalizer).flatten(),
        rank=(logits > chosen).sum(dim=-1),
        top_ids=top.indices,
        top_logprobs=top.values - normalizer,
    )


def to_entries(
    tensors: LogprobTensors, entries: Sequence[int], counts: Sequence[int]
) -> list[EntryLogprobs]:
    """On the host: `entries` are the columns' indices, `counts` the alternatives each wants."""
    logprobs = tensors.logprob.tolist()
    ranks = tensors.rank.tolist()
    ids = tensors.top_ids.numpy().astype(np.uint32)
    values = tensors.top_logprobs.numpy()
    return [
        EntryLogprobs(entry, logprobs[i], ranks[i], ids[i, :count], values[i, :count])
        for i, (entry, count) in enumerate(zip(entries, counts, strict=True))
    ]
