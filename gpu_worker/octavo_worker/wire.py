"""Between the messages of worker.proto and plain data. The only place that knows both.

Raises FailedPreconditionError for a plan that can't be read as a whole; what is wrong with one
row is the row book's matter. Entry points: `plan_from_proto`, `results_to_proto`.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from octavo.blocks import HASH_BYTES
from octavo.errors import FailedPreconditionError
from octavo.v1 import common_pb2, worker_pb2
from octavo_worker.plan import (
    I64,
    Chunk,
    EntryLogprobs,
    Plan,
    PromptLogprobs,
    RowAdd,
    Sampling,
    StepOutcome,
)

# Far below the message limit: 20 bytes a block.
_INVENTORY_CHUNK_BLOCKS = 50_000


def _u32s(data: bytes, name: str) -> I64:
    if len(data) % 4:
        raise FailedPreconditionError(f"{name}: {len(data)} bytes are no packed u32")
    return np.frombuffer(data, "<u4").astype(np.int64)


def _ids(data: bytes, name: str) -> tuple[int, ...]:
    return tuple(_u32s(data, name).tolist()) if data else ()


def _f32s(data: bytes, name: str) -> tuple[float, ...]:
    if len(data) % 4:
        raise FailedPreconditionError(f"{name}: {len(data)} bytes are no packed f32")
    return tuple(np.frombuffer(data, "<f4").tolist()) if data else ()


def plan_from_proto(message: worker_pb2.Plan) -> Plan:
    """The plan of a message."""
    updates = _u32s(message.block_updates, "block_updates")
    if len(updates) % 3:
        raise FailedPreconditionError(f"block_updates: {len(updates)} numbers are no triples")
    return Plan(
        plan_id=message.plan_id,
        decode_until=message.decode_until,
        removed_rows=tuple(_u32s(message.removed_rows, "removed_rows").tolist()),
        added_rows=tuple(_row_add(add) for add in message.added_rows),
        block_updates=updates.reshape(-1, 3),
        chunks=tuple(_chunk(chunk) for chunk in message.chunks),
        sealed=tuple(sealed_from_proto(message.sealed)) if message.HasField("sealed") else (),
    )


def _row_add(add: worker_pb2.RowAdd) -> RowAdd:
    return RowAdd(
        row=add.row,
        generation=add.generation,
        sampling=_sampling(add.sampling),
        sequence_index=add.sequence_index,
        block_ids=_u32s(add.block_ids, "block_ids"),
        num_computed_tokens=add.num_computed_tokens,
        max_total_tokens=add.max_total_tokens,
        min_total_tokens=add.min_total_tokens,
        history_token_ids=_u32s(add.history_token_ids, "history_token_ids"),
        num_prompt_tokens=add.num_prompt_tokens,
        traceparent=add.traceparent,
    )


def _sampling(params: common_pb2.SamplingParams) -> Sampling:
    return Sampling(
        # Nothing is left to a default down here: without a temperature the row fails.
        temperature=params.temperature if params.HasField("temperature") else math.nan,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=_ids(params.stop_token_ids, "stop_token_ids"),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        logit_bias_ids=_ids(params.logit_bias_ids, "logit_bias_ids"),
        logit_bias_values=_f32s(params.logit_bias_values, "logit_bias_values"),
        allowed_token_ids=_ids(params.allowed_token_ids, "allowed_token_ids"),
        bad_words=tuple(_ids(word, "bad_words") for word in params.bad_words),
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def _chunk(chunk: worker_pb2.Chunk) -> Chunk:
    return Chunk(chunk.row, chunk.start, _u32s(chunk.token_ids, "token_ids"), chunk.is_last)


def sealed_from_proto(message: worker_pb2.SealedBlocks) -> Iterator[tuple[int, bytes]]:
    """(block id, hash) pairs."""
    block_ids = _u32s(message.block_ids, "sealed.block_ids").tolist()
    hashes = message.block_hashes
    if len(hashes) != HASH_BYTES * len(block_ids):
        raise FailedPreconditionError(
            f"sealed: {len(block_ids)} blocks but {len(hashes)} bytes of {HASH_BYTES}-byte hashes"
        )
    for index, block_id in enumerate(block_ids):
        yield block_id, hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]


def inventory_to_proto(
    sealed: Sequence[tuple[int, bytes]],
) -> Iterator[worker_pb2.WorkerAttachResponse]:
    """The sealed blocks in messages of bounded size, in the order given."""
    for start in range(0, len(sealed), _INVENTORY_CHUNK_BLOCKS):
        part = sealed[start : start + _INVENTORY_CHUNK_BLOCKS]
        blocks = worker_pb2.SealedBlocks(
            block_ids=np.array([block_id for block_id, _ in part], "<u4").tobytes(),
            block_hashes=b"".join(block_hash for _, block_hash in part),
        )
        yield worker_pb2.WorkerAttachResponse(inventory=blocks)


def results_to_proto(outcomes: Sequence[StepOutcome]) -> worker_pb2.WorkerStepsResponse:
    """One message for several steps, in order."""
    results = worker_pb2.StepResults(results=[_result(outcome) for outcome in outcomes])
    return worker_pb2.WorkerStepsResponse(results=results)


def _result(outcome: StepOutcome) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step=outcome.step,
        plan_id=outcome.plan_id,
        repeat=outcome.repeat,
        rows=outcome.rows.astype("<u4").tobytes(),
        generations=outcome.generations.astype("<u4").tobytes(),
        token_ids=outcome.token_ids.astype("<u4").tobytes(),
        events=outcome.events.tobytes(),
        logprobs=[_logprobs(item) for item in outcome.logprobs],
        errors=[
            worker_pb2.RowError(row=f.row, generation=f.generation, message=f.message)
            for f in outcome.faults
        ],
        wait_us=outcome.wait_us,
        step_us=outcome.step_us,
        prompt_logprobs=[_prompt_logprobs(item) for item in outcome.prompt_logprobs],
    )


def _logprobs(item: EntryLogprobs) -> worker_pb2.ResultLogprobs:
    values = common_pb2.TokenLogprobs(
        logprob=item.logprob,
        rank=item.rank,
        top_token_ids=item.top_token_ids.astype("<u4").tobytes(),
        top_logprobs=item.top_logprobs.astype("<f4").tobytes(),
    )
    return worker_pb2.ResultLogprobs(entry=item.entry, logprobs=values)


def _prompt_logprobs(item: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    top_ids, top_values = item.top_token_ids.astype("<u4"), item.top_logprobs.astype("<f4")
    message = worker_pb2.PromptLogprobs(row=item.row, generation=item.generation, start=item.start)
    for index, (logprob, rank) in enumerate(zip(item.logprobs, item.ranks, strict=True)):
        message.entries.add(
            logprob=logprob,
            rank=rank,
            top_token_ids=top_ids[index].tobytes(),
            top_logprobs=top_values[index].tobytes(),
        )
    return message
