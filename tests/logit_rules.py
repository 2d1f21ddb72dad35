"""What a row's rules do to its logits, said twice: in plain loops, and by transformers' processors.

Entry points: `Rules`, `plain_logits`, `transformers_logits`, `greedy`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)


@dataclass(frozen=True)
class Rules:
    """One row's; the defaults are none."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()


LogitsOf = Callable[[list[int]], torch.Tensor]
Apply = Callable[[torch.Tensor, Sequence[int], Sequence[int], Rules], torch.Tensor]


def plain_logits(
    logits: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], rules: Rules
) -> torch.Tensor:
    """fp32 [V] after the rules, token by token."""
    values = logits.numpy().copy()
    known = [*prompt, *answer]
    for token in set(known):
        x = values[token]
        values[token] = x / values.dtype.type(rules.repetition) if x > 0 else x * rules.repetition
    for token in set(answer):
        values[token] -= rules.presence
        values[token] -= rules.frequency * answer.count(token)
    for token, value in rules.bias:
        values[token] += value
    for token in range(len(values)):
        if rules.allowed and token not in rules.allowed:
            values[token] = -math.inf
    for word in rules.bad_words:
        if len(word) == 1 or (
            len(word) <= len(known) and tuple(known[1 - len(word) :]) == word[:-1]
        ):
            values[word[-1]] = -math.inf
    if len(answer) < rules.min_tokens:
        values[list(rules.ending_ids)] = -math.inf
    return torch.from_numpy(values)


class _AnswerPenalties(LogitsProcessor):
    """Presence and frequency, which transformers lacks: OpenAI's formula."""

    def __init__(self, rules: Rules, num_prompt: int) -> None:
        self._rules, self._num_prompt = rules, num_prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1])
        return scores - self._rules.presence * (counts > 0) - self._rules.frequency * counts


def transformers_logits(
    logits: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], rules: Rules
) -> torch.Tensor:
    """fp32 [V] after transformers' processors, in the order of the contract."""
    processors = LogitsProcessorList()
    if rules.repetition != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(rules.repetition))
    processors.append(_AnswerPenalties(rules, len(prompt)))
    if rules.bias:
        processors.append(SequenceBiasLogitsProcessor({(i,): value for i, value in rules.bias}))
    if rules.allowed:
        allowed = list(rules.allowed)
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1))
    if rules.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in rules.bad_words]))
    if rules.ending_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), rules.min_tokens, list(rules.ending_ids))
        )
    return processors(torch.tensor([[*prompt, *answer]]), logits[None])[0]


def greedy(
    logits_of: LogitsOf, prompt: list[int], num_tokens: int, rules: Rules, apply: Apply
) -> list[int]:
    """At most `num_tokens` greedy ids, up to and with an ending one. `logits_of(ids)`: fp32 [V]."""
    answer: list[int] = []
    while len(answer) < num_tokens:
        logits = apply(logits_of([*prompt, *answer]), prompt, answer, rules)
        answer.append(int(logits.argmax()))
        if answer[-1] in rules.ending_ids:
            break
    return answer
