"""Sampling parameters: one validation for the HTTP and the gRPC door.

Both doors hand in a plain mapping and get a frozen dataclass back. The rules, one per field
(README.md has them all, with examples that a test tries):

    absent or null     the default (of the model's generation_config, then Octavo's)
    temperature        0 .. 2; below 1e-5 it counts as 0 = greedy
    top_p              0 .. 1; below 1e-6 only the likeliest token is left: greedy
    top_k              -1 and 0 = off; at or above the vocabulary's size = off
    min_p              0 .. 1
    seed               -2^63 .. 2^63-1; absent = derived from the Idempotency-Key, else random
    max_tokens         >= 1, with echo 0 too; may not exceed what fits (no clamping)
    min_tokens         >= 0, at most max_tokens
    stop               a string or up to 16, each of 1 .. 1,024 characters
    stop_token_ids     up to 128 ids of the vocabulary
    n                  1 .. 128
    logprobs           0 .. 20 alternatives per token

Must not know: HTTP, protos. Entry point: `parse_sampling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.request_limits import MAX_ALTERNATIVES, MAX_SEQUENCES
from octavo_router.fields import MAX_INT32, Fields, refuse
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.token_rules import TokenRules, parse_token_rules

MAX_TEMPERATURE = 2.0
GREEDY_TEMPERATURE = 1e-5
GREEDY_TOP_P = 1e-6
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """A validated request's options. None: `max_tokens` = the door's default, `seed` = derived,
    `logprobs` = none. `max_tokens` 0 = only the prompt is scored."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None
    rules: TokenRules


def parse_sampling(
    raw: Mapping[str, Any], defaults: GenerationDefaults, vocab_size: int
) -> SamplingOptions:
    """The sampling options in `raw`; `logprobs` is a number of alternatives here.

    Raises InvalidRequestError.
    """
    fields = Fields(raw)
    temperature = fields.number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = fields.number("top_p", 0.0, 1.0)
    top_k = fields.integer("top_k", -1, MAX_INT32)
    min_p = fields.number("min_p", 0.0, 1.0)
    temperature = defaults.temperature if temperature is None else temperature
    top_p = defaults.top_p if top_p is None else top_p
    top_k = defaults.top_k if top_k is None else top_k
    if temperature < GREEDY_TEMPERATURE or top_p < GREEDY_TOP_P:
        temperature, top_p = 0.0, 1.0
    if top_k < 0 or top_k >= vocab_size:
        top_k = 0
    max_tokens, min_tokens = _num_tokens(fields)
    return SamplingOptions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=defaults.min_p if min_p is None else min_p,
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=fields.strings("stop", MAX_STOPS, MAX_STOP_CHARS, or_one=True),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size),
        ignore_eos=bool(fields.boolean("ignore_eos")),
        n=fields.integer("n", 1, MAX_SEQUENCES) or 1,
        logprobs=fields.integer("logprobs", 0, MAX_ALTERNATIVES),
        rules=parse_token_rules(raw, defaults, vocab_size),
    )


def _num_tokens(fields: Fields) -> tuple[int | None, int]:
    """max_tokens and min_tokens."""
    max_tokens = fields.integer("max_tokens", 0, MAX_INT32)
    if max_tokens == 0 and fields.raw.get("echo") is not True:
        refuse("max_tokens", "at least 1 (0 only with echo)", 0)
    min_tokens = fields.integer("min_tokens", 0, MAX_INT32) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"at most max_tokens ({max_tokens})", min_tokens)
    return max_tokens, min_tokens
