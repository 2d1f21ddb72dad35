"""Fields that change which tokens may be drawn: penalties, bias, allowed ids, bad words.

    presence_penalty     -2 .. 2, off each token that was generated before
    frequency_penalty    -2 .. 2, off it as many times as it was generated
    repetition_penalty   0.01 .. 100 (1 = off), of tokens in prompt and answer
    logit_bias           up to 1,024 ids of the vocabulary -> -100 .. 100
    allowed_token_ids    at least one id; no other is drawn, the ending ids no more than others
    bad_words            up to 128 strings of 1 .. 256 characters, tokenized with and without a
                         leading space; what would complete one is not drawn

They act in this order, before temperature, as transformers' processors and OpenAI's formulas do;
min_tokens is the last of the masks. Must not know: HTTP, protos, tokenizers.
Entry points: `TokenRules`, `parse_token_rules`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_router.fields import Fields, refuse
from octavo_router.generation_defaults import GenerationDefaults

MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BIAS = 100.0
MAX_BIASED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The defaults change nothing. `allowed_token_ids` () = all are."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


NO_RULES = TokenRules()


def parse_token_rules(
    raw: Mapping[str, Any], defaults: GenerationDefaults, vocab_size: int
) -> TokenRules:
    """Raises InvalidRequestError."""
    fields = Fields(raw)
    repetition = fields.number("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    allowed = fields.token_ids("allowed_token_ids", vocab_size, vocab_size)
    if not allowed and raw.get("allowed_token_ids") is not None:
        refuse("allowed_token_ids", "a list of at least one token id", [])
    rules = TokenRules(
        presence_penalty=fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        repetition_penalty=defaults.repetition_penalty if repetition is None else repetition,
        logit_bias=_logit_bias(fields, vocab_size),
        allowed_token_ids=allowed,
        bad_words=fields.strings("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    )
    return NO_RULES if rules == NO_RULES else rules


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias")
    if not biases:
        return ()
    if len(biases) > MAX_BIASED_IDS:
        refuse("logit_bias", f"of at most {MAX_BIASED_IDS} ids", len(biases))
    return tuple(sorted(_bias(key, biases, vocab_size) for key in biases))


def _bias(key: str, biases: Mapping[str, Any], vocab_size: int) -> tuple[int, float]:
    if not _ID.fullmatch(key) or int(key) >= vocab_size:
        refuse("logit_bias", f"of ids between 0 and {vocab_size - 1}", key)
    if biases[key] is None:
        refuse(f"logit_bias.{key}", "a number", None)
    value = Fields({f"logit_bias.{key}": biases[key]}).number(
        f"logit_bias.{key}", -MAX_BIAS, MAX_BIAS
    )
    assert value is not None
    return int(key), value
