"""A scheduler without workers: an aio gRPC Scheduler that obeys scheduler.proto.

Its tokens come from a script, so that tests and benchmarks of the router know every id that
must arrive. The default script depends only on the prompt, the sequence and the position:
after a move the next scheduler goes on with the very same ids.

    async with FakeScheduler(script=my_script) as fake:  ... fake.address ...
    python -m tests.fakes.fake_scheduler --port 0 --interval-ms 25     (prints its address)
"""

import argparse
import asyncio
import json
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo import WIRE_VERSION
from octavo.blocks import HASH_VERSION
from octavo.serving import GrpcServer
from octavo.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

Request = scheduler_pb2.SchedulerSessionRequest
Response = scheduler_pb2.SchedulerSessionResponse


def ids_of(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


@dataclass(frozen=True)
class Plan:
    """What one sequence will produce: all its ids (resumed ones included), then its end."""

    token_ids: Sequence[int]
    reason: int = common_pb2.FINISH_REASON_LENGTH
    error: common_pb2.Error | None = None


Script = Callable[[scheduler_pb2.Submit, int], "Plan | common_pb2.Error"]


def counting_script(submit: scheduler_pb2.Submit, index: int) -> Plan:
    """`max_tokens` printable ASCII ids (for a byte tokenizer) that depend on the prompt's sum."""
    start = sum(ids_of(submit.prompt_token_ids)) + 7 * index
    return Plan([97 + (start + i) % 26 for i in range(submit.sampling.max_tokens)])


@dataclass
class _Sequence:
    submit: scheduler_pb2.Submit
    index: int
    plan: Plan
    num_sent: int
    is_started: bool = False


@dataclass
class _Session:
    hello: scheduler_pb2.SessionHello
    frames: asyncio.Queue[Response | None] = field(default_factory=asyncio.Queue)
    sequences: dict[tuple[int, int], _Sequence] = field(default_factory=dict)
    is_cancelled: bool = False


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """See the module. `tokens_per_step` ids per sequence and frame, a frame per `interval_s`.

    Public for assertions: `submits`, `cancels`, `num_pings`, `num_sessions`.
    While `is_paused` nothing is produced. `reject`: an Error for every Submit,
    `is_full`: told with it.
    """

    def __init__(
        self,
        *,
        script: Script = counting_script,
        scheduler_id: str = "fake",
        interval_s: float = 0.0,
        tokens_per_step: int = 1,
        num_cached_tokens: int = 0,
        block_size: int = 16,
        max_model_len: int = 2048,
        vocab_size: int = 256,
        eos_token_ids: Sequence[int] = (0,),
        max_request_tokens: int = 0,
    ) -> None:
        self.script = script
        self.scheduler_id = scheduler_id
        self.interval_s = interval_s
        self.tokens_per_step = tokens_per_step
        self.num_cached_tokens = num_cached_tokens
        self.max_request_tokens = max_request_tokens
        self.wire_version = WIRE_VERSION
        self.model = common_pb2.ModelSpec(
            name="fake/model",
            revision="r1",
            block_size=block_size,
            kv_scheme="fp32",
            hash_version=HASH_VERSION,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=list(eos_token_ids),
        )
        self.load = common_pb2.Load(num_blocks=1024)
        self.submits: list[scheduler_pb2.Submit] = []
        self.cancels: list[scheduler_pb2.Cancel] = []
        self.num_pings = 0
        self.num_sessions = 0
        self.is_paused = False
        # Told of every request that moves.
        self.num_suspicions = 0
        # No sequence goes beyond so many ids.
        self.hold_at: int | None = None
        # As a stopped process: the connection lives, nothing is said.
        self.is_silent = False
        self.prompt_logprobs_per_batch = 4
        self.reject: common_pb2.Error | None = None
        self.is_full = False
        # What Watch says, how many watch now, and how many ever began to.
        self.picture: dict[str, Any] = {"workers": []}
        self.num_watching = 0
        self.num_watches = 0
        self.address = ""
        self._sessions: list[_Session] = []
        self._has_work = asyncio.Event()
        self._server: GrpcServer | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "FakeScheduler":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> str:
        self._server = GrpcServer()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server.server)
        bound = await self._server.start("127.0.0.1", port, scheduler_pb2.DESCRIPTOR)
        await self._server.set_serving(True)
        self._ticker = asyncio.create_task(self._tick())
        self.address = f"127.0.0.1:{bound}"
        return self.address

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0)
        self._ticker = self._server = None

    @property
    def num_live(self) -> int:
        """Sequences not yet ended."""
        return sum(len(session.sequences) for session in self._sessions)

    def drop_sessions(self) -> None:
        """End every stream without a word; the server goes on listening."""
        for session in self._sessions:
            session.sequences.clear()
            session.frames.put_nowait(None)

    def cancel_sessions(self) -> None:
        """End every stream as CANCELLED, as a server that is torn down does."""
        for session in self._sessions:
            session.sequences.clear()
            session.is_cancelled = True
            session.frames.put_nowait(None)

    def tell_suspects(self, num_suspicions: int) -> None:
        """Tell every router that so many workers died on each of its requests."""
        for session in self._sessions:
            frame = Response(load=self.load)
            for handle in {handle for handle, _ in session.sequences}:
                frame.suspects.add(handle=handle, num_suspicions=num_suspicions)
            session.frames.put_nowait(frame)

    def refuse_waiting(self, error: common_pb2.Error) -> None:
        """Refuse every request that has no row yet, long after it came."""
        for session in self._sessions:
            handles = {h for (h, _), one in session.sequences.items() if not one.is_started}
            for handle in handles:
                rejected = scheduler_pb2.Rejected(handle=handle, error=error)
                session.frames.put_nowait(Response(rejected=[rejected], load=self.load))
            session.sequences = {
                key: one for key, one in session.sequences.items() if key[0] not in handles
            }

    def move_sessions(self, successor: str = "") -> None:
        """Tell every router to go elsewhere."""
        for session in self._sessions:
            handles = {handle for handle, _ in session.sequences}
            session.sequences.clear()
            moved = scheduler_pb2.Moved(successor=successor)
            for handle in handles if self.num_suspicions else ():
                moved.suspects.add(handle=handle, num_suspicions=self.num_suspicions)
            session.frames.put_nowait(Response(moved=moved))
            session.frames.put_nowait(None)

    # The service.

    async def Describe(  # noqa: N802
        self,
        request: Any,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> scheduler_pb2.SchedulerDescribeResponse:
        return scheduler_pb2.SchedulerDescribeResponse(
            wire_version=self.wire_version,
            scheduler_id=self.scheduler_id,
            model=self.model,
            load=self.load,
            max_request_tokens=self.max_request_tokens,
        )

    async def Session(  # noqa: N802
        self,
        request_iterator: AsyncIterator[Request],
        context: Any,
    ) -> AsyncIterator[Response]:
        first = await anext(request_iterator)
        assert first.HasField("hello"), "the first message must be hello"
        if self.is_silent:
            await asyncio.Event().wait()
        session = _Session(first.hello)
        welcome = scheduler_pb2.SessionWelcome(
            wire_version=self.wire_version, scheduler_id=self.scheduler_id, model=self.model
        )
        yield Response(welcome=welcome, load=self.load)
        self._sessions.append(session)
        self.num_sessions += 1
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            while (frame := await session.frames.get()) is not None:
                yield frame
            if session.is_cancelled:
                await context.abort(grpc.StatusCode.CANCELLED, "cancelled")
        finally:
            self._sessions.remove(session)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def Watch(  # noqa: N802
        self,
        request: scheduler_pb2.SchedulerWatchRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[scheduler_pb2.SchedulerWatchResponse]:
        self.num_watches += 1
        self.num_watching += 1
        try:
            while True:
                picture = json.dumps(self.picture).encode()
                yield scheduler_pb2.SchedulerWatchResponse(picture_json=picture)
                await asyncio.sleep(request.interval_ms / 1000)
        finally:
            self.num_watching -= 1

    async def _read(self, session: _Session, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    self._submit(session, request.submit)
                case "cancel":
                    self._cancel(session, request.cancel)
                case "ping":
                    self.num_pings += 1
                    if not self.is_silent:
                        session.frames.put_nowait(Response(load=self.load))
                case other:
                    raise AssertionError(f"unexpected {other}")

    def _submit(self, session: _Session, submit: scheduler_pb2.Submit) -> None:
        self.submits.append(submit)
        plans = [self.script(submit, index) for index in range(submit.num_sequences)]
        refusal = self.reject or next((p for p in plans if isinstance(p, common_pb2.Error)), None)
        if refusal is not None:
            rejected = scheduler_pb2.Rejected(
                handle=submit.handle, error=refusal, is_full=self.is_full
            )
            session.frames.put_nowait(Response(rejected=[rejected], load=self.load))
            return
        resumes = {resume.sequence_index: resume for resume in submit.resumes}
        for index, plan in enumerate(plans):
            assert isinstance(plan, Plan)
            resume = resumes.get(index)
            if resume is not None and resume.finished:
                continue
            delivered = ids_of(resume.delivered_token_ids) if resume else []
            # A real scheduler computes on from these; a wrong one would show in the text.
            assert delivered == list(plan.token_ids[: len(delivered)]), (delivered, plan)
            sequence = _Sequence(submit, index, plan, len(delivered))
            session.sequences[submit.handle, index] = sequence
        self._has_work.set()

    def _cancel(self, session: _Session, cancel: scheduler_pb2.Cancel) -> None:
        self.cancels.append(cancel)
        reason = common_pb2.FINISH_REASON_CANCELLED
        if cancel.reason == scheduler_pb2.CANCEL_REASON_STOP:
            reason = common_pb2.FINISH_REASON_STOP
        only = cancel.sequence_index if cancel.HasField("sequence_index") else None
        ended = [
            sequence
            for (handle, index), sequence in session.sequences.items()
            if handle == cancel.handle and only in (None, index)
        ]
        for sequence in ended:
            del session.sequences[cancel.handle, sequence.index]
        finished = [
            scheduler_pb2.Finished(
                handle=cancel.handle, sequence_index=s.index, reason=reason, num_tokens=s.num_sent
            )
            for s in ended
        ]
        if finished:
            session.frames.put_nowait(Response(finished=finished))

    # The steps.

    async def _tick(self) -> None:
        """One frame per session and step, as a scheduler's flush does."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._has_work.wait()
            due = max(due + self.interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            if self.is_paused:
                await asyncio.sleep(0.005)
                continue
            for session in self._sessions:
                self._step(session)
            if not self.num_live:
                self._has_work.clear()

    def _step(self, session: _Session) -> None:
        if not session.sequences:
            return
        frame = Response(load=self.load)
        handles: list[int] = []
        indexes: list[int] = []
        counts: list[int] = []
        token_ids: list[int] = []
        for key, sequence in list(session.sequences.items()):
            if not sequence.is_started:
                sequence.is_started = True
                frame.started.add(
                    handle=key[0],
                    sequence_index=key[1],
                    num_cached_tokens=self.num_cached_tokens,
                )
                self._add_prompt_logprobs(frame, sequence)
            end = min(sequence.num_sent + self.tokens_per_step, len(sequence.plan.token_ids))
            if self.hold_at is not None:
                end = max(sequence.num_sent, min(end, self.hold_at))
            new = list(sequence.plan.token_ids[sequence.num_sent : end])
            sequence.num_sent = end
            if new:
                handles.append(key[0])
                indexes.append(key[1])
                counts.append(len(new))
                if sequence.submit.sampling.HasField("logprobs"):
                    self._add_logprobs(frame, sequence, new, len(token_ids))
                token_ids += new
            if end == len(sequence.plan.token_ids):
                del session.sequences[key]
                finished = frame.finished.add(
                    handle=key[0], sequence_index=key[1], reason=sequence.plan.reason
                )
                finished.num_tokens = sequence.num_sent
                if sequence.plan.error is not None:
                    finished.error.CopyFrom(sequence.plan.error)
        frame.tokens.handles = struct.pack(f"<{len(handles)}Q", *handles)
        frame.tokens.sequence_indexes = struct.pack(f"<{len(indexes)}I", *indexes)
        frame.tokens.counts = struct.pack(f"<{len(counts)}I", *counts)
        frame.tokens.token_ids = struct.pack(f"<{len(token_ids)}I", *token_ids)
        session.frames.put_nowait(frame)

    def _add_prompt_logprobs(self, frame: Response, sequence: _Sequence) -> None:
        """Of the first sequence, unless it had a token before: -0.25 for each id of the prompt,
        in batches of at most `prompt_logprobs_per_batch`; alternatives as for generated ids."""
        sampling = sequence.submit.sampling
        if not sampling.HasField("prompt_logprobs") or sequence.index or sequence.num_sent:
            return
        token_ids = ids_of(sequence.submit.prompt_token_ids)
        for start in range(1, len(token_ids), self.prompt_logprobs_per_batch):
            batch = frame.prompt_logprobs.add(handle=sequence.submit.handle, start=start)
            for token_id in token_ids[start : start + self.prompt_logprobs_per_batch]:
                batch.entries.append(self._logprobs(token_id, -0.25, sampling.prompt_logprobs))

    def _logprobs(self, token_id: int, value: float, count: int) -> common_pb2.TokenLogprobs:
        tops = [(token_id + i) % self.model.vocab_size for i in range(count)]
        return common_pb2.TokenLogprobs(
            logprob=value,
            top_token_ids=struct.pack(f"<{count}I", *tops),
            top_logprobs=struct.pack(f"<{count}f", *(value - i for i in range(count))),
        )

    def _add_logprobs(
        self, frame: Response, sequence: _Sequence, new: list[int], start: int
    ) -> None:
        """-0.5 for the chosen id; the i-th alternative is (id + i) with -0.5 - i."""
        count = sequence.submit.sampling.logprobs
        for offset, token_id in enumerate(new):
            entry = frame.tokens.logprobs.add(token_index=start + offset)
            entry.logprobs.CopyFrom(self._logprobs(token_id, -0.5, count))


async def _serve(arguments: argparse.Namespace) -> None:
    fake = FakeScheduler(
        interval_s=arguments.interval_ms / 1000,
        tokens_per_step=arguments.tokens_per_step,
        max_model_len=arguments.max_model_len,
        vocab_size=arguments.vocab_size,
        eos_token_ids=arguments.eos,
        block_size=arguments.block_size,
        script=lambda submit, index: Plan(
            [
                arguments.first_id + (submit.handle + index + i) % arguments.num_ids
                for i in range(submit.sampling.max_tokens)
            ]
        ),
    )
    print(await fake.start(arguments.port), flush=True)
    # Ends with its parent: stdin closes.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await fake.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--interval-ms", type=float, default=25.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--eos", type=int, nargs="*", default=[2])
    parser.add_argument("--first-id", type=int, default=1000, help="ids go round from here")
    parser.add_argument("--num-ids", type=int, default=500)
    asyncio.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
