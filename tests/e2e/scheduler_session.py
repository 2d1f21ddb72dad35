"""Drive a scheduler's `Session` as a router does, below all text: ids in, ids out.

Entry points: `Order`, `run_orders`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from octavo import WIRE_VERSION
from octavo.blocks import BlockHashRoot, chain
from octavo.serving import open_channel
from octavo.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

TIMEOUT_S = 120.0


@dataclass
class Order:
    """A request, and what came back by sequence index."""

    prompt: list[int]
    sampling: common_pb2.SamplingParams
    num_sequences: int = 1
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    # (position, values) of the prompt's tokens, as they came.
    prompt_logprobs: list[tuple[int, common_pb2.TokenLogprobs]] = field(default_factory=list)
    num_cached_tokens: int = -1
    finished: dict[int, scheduler_pb2.Finished] = field(default_factory=dict)
    rejected: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.rejected) or len(self.finished) == self.num_sequences

    @property
    def answer(self) -> list[int]:
        return self.tokens.get(0, [])


def u32s(values: Sequence[int]) -> bytes:
    return np.array(values, "<u4").tobytes()


def run_orders(address: str, orders: Sequence[Order]) -> None:
    """Submit all at once; returns when each has ended."""
    asyncio.run(asyncio.wait_for(_run(address, orders), TIMEOUT_S))


async def _run(address: str, orders: Sequence[Order]) -> None:
    async with open_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Session()
        hello = scheduler_pb2.SessionHello(wire_version=WIRE_VERSION, router_id="test")
        await call.write(scheduler_pb2.SchedulerSessionRequest(hello=hello))
        model = (await call.read()).welcome.model
        root = BlockHashRoot(model.name, model.revision, model.block_size, model.kv_scheme)
        for handle, order in enumerate(orders, 1):
            submit = _submit(handle, order, root.digest(), model.block_size)
            await call.write(scheduler_pb2.SchedulerSessionRequest(submit=submit))
        while not all(order.is_over for order in orders):
            frame = await call.read()
            assert frame is not grpc.aio.EOF, "the session broke"  # type: ignore[attr-defined]
            _take(frame, orders)
        call.cancel()


def _submit(handle: int, order: Order, root: bytes, block_size: int) -> scheduler_pb2.Submit:
    ids = np.array(order.prompt, np.uint32)
    return scheduler_pb2.Submit(
        handle=handle,
        prompt_token_ids=ids.tobytes(),
        root_hash=root,
        block_hashes=b"".join(chain(root, ids, block_size)),
        sampling=order.sampling,
        num_sequences=order.num_sequences,
    )


def _take(frame: scheduler_pb2.SchedulerSessionResponse, orders: Sequence[Order]) -> None:
    for started in frame.started:
        order = orders[started.handle - 1]
        if started.sequence_index == 0:
            order.num_cached_tokens = started.num_cached_tokens
    for batch in frame.prompt_logprobs:
        order = orders[batch.handle - 1]
        assert not order.answer, "a prompt reported after its first token"
        order.prompt_logprobs += enumerate(batch.entries, batch.start)
    tokens = frame.tokens
    handles = np.frombuffer(tokens.handles, "<u8").tolist()
    indexes = np.frombuffer(tokens.sequence_indexes, "<u4").tolist()
    counts = np.frombuffer(tokens.counts, "<u4").tolist()
    ids = np.frombuffer(tokens.token_ids, "<u4").tolist()
    logprobs = {item.token_index: item.logprobs for item in tokens.logprobs}
    first = 0
    for handle, index, count in zip(handles, indexes, counts, strict=True):
        order = orders[handle - 1]
        order.tokens.setdefault(index, []).extend(ids[first : first + count])
        order.logprobs += [logprobs[i] for i in range(first, first + count) if i in logprobs]
        first += count
    for finished in frame.finished:
        orders[finished.handle - 1].finished[finished.sequence_index] = finished
    for rejected in frame.rejected:
        orders[rejected.handle - 1].rejected = rejected.error.message
