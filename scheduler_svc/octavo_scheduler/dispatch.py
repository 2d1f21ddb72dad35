"""Plans and results as messages: the worker edge of the scheduler.

Must not know: the cell. Entry points: `plan_to_proto`, `outcome_from_proto`,
`inventory_from_proto`.
"""

import numpy as np

from octavo.blocks import HASH_BYTES
from octavo.v1 import common_pb2, worker_pb2
from octavo_scheduler.plan import Plan, PromptPiece, StepOutcome


def _pack(values: tuple[int, ...]) -> bytes:
    return np.array(values, "<u4").tobytes()


def plan_to_proto(plan: Plan) -> worker_pb2.Plan:
    message = worker_pb2.Plan(plan_id=plan.plan_id, decode_until=plan.decode_until)
    if plan.removed_rows:
        message.removed_rows = _pack(plan.removed_rows)
    if plan.block_updates:
        message.block_updates = _pack(plan.block_updates)
    for added in plan.added_rows:
        sampling = common_pb2.SamplingParams.FromString(added.sampling)
        if not added.reports_prompt:
            sampling.ClearField("prompt_logprobs")
        message.added_rows.add(
            row=added.row,
            generation=added.generation,
            sampling=sampling,
            sequence_index=added.sequence_index,
            block_ids=_pack(added.block_ids),
            num_computed_tokens=added.num_computed_tokens,
            max_total_tokens=added.max_total_tokens,
            min_total_tokens=added.min_total_tokens,
            history_token_ids=added.history,
            num_prompt_tokens=added.num_prompt_tokens,
            traceparent=added.traceparent,
        )
    for chunk in plan.chunks:
        message.chunks.add(
            row=chunk.row, start=chunk.start, token_ids=chunk.token_ids, is_last=chunk.is_last
        )
    if plan.sealed_blocks:
        message.sealed.block_ids = _pack(plan.sealed_blocks)
        message.sealed.block_hashes = plan.sealed_hashes
    return message


def outcome_from_proto(message: worker_pb2.StepResult) -> StepOutcome:
    """Raises ValueError if the columns don't agree in length."""
    rows = np.frombuffer(message.rows, "<u4")
    generations = np.frombuffer(message.generations, "<u4")
    token_ids = np.frombuffer(message.token_ids, "<u4")
    events = np.frombuffer(message.events, np.uint8)
    if not rows.size == generations.size == token_ids.size == events.size:
        raise ValueError(f"step {message.step}: columns of different lengths")
    return StepOutcome(
        step=message.step,
        plan_id=message.plan_id,
        repeat=message.repeat,
        rows=rows,
        generations=generations,
        token_ids=token_ids,
        events=events,
        logprobs={item.entry: item.logprobs for item in message.logprobs},
        errors={(item.row, item.generation): item.message for item in message.errors},
        step_us=message.step_us,
        prompt_logprobs=[
            PromptPiece(item.row, item.generation, item.start, item.entries)
            for item in message.prompt_logprobs
        ],
    )


def inventory_from_proto(message: worker_pb2.SealedBlocks) -> tuple[list[int], list[bytes]]:
    """Block ids and as many hashes."""
    data = message.block_hashes
    hashes = [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]
    return np.frombuffer(message.block_ids, "<u4").tolist(), hashes
