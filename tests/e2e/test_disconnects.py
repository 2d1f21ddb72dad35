"""Clients that leave a real stack at any moment: rows come free, neighbours feel nothing."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest

from octavo.serving import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.edge import (
    AUTHORIZATION,
    CHAT,
    MAX_NUM_SEQS,
    TEXT,
    control,
    http_client,
    raw_request,
)
from tests.e2e.stack import Stack, total
from tests.fakes.raw_http import Dial, dialling

LONG_PROMPT = "the rain in Spain stays mainly in the plain " * 40
NUM_LONG = 400  # tokens of it, at least
SHORT: dict[str, Any] = {"prompt": "the cat", "max_tokens": 300, "ignore_eos": True}
# What a visitor asks for; each may take long enough to be left in the middle.
ERRANDS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {**SHORT, "stream": True}),
    (TEXT, SHORT),
    (TEXT, {**SHORT, "n": 3, "stream": True}),
    (TEXT, {**SHORT, "n": 3, "temperature": 1.0}),
    (TEXT, {**SHORT, "prompt": ["a", "the", "cat", "rain"], "stream": True}),
    (TEXT, {**SHORT, "prompt": ["a", "the", "cat", "rain"]}),
    (TEXT, {**SHORT, "prompt": LONG_PROMPT, "stream": True}),
    (TEXT, {**SHORT, "prompt": LONG_PROMPT, "stop": ["never to be found"]}),
    (TEXT, {**SHORT, "max_tokens": 1, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "stream": True}),
]
MOMENTS_S = (0.0, 0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


async def leave_http(dial: Dial, rng: random.Random) -> None:
    """Ask, wait, and go by a FIN, a RST, or after reading a little."""
    path, body = rng.choice(ERRANDS)
    connection = await dial()
    data = raw_request(body, path=path)
    how = rng.choice(("close", "abort", "cut", "read"))
    if how == "cut":
        data = data[: rng.randrange(1, len(data))]
    await connection.say(data)
    await asyncio.sleep(rng.choice(MOMENTS_S))
    if how == "read":
        await connection.reader.read(200)
    if how in ("abort", "read"):
        connection.transport.abort()
    else:
        connection.writer.close()


async def leave_grpc(stub: inference_pb2_grpc.InferenceStub, rng: random.Random) -> None:
    """Ask, and cancel or let the deadline pass."""
    text, n = rng.choice((LONG_PROMPT, "the cat")), rng.choice((1, 3))
    request = inference_pb2.InferenceGenerateRequest(
        text=text, max_tokens=300, ignore_eos=True, n=n
    )
    timeout = rng.choice((0.001, 0.004, 0.05, 30))
    call = stub.Generate(request, metadata=list(AUTHORIZATION.items()), timeout=timeout)
    await asyncio.sleep(rng.choice(MOMENTS_S))
    call.cancel()
    assert await call.code() in (
        *(grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK),
    )


def run(stack: Stack, check: Callable[..., Awaitable[int]]) -> tuple[int, dict[str, float]]:
    """Run `check` beside control streams; its result, and how the router's outcomes grew."""
    before = outcomes(stack)

    async def main() -> int:
        is_over = asyncio.Event()
        async with (
            http_client(stack) as client,
            dialling(stack.routers[0].ports["port"]) as dial,
            open_channel(stack.grpc_address) as channel,
        ):
            texts = [await control(client)]

            async def keep_streaming() -> None:
                while not is_over.is_set():
                    texts.append(await control(client))

            streaming = asyncio.create_task(keep_streaming())
            number = await check(client, dial, inference_pb2_grpc.InferenceStub(channel))
            is_over.set()
            await streaming
            texts.append(await control(client))
            assert len(set(texts)) == 1
            return number

    number = asyncio.run(main())
    stack.wait_idle()
    assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0
    return number, {name: value - before.get(name, 0) for name, value in outcomes(stack).items()}


def outcomes(stack: Stack) -> dict[str, float]:
    grown: dict[str, float] = {}
    for name, value in stack.router_metrics().items():
        if name.startswith("octavo_requests_total{"):
            outcome = name.split('outcome="')[1].split('"')[0]
            grown[outcome] = grown.get(outcome, 0) + value
    return grown


def leave_many(stack: Stack, rounds: int, seed: int) -> None:
    rng = random.Random(seed)

    async def check(client: httpx.AsyncClient, dial: Dial, stub: Any) -> int:
        gate = asyncio.Semaphore(12)

        async def visit(number: int) -> None:
            async with gate:
                if number % 4:
                    await leave_http(dial, random.Random(rng.random()))
                else:
                    await leave_grpc(stub, random.Random(rng.random()))

        await asyncio.gather(*(visit(number) for number in range(rounds)))
        return rounds

    _, grown = run(stack, check)
    ended = {name for name, value in grown.items() if value}
    assert ended <= {"cancelled", "deadline", "length", "stop"}
    assert grown["cancelled"] >= rounds // 4


def test_clients_that_leave_at_any_moment(edge_stack: Stack) -> None:
    leave_many(edge_stack, rounds=80, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_many_clients_that_leave_at_any_moment(edge_stack: Stack, seed: int) -> None:
    leave_many(edge_stack, rounds=400, seed=100 + seed)


def test_one_that_leaves_the_queue_never_gets_a_row(edge_stack: Stack) -> None:
    """More than there are rows wait; those who leave there compute nothing."""
    num_waiting = 6

    async def check(client: httpx.AsyncClient, dial: Dial, stub: Any) -> int:
        holders = [await dial() for _ in range(MAX_NUM_SEQS)]
        body = {**SHORT, "max_tokens": 1500, "stream": True}
        for connection in holders:
            await connection.say(raw_request(body))
        for connection in holders[:-1]:
            # The control stream has a row too.
            await connection.reader.readuntil(b"data: ")
        queries = total(edge_stack.scheduler_metrics(), "octavo_prefix_cache_queries_total")
        leavers = [await dial() for _ in range(num_waiting)]
        for number, connection in enumerate(leavers):
            body = {**SHORT, "prompt": LONG_PROMPT, "stream": bool(number % 2)}
            await connection.say(raw_request(body))
        await asyncio.sleep(0.3)
        for connection in leavers:
            connection.transport.abort()
        await asyncio.sleep(0.1)
        metrics = edge_stack.scheduler_metrics()
        now = total(metrics, "octavo_prefix_cache_queries_total")
        for connection in holders:
            connection.transport.abort()
        return int(now - queries)

    num_computed, grown = run(edge_stack, check)
    assert num_computed < NUM_LONG
    assert grown["cancelled"] == MAX_NUM_SEQS + num_waiting
