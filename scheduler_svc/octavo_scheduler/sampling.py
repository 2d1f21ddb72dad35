"""What the scheduler reads of a request's sampling parameters; the rest goes to workers unread.

The router checks ranges and says them well; here only what could fail a row or a worker is
refused. Must not know: the cell. Entry points: `check_sampling`, `needs_history`.
"""

import math

import numpy as np

from octavo.errors import InvalidRequestError
from octavo.request_limits import MAX_ALTERNATIVES
from octavo.v1 import common_pb2

# Bounds of the tables that a worker keeps for a row.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 256


def check_sampling(params: common_pb2.SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError naming the field."""
    if params.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}; at most max_tokens, {params.max_tokens}",
            param="min_tokens",
        )
    count_ids("stop_token_ids", params.stop_token_ids, None)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(params, name)
        if not math.isfinite(value):
            raise InvalidRequestError(f"{name} is {value}, no finite number", param=name)
    if params.HasField("repetition_penalty") and params.repetition_penalty <= 0:
        raise InvalidRequestError(
            f"repetition_penalty is {params.repetition_penalty}; it must be above 0",
            param="repetition_penalty",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) > MAX_ALTERNATIVES:
            raise InvalidRequestError(
                f"{name} is {getattr(params, name)}; at most {MAX_ALTERNATIVES}", param=name
            )
    _check_bias(params, vocab_size)
    count_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_bad_words(params, vocab_size)


def needs_history(params: common_pb2.SamplingParams) -> bool:
    """Whether a row with these parameters must be told all its known tokens."""
    has_additive = params.presence_penalty != 0 or params.frequency_penalty != 0
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    return has_additive or repetition != 1 or any(len(word) > 4 for word in params.bad_words)


def count_ids(name: str, packed: bytes, vocab_size: int | None) -> int:
    """Number of packed u32 ids; InvalidRequestError unless all are below `vocab_size`."""
    if len(packed) % 4:
        raise InvalidRequestError(f"{name} has {len(packed)} bytes: no packed u32", param=name)
    ids = np.frombuffer(packed, "<u4")
    if vocab_size is not None and ids.size and int(ids.max()) >= vocab_size:
        raise InvalidRequestError(
            f"{name} holds id {int(ids.max())}; ids end at {vocab_size - 1}", param=name
        )
    return ids.size


def _check_bias(params: common_pb2.SamplingParams, vocab_size: int) -> None:
    num_ids = count_ids("logit_bias", params.logit_bias_ids, vocab_size)
    values = params.logit_bias_values
    if len(values) != 4 * num_ids:
        raise InvalidRequestError(
            f"logit_bias has {num_ids} ids and {len(values)} bytes of values", param="logit_bias"
        )
    if not np.isfinite(np.frombuffer(values, "<f4")).all():
        raise InvalidRequestError("logit_bias holds a value that isn't finite", param="logit_bias")


def _check_bad_words(params: common_pb2.SamplingParams, vocab_size: int) -> None:
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"{len(params.bad_words)} bad_words; at most {MAX_BAD_WORDS}", param="bad_words"
        )
    for word in params.bad_words:
        if not 1 <= count_ids("bad_words", word, vocab_size) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words holds one of {len(word) // 4} tokens; 1 to {MAX_BAD_WORD_TOKENS}",
                param="bad_words",
            )
