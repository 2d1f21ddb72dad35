"""A scheduler's order for one step, and what came of it, as plain data.

The rules are those at the top of `worker.proto`; `wire` translates. Must not know: protobuf,
tensors.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row draws; see `SamplingParams` in common.proto."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias_ids: tuple[int, ...] = ()
    logit_bias_values: tuple[float, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None

    @property
    def has_penalty(self) -> bool:
        has_additive = self.presence_penalty != 0 or self.frequency_penalty != 0
        return has_additive or self.repetition_penalty != 1

    @property
    def bad_ids(self) -> tuple[int, ...]:
        """Bad words of one token: never drawn."""
        return tuple(word[0] for word in self.bad_words if len(word) == 1)

    @property
    def bad_phrases(self) -> tuple[tuple[int, ...], ...]:
        """Bad words of several tokens: the last one depends on those before it."""
        return tuple(word for word in self.bad_words if len(word) > 1)

    @property
    def has_bias(self) -> bool:
        """Whether something is added to logits that stays the same for the row's whole life."""
        return bool(self.logit_bias_ids or self.allowed_token_ids or self.bad_ids)

    @property
    def needs_history(self) -> bool:
        has_prompt_logprobs = self.prompt_logprobs is not None
        return self.has_penalty or bool(self.bad_phrases) or has_prompt_logprobs

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def has_filter(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def _no_ids() -> I64:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowAdd:
    """A sequence takes a row. `history_token_ids`: all known tokens, for rows that need them.

    `traceparent`: the span in which it takes the row, if its request is sampled.
    """

    row: int
    generation: int
    sampling: Sampling
    sequence_index: int
    block_ids: I64
    num_computed_tokens: int
    max_total_tokens: int
    min_total_tokens: int = 0
    history_token_ids: I64 = field(default_factory=_no_ids)
    num_prompt_tokens: int = 0
    traceparent: str = ""

    @property
    def may_end_too_early(self) -> bool:
        """Whether an ending id is barred at some draw."""
        is_early = self.min_total_tokens > self.num_prompt_tokens + 1
        return is_early and bool(self.sampling.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + len(token_ids)) of a row, to compute in the plan's step."""

    row: int
    start: int
    token_ids: I64
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def _no_updates() -> I64:
    return np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's changes and chunks; the decode rows are implied."""

    plan_id: int
    decode_until: int = 0
    removed_rows: tuple[int, ...] = ()
    added_rows: tuple[RowAdd, ...] = ()
    block_updates: I64 = field(default_factory=_no_updates)  # [n, 3]: row, table index, block
    chunks: tuple[Chunk, ...] = ()
    sealed: tuple[tuple[int, bytes], ...] = ()  # (block id, hash)

    @property
    def num_chunk_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RowFault:
    """The worker failed a row. `generation` is 0 if nobody holds it."""

    row: int
    generation: int
    message: str


@dataclass(frozen=True, slots=True)
class EntryLogprobs:
    """Log-probabilities of one drawn token (entry of the result's columns), raw logits."""

    entry: int
    logprob: float
    rank: int
    top_token_ids: U32
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of n consecutive prompt tokens, the first at position `start`; A alternatives each."""

    row: int
    generation: int
    start: int
    logprobs: list[float]
    ranks: list[int]
    top_token_ids: U32  # [n, A]
    top_logprobs: npt.NDArray[np.float32]  # [n, A]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step drew, in columns with one entry a token."""

    step: int
    plan_id: int
    repeat: int
    rows: U32
    generations: U32
    token_ids: U32
    events: npt.NDArray[np.uint8]
    logprobs: tuple[EntryLogprobs, ...]
    faults: tuple[RowFault, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    wait_us: int
    step_us: int
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    gap_us: int = 0
    launch_us: int = 0
