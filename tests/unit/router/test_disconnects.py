"""Clients that leave: the scheduler hears of it, the outcome is counted once, nothing is left."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from octavo.v1 import inference_pb2, scheduler_pb2
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until

CLIENT = scheduler_pb2.CANCEL_REASON_CLIENT


async def post_raw(router: RunningRouter, body: dict[str, Any]) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def assert_idle(router: RunningRouter, fake: FakeScheduler) -> None:
    await until(lambda: fake.num_live == 0)
    await until(lambda: router.value("octavo_requests_in_flight") == 0)
    sessions = router.service.sessions._ready.values()
    await until(lambda: not any(session.flights for session in sessions))


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("is_paused", [True, False], ids=["queued", "running"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves(is_stream: bool, is_paused: bool, how: str) -> None:
    async def main() -> None:
        fake = byte_scheduler(interval_s=0.002)
        async with running_router(fake) as router:
            fake.is_paused = is_paused
            body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1500, "stream": is_stream}
            _, writer = await post_raw(router, body)
            await until(lambda: len(fake.submits) == 2)
            if is_stream and not is_paused:
                await asyncio.sleep(0.01)
            if how == "reset":
                writer.transport.abort()
            else:
                writer.close()
            await until(lambda: len(fake.cancels) >= 2)
            assert {cancel.reason for cancel in fake.cancels} == {CLIENT}
            assert not any(cancel.HasField("sequence_index") for cancel in fake.cancels)
            fake.is_paused = False
            await assert_idle(router, fake)
            assert router.outcomes() == {("completions", "cancelled"): 1}
            answer = await router.http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 200

    asyncio.run(main())


def test_a_client_that_leaves_before_its_body_is_complete() -> None:
    async def main() -> None:
        fake = byte_scheduler()
        async with running_router(fake) as router:
            _, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.close()
            await until(lambda: router.outcomes() == {("completions", "cancelled"): 1})
            assert not fake.submits

    asyncio.run(main())


def test_a_grpc_client_that_cancels() -> None:
    async def main() -> None:
        fake = byte_scheduler(interval_s=0.002)
        async with running_router(fake) as router:
            call = router.inference.Generate(
                inference_pb2.InferenceGenerateRequest(text="x", max_tokens=1500)
            )
            await call.read()
            call.cancel()
            await until(lambda: bool(fake.cancels))
            assert fake.cancels[0].reason == CLIENT
            await assert_idle(router, fake)
            assert router.outcomes() == {("grpc_generate", "cancelled"): 1}

    asyncio.run(main())


def test_a_slow_reader_stalls_nobody() -> None:
    """Its ids wait in its flight; the others' session is read on."""

    async def main() -> None:
        fake = byte_scheduler(tokens_per_step=100, max_model_len=1 << 20)
        async with running_router(fake) as router:
            body = {"prompt": ["a"] * 8, "n": 8, "max_tokens": 2000, "logprobs": 1}
            writer = await router.open_stalled(body)
            for _ in range(5):
                answer = await router.http.post(
                    "/v1/completions", json={"prompt": "x", "max_tokens": 50}
                )
                assert answer.json()["usage"]["completion_tokens"] == 50
            # The whole answer arrived here though nobody reads it there.
            await until(lambda: fake.num_live == 0)
            assert router.value("octavo_requests_in_flight") == 1
            writer.transport.abort()
            await assert_idle(router, fake)
            outcomes = {("completions", "length"): 5, ("completions", "cancelled"): 1}
            assert router.outcomes() == outcomes

    asyncio.run(main())


def test_a_grpc_client_that_does_not_read_is_given_up() -> None:
    async def main() -> None:
        fake = byte_scheduler(tokens_per_step=50)
        async with running_router(fake, write_stall_s=0.3) as router:
            request = inference_pb2.InferenceGenerateRequest(
                text="x", n=32, max_tokens=2000, logprobs=20
            )
            call = router.inference.Generate(request)
            await call.read()
            await until(lambda: router.value("octavo_requests_in_flight") == 0)
            assert router.outcomes() == {("grpc_generate", "cancelled"): 1}
            await assert_idle(router, fake)
            call.cancel()
            # One that reads slowly, but reads, is none of these.
            call = router.inference.Generate(
                inference_pb2.InferenceGenerateRequest(text="x", max_tokens=300)
            )
            num_ids = 0
            async for message in call:
                num_ids += len(message.token_ids)
                await asyncio.sleep(0.1)
            assert num_ids == 300
            assert await call.code() == grpc.StatusCode.OK

    asyncio.run(main())


def test_many_leave_at_random_moments() -> None:
    async def main() -> None:
        fake = byte_scheduler(interval_s=0.001)
        async with running_router(fake) as router:

            async def visit(number: int) -> None:
                is_stream = number % 2 == 0
                body = {"prompt": "a", "max_tokens": 40, "stream": is_stream, "n": 1 + number % 3}
                reader, writer = await post_raw(router, body)
                if number % 3 == 0:
                    await asyncio.sleep(number % 7 / 400)
                    writer.transport.abort()
                    return
                ending = b"[DONE]\n\n" if is_stream else b"}}}"
                await reader.readuntil(ending)
                writer.close()

            await asyncio.gather(*(visit(number) for number in range(90)))
            await assert_idle(router, fake)
            outcomes = router.outcomes()
            assert sum(outcomes.values()) == 90
            assert set(outcomes) <= {("completions", "length"), ("completions", "cancelled")}
            assert outcomes[("completions", "length")] >= 60

    asyncio.run(main())
