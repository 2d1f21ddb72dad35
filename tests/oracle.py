"""The reference: transformers, greedy, float32, eager attention.

`check_greedy` runs one teacher-forced forward over prompt and answer: the answer is greedy when
each of its tokens is the argmax of the logits before it. Where it isn't, it may still be a
near-tie (another batch shape's rounding flipped two almost equal logits): the gap between the
best logit and the answer's is then below `NEAR_TIE`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """`num_near_ties` tokens deviate by a near-tie; `wrong` holds (index, gap) of real errors."""

    num_near_ties: int
    wrong: tuple[tuple[int, float], ...]

    @property
    def is_right(self) -> bool:
        return not self.wrong


@lru_cache(maxsize=3)
def reference_model(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def check_greedy(folder: Path, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> GreedyCheck:
    """Answers repeat from one configuration to the next: each is checked once a session."""
    assert prompt_ids
    assert answer_ids
    return _check(folder, tuple(prompt_ids), tuple(answer_ids))


@lru_cache(maxsize=10_000)
@torch.inference_mode()
def _check(folder: Path, prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...]) -> GreedyCheck:
    ids = torch.tensor([[*prompt_ids, *answer_ids]])
    logits = reference_model(folder)(ids[:, :-1]).logits[0, len(prompt_ids) - 1 :]
    best = logits.max(dim=-1).values
    answer = ids[0, len(prompt_ids) :]
    gaps = best - logits.gather(1, answer[:, None])[:, 0]
    wrong = tuple((i, float(gap)) for i, gap in enumerate(gaps) if gap >= NEAR_TIE)
    is_other = answer != logits.argmax(dim=-1)
    return GreedyCheck(int((is_other & (gaps < NEAR_TIE)).sum()), wrong)
