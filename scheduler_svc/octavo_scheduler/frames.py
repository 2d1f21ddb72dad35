"""Submissions and frames as messages: the session edge of the scheduler.

Must not know: the cell's inside, streams. Entry points: `submission_from_proto`,
`frame_to_proto`, `load_to_proto`.
"""

from dataclasses import dataclass

import numpy as np

from octavo.blocks import HASH_BYTES
from octavo.cancel_reason import CancelReason
from octavo.errors import InvalidRequestError, OctavoError
from octavo.model_spec import ModelSpec
from octavo.request_limits import MAX_SEQUENCES
from octavo.telemetry import Tracer
from octavo.v1 import common_pb2, scheduler_pb2
from octavo_scheduler.admission import QueueFullError
from octavo_scheduler.outbox import FinishedNote, Frame, TokenFrame
from octavo_scheduler.sampling import check_sampling, count_ids, needs_history
from octavo_scheduler.sequence import MAX_PRIORITY, FinishReason, Resume, Submission
from octavo_scheduler.sequence_trace import follow

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """A cell's load; fields as in common.proto's Load."""

    backlog_tokens: int
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int
    prefill_tokens_per_s: int
    draining: bool
    prompt_backlog_tokens: int


def submission_from_proto(
    message: scheduler_pb2.Submit, model: ModelSpec, tracer: Tracer | None = None
) -> Submission:
    """A checked submission; raises InvalidRequestError naming the field."""
    num_tokens = count_ids("prompt_token_ids", message.prompt_token_ids, model.vocab_size)
    if num_tokens == 0:
        raise InvalidRequestError("the prompt has no token; send at least one", param="prompt")
    if len(message.root_hash) != HASH_BYTES:
        raise InvalidRequestError(
            f"root_hash has {len(message.root_hash)} bytes, not {HASH_BYTES}", param="root_hash"
        )
    hashes = message.block_hashes
    expected = num_tokens // model.block_size * HASH_BYTES
    if len(hashes) != expected:
        raise InvalidRequestError(
            f"block_hashes has {len(hashes)} bytes; {num_tokens} tokens in blocks of "
            f"{model.block_size} make {expected}",
            param="block_hashes",
        )
    if not 1 <= message.num_sequences <= MAX_SEQUENCES:
        raise InvalidRequestError(
            f"num_sequences is {message.num_sequences}, not in 1 .. {MAX_SEQUENCES}", param="n"
        )
    sampling = message.sampling
    check_sampling(sampling, model.vocab_size)
    ending_ids = np.frombuffer(sampling.stop_token_ids, "<u4").tolist()
    return Submission(
        handle=message.handle,
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        root_hash=message.root_hash,
        block_hashes=tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)),
        sampling=sampling.SerializeToString(),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ending_ids=frozenset(ending_ids),
        num_sequences=message.num_sequences,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
        tenant=message.tenant,
        priority=max(-MAX_PRIORITY, min(message.priority, MAX_PRIORITY)),
        resumes=_resumes(message, model),
        lost_scheduler_id=message.lost_scheduler_id,
        num_suspicions=message.num_suspicions,
        needs_history=needs_history(sampling),
        wants_prompt_logprobs=sampling.HasField("prompt_logprobs"),
        trace=follow(tracer, message.traceparent, message.tracestate),
    )


def _resumes(message: scheduler_pb2.Submit, model: ModelSpec) -> tuple[Resume, ...]:
    resumes: list[Resume] = []
    for resume in message.resumes:
        count = count_ids("resumes", resume.delivered_token_ids, model.vocab_size)
        is_new = all(resume.sequence_index != other.sequence_index for other in resumes)
        if resume.sequence_index >= message.num_sequences or not is_new:
            raise InvalidRequestError(
                f"resumes names sequence {resume.sequence_index} of {message.num_sequences}",
                param="resumes",
            )
        if count > message.sampling.max_tokens:
            raise InvalidRequestError(
                f"{count} tokens delivered exceed max_tokens {message.sampling.max_tokens}",
                param="resumes",
            )
        resumes.append(Resume(resume.sequence_index, resume.delivered_token_ids, resume.finished))
    return tuple(resumes)


def cancel_reason_from_proto(value: int) -> CancelReason:
    """CLIENT for what is left open, or is of a later version."""
    try:
        return CancelReason(value)
    except ValueError:
        return CancelReason.CLIENT


def error_to_proto(error: OctavoError) -> common_pb2.Error:
    message = common_pb2.Error(
        code=error.kind.grpc_code, message=error.message, param=error.param or ""
    )
    if error.retry_after_ms is not None:
        message.retry_after_ms = error.retry_after_ms
    return message


def load_to_proto(load: LoadNumbers) -> common_pb2.Load:
    return common_pb2.Load(
        backlog_tokens=load.backlog_tokens,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_used_blocks=load.num_used_blocks,
        num_blocks=load.num_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        draining=load.draining,
        prompt_backlog_tokens=load.prompt_backlog_tokens,
    )


def frame_to_proto(frame: Frame, load: LoadNumbers) -> scheduler_pb2.SchedulerSessionResponse:
    message = scheduler_pb2.SchedulerSessionResponse(number=frame.number, load=load_to_proto(load))
    for started in frame.started:
        message.started.add(
            handle=started.handle,
            sequence_index=started.sequence_index,
            num_cached_tokens=started.num_cached_tokens,
            queue_ms=started.queue_ms,
        )
    for prompt in frame.prompt_logprobs:
        message.prompt_logprobs.add(
            handle=prompt.handle, start=prompt.start, entries=prompt.entries
        )
    if frame.tokens is not None:
        _fill_tokens(message.tokens, frame.tokens)
    for finished in frame.finished:
        _fill_finished(message.finished.add(), finished)
    for rejected in frame.rejected:
        is_full = isinstance(rejected.error, QueueFullError)
        error = error_to_proto(rejected.error)
        message.rejected.add(handle=rejected.handle, error=error, is_full=is_full)
    for suspect in frame.suspects:
        message.suspects.add(handle=suspect.handle, num_suspicions=suspect.num_suspicions)
    return message


def _fill_tokens(message: scheduler_pb2.TokenBatch, tokens: TokenFrame) -> None:
    message.handles = tokens.handles.astype("<u8", copy=False).tobytes()
    message.sequence_indexes = tokens.indexes.astype("<u4", copy=False).tobytes()
    message.counts = tokens.counts.astype("<u4", copy=False).tobytes()
    message.token_ids = tokens.token_ids.astype("<u4", copy=False).tobytes()
    for token_index, logprobs in sorted(tokens.logprobs.items()):
        message.logprobs.add(token_index=token_index, logprobs=logprobs)


def _fill_finished(message: scheduler_pb2.Finished, finished: FinishedNote) -> None:
    message.handle = finished.handle
    message.sequence_index = finished.sequence_index
    message.reason = _FINISH_REASONS[finished.reason]
    message.num_tokens = finished.num_tokens
    message.num_preemptions = finished.num_preemptions
    message.num_moves = finished.num_moves
    if finished.error is not None:
        message.error.CopyFrom(error_to_proto(finished.error))
