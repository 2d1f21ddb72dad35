"""The Session stream's messages to and from the router's own types.

The only file of the router that knows scheduler.proto's fields besides `session`. Columns are
little-endian and packed. Must not know: HTTP, text. Entry points: `to_submit`, `to_cancel`,
`deliver_tokens`, `deliver_prompt_logprobs`.
"""

import struct
from collections.abc import Mapping, Sequence

from octavo.cancel_reason import CancelReason
from octavo.errors import OctavoError, from_grpc_code
from octavo.telemetry import traceparent_of, tracestate_of
from octavo.v1 import common_pb2, scheduler_pb2
from octavo_router.flights import Flight, ResolvedSampling, TokenLogprob
from octavo_router.served_model import ServedModel
from octavo_router.token_rules import NO_RULES

MAX_DEADLINE_MS = 2**32 - 1


def pack_ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def to_submit(flight: Flight, model: ServedModel, now: float) -> scheduler_pb2.Submit:
    """The Submit of a flight; on a re-submit it names what was delivered.

    Hashes are made again if this cell's blocks are named differently. `now`: loop's clock.
    """
    order = flight.order
    hashes = order.hashes
    if model.root_hash(order.hash_salt) != hashes.root:
        hashes = model.hash_prompt(order.token_ids, order.hash_salt)
    submit = scheduler_pb2.Submit(
        handle=flight.handle,
        request_id=order.request_id,
        prompt_token_ids=order.token_ids.astype("<u4").tobytes(),
        root_hash=hashes.root,
        block_hashes=b"".join(hashes.blocks),
        sampling=_to_params(order.sampling),
        num_sequences=order.num_sequences,
        tenant=order.tenant,
        priority=order.priority,
        lost_scheduler_id=flight.lost_cell,
        num_suspicions=flight.num_worker_suspicions,
        resumes=[
            scheduler_pb2.ResumeSequence(
                sequence_index=sequence.index,
                delivered_token_ids=pack_ids(sequence.token_ids),
                finished=sequence.finish is not None,
            )
            for sequence in flight.sequences
            if sequence.token_ids or sequence.finish is not None
        ],
    )
    if order.trace is not None:
        submit.traceparent = traceparent_of(order.trace.context)
        submit.tracestate = tracestate_of(order.trace.context)
    if order.deadline is not None:
        left_ms = int((order.deadline - now) * 1000)
        submit.deadline_ms = min(max(left_ms, 1), MAX_DEADLINE_MS)
    return submit


def _to_params(sampling: ResolvedSampling) -> common_pb2.SamplingParams:
    params = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=pack_ids(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
    )
    if sampling.logprobs is not None:
        params.logprobs = sampling.logprobs
    if sampling.prompt_logprobs is not None:
        params.prompt_logprobs = sampling.prompt_logprobs
    if sampling.rules != NO_RULES:
        _add_rules(params, sampling)
    return params


def _add_rules(params: common_pb2.SamplingParams, sampling: ResolvedSampling) -> None:
    rules = sampling.rules
    if rules.presence_penalty:
        params.presence_penalty = rules.presence_penalty
    if rules.frequency_penalty:
        params.frequency_penalty = rules.frequency_penalty
    if rules.repetition_penalty != NO_RULES.repetition_penalty:
        params.repetition_penalty = rules.repetition_penalty
    values = [value for _, value in rules.logit_bias]
    params.logit_bias_ids = pack_ids([token_id for token_id, _ in rules.logit_bias])
    params.logit_bias_values = struct.pack(f"<{len(values)}f", *values)
    params.allowed_token_ids = pack_ids(rules.allowed_token_ids)
    params.bad_words.extend(map(pack_ids, sampling.bad_word_ids))


def to_cancel(
    handle: int, index: int | None, reason: CancelReason, num_kept: int
) -> scheduler_pb2.Cancel:
    cancel = scheduler_pb2.Cancel(
        handle=handle,
        reason=int(reason),  # type: ignore[arg-type]
        num_kept_tokens=num_kept,
    )
    if index is not None:
        cancel.sequence_index = index
    return cancel


def to_error(error: common_pb2.Error) -> OctavoError:
    retry = error.retry_after_ms if error.HasField("retry_after_ms") else None
    return from_grpc_code(error.code, error.message, param=error.param, retry_after_ms=retry)


def deliver_tokens(batch: scheduler_pb2.TokenBatch, flights: Mapping[int, Flight]) -> None:
    """Hand each entry's ids to its flight; unknown handles are skipped (they ended here)."""
    count = len(batch.handles) // 8
    handles = struct.unpack(f"<{count}Q", batch.handles)
    indexes = struct.unpack(f"<{count}I", batch.sequence_indexes)
    counts = struct.unpack(f"<{count}I", batch.counts)
    token_ids = list(struct.unpack(f"<{len(batch.token_ids) // 4}I", batch.token_ids))
    logprobs = {entry.token_index: entry.logprobs for entry in batch.logprobs}
    start = 0
    for handle, index, num_tokens in zip(handles, indexes, counts, strict=True):
        end = start + num_tokens
        flight = flights.get(handle)
        if flight is not None and not flight.is_over and index < len(flight.sequences):
            if flight.order.sampling.logprobs is not None:
                flight.deliver_logprobs(
                    index, [_to_logprob(logprobs[i]) for i in range(start, end)]
                )
            flight.deliver(index, token_ids[start:end])
        start = end


def deliver_prompt_logprobs(
    batch: scheduler_pb2.PromptLogprobsBatch, flights: Mapping[int, Flight]
) -> None:
    """Hand a prompt's log-probabilities to its flight, if it still wants them."""
    flight = flights.get(batch.handle)
    if flight is not None and not flight.is_over:
        flight.deliver_prompt_logprobs(batch.start, list(map(_to_logprob, batch.entries)))


def _to_logprob(logprobs: common_pb2.TokenLogprobs) -> TokenLogprob:
    count = len(logprobs.top_token_ids) // 4
    ids = struct.unpack(f"<{count}I", logprobs.top_token_ids)
    values = struct.unpack(f"<{count}f", logprobs.top_logprobs)
    return TokenLogprob(logprobs.logprob, tuple(zip(ids, values, strict=True)), logprobs.rank)
