"""Clients that leave, short requests among long ones, memory that holds real tokens."""

import asyncio
import random
from pathlib import Path

import grpc.aio
import pytest
from octavo.serving import open_channel
from octavo.v1 import inference_pb2_grpc
from tokenizers import Tokenizer

from tests.e2e.generation import generate, request, run_all
from tests.e2e.prompts import prompt_ids
from tests.e2e.stack import Stack, free_port, scrape, total

NUM_REQUESTS = 300


@pytest.fixture(scope="module")
def encode(tiny_folder: Path) -> object:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_a_third_of_the_clients_leave_and_nothing_leaks(
    tiny_folder: Path, tmp_path: Path, encode: object
) -> None:
    rng = random.Random(5)
    prompts = prompt_ids(encode, [rng.randint(1, 120) for _ in range(NUM_REQUESTS)])  # type: ignore[arg-type]
    messages = [
        request(ids, max_tokens=rng.randint(1, 60), n=rng.choice((1, 1, 1, 3)), ignore_eos=True)
        for ids in prompts
    ]
    flags = ("--check-integrity", "true")
    worker_flags = ("--num-kv-blocks", "200")
    with Stack(
        tmp_path, model=tiny_folder, scheduler_flags=flags, worker_flags=worker_flags
    ) as stack:

        async def one(stub: inference_pb2_grpc.InferenceStub, number: int) -> int:
            await asyncio.sleep(rng.random() * 6)
            task = asyncio.ensure_future(generate(stub, messages[number]))
            if number % 3 == 0:
                await asyncio.sleep(rng.random() * 0.3)
                task.cancel()
            try:
                answer = await task
            except (asyncio.CancelledError, grpc.aio.AioRpcError):
                return -1
            return answer.completion_tokens

        async def run() -> list[int]:
            async with open_channel(stack.grpc_address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                return await asyncio.gather(*(one(stub, i) for i in range(NUM_REQUESTS)))

        counts = asyncio.run(run())
        for message, count in zip(messages, counts, strict=True):
            assert count in (-1, message.max_tokens * message.n)
        assert counts.count(-1) > NUM_REQUESTS // 10
        stack.wait_idle()
        metrics = stack.router_metrics()
        assert total(metrics, "octavo_requests_in_flight") == 0
        assert total(metrics, "octavo_requests_total") == NUM_REQUESTS
        worker_log = stack.workers[0].log()
        assert "Traceback" not in worker_log + stack.schedulers[0].log() + stack.routers[0].log()


def test_short_request_does_not_wait_for_long_ones(
    tiny_folder: Path, tmp_path: Path, encode: object
) -> None:
    prompts = prompt_ids(encode, [40] * 20 + [5])  # type: ignore[arg-type]
    metrics_port = str(free_port())
    with Stack(tmp_path, model=tiny_folder, worker_flags=("--metrics-port", metrics_port)) as stack:
        steps: dict[str, float] = {}

        async def run() -> tuple[int, int]:
            async with open_channel(stack.grpc_address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                long = [
                    asyncio.ensure_future(
                        generate(stub, request(ids, max_tokens=400, ignore_eos=True))
                    )
                    for ids in prompts[:20]
                ]
                await asyncio.sleep(0.5)
                steps["before"] = scrape(int(metrics_port))["octavo_worker_steps_total"]
                short = await generate(stub, request(prompts[20], max_tokens=5, ignore_eos=True))
                steps["after"] = scrape(int(metrics_port))["octavo_worker_steps_total"]
                unfinished = sum(not task.done() for task in long)
                answers = await asyncio.gather(*long)
                assert {len(answer.ids) for answer in answers} == {400}
                return len(short.ids), unfinished

        assert asyncio.run(run()) == (5, 20)
    assert steps["after"] - steps["before"] > 0


def test_sequences_of_one_request_share_their_prompt(
    tiny_folder: Path, tmp_path: Path, encode: object
) -> None:
    ids = prompt_ids(encode, [160])[0]  # type: ignore[arg-type]
    with Stack(tmp_path, model=tiny_folder) as stack:
        message = request(ids, n=4, max_tokens=8, temperature=1.0, seed=3)
        answer = run_all(stack.grpc_address, [message])[0]
        assert sorted(answer.choices) == [0, 1, 2, 3]
        assert answer.prompt_tokens == 160
        hits = total(stack.scheduler_metrics(), "octavo_prefix_cache_hits_total")
        assert hits == 3 * (159 // 16 * 16)
