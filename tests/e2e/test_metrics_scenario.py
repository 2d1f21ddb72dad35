"""Known requests, known numbers: every metric counts right, in all three services.

Each test asks for something whose effect on the counters is known and compares what they grew by.
The stack's workers have 24 KV blocks of 16 tokens each; the last test kills one of the two.
"""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from octavo.serving import open_channel
from octavo.v1 import inference_pb2_grpc
from tests.e2e.generation import Answer, generate, request, run_all
from tests.e2e.stack import Service, Stack, scrape

BLOCK = 16
PATIENCE_S = 60.0
# A prompt of known ids: none of them means anything to a random model.
VOCABULARY = range(10, 200)


@pytest.fixture
def stack(metered_stack: Stack) -> Stack:
    return metered_stack


def prompt_of(length: int, seed: int) -> list[int]:
    return [VOCABULARY[(seed * 31 + i * 7 + i * i) % len(VOCABULARY)] for i in range(length)]


def samples(stack: Stack) -> dict[str, float]:
    """Counters of all services, those of workers summed; names without `octavo_`."""
    found: dict[str, float] = {}
    services = [*stack.schedulers, *(w for w in stack.workers if w.process.poll() is None)]
    ports = [stack.routers[0].ports["port"], *(s.ports["metrics_port"] for s in services)]
    for port in ports:
        for name, value in scrape(port).items():
            if "_bucket" not in name and "_seconds_sum" not in name:
                name = name.removeprefix("octavo_")
                found[name] = found.get(name, 0) + value
    return found


class Growth:
    """What counters grew by within the block, nonzero ones only, once everything is idle."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.counts: dict[str, float] = {}

    def __enter__(self) -> "Growth":
        self._before = samples(self._stack)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._stack.wait_idle(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while (now := samples(self._stack))["requests_in_flight"]:
            assert time.monotonic() < deadline, "a request never ended"
            time.sleep(0.02)
        grown = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self.counts = {name: value for name, value in grown.items() if value}

    def of(self, family: str) -> dict[str, float]:
        """A family's growth by its labels' values; "" = there are none."""
        found: dict[str, float] = {}
        for name, value in self.counts.items():
            own, _, labels = name.partition("{")
            if own == family:
                found[" ".join(re.findall(r'="([^"]*)"', labels))] = value
        return found

    def total(self, family: str) -> float:
        return sum(self.of(family).values())

    def check_sums(self, num_requests: int, num_sequences: int | None = None) -> None:
        """What holds whatever was asked for."""
        assert self.total("requests_total") == num_requests
        expected = num_requests if num_sequences is None else num_sequences
        assert self.total("sequence_outcomes_total") == expected
        looked_up = self.total("prefix_cache_queries_total")
        found = self.total("prefix_cache_hits_total")
        assert looked_up == found + self.total("prefix_cache_misses_total")
        for name, own in (
            ("vllm:prompt_tokens_total", "prompt_tokens_total"),
            ("vllm:generation_tokens_total", "generation_tokens_total"),
            ("vllm:prefix_cache_hits_total", "prefix_cache_hits_total"),
            ("vllm:num_preemptions_total", "preemptions_total"),
        ):
            assert self.total(name) == self.total(own)


def test_answers_in_full(stack: Stack) -> None:
    prompt = prompt_of(40, seed=1)
    with Growth(stack) as growth:
        (whole,) = run_all(stack.grpc_address, [request(prompt, max_tokens=12, ignore_eos=True)])
        # The same prompt again: two full blocks of it are cached. It stops at its fourth token,
        # or at an earlier one of the same id.
        stop_id = whole.ids[3]
        again = request(prompt, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id])
        (stopped,) = run_all(stack.grpc_address, [again])
    num_stopped = whole.ids.index(stop_id) + 1
    assert (len(whole.ids), stopped.completion_tokens) == (12, num_stopped)
    assert growth.of("requests_total") == {"grpc_generate length": 1, "grpc_generate stop": 1}
    assert growth.of("sequence_outcomes_total") == {"length": 1, "stop": 1}
    assert growth.total("prompt_tokens_total") == 80
    assert growth.total("generation_tokens_total") == 12 + num_stopped
    assert growth.total("cached_prompt_tokens_total") == stopped.cached_tokens == 2 * BLOCK
    assert growth.total("prefix_cache_queries_total") == 80
    assert growth.total("prefix_cache_hits_total") == 2 * BLOCK
    assert growth.of("prefix_cache_misses_total") == {"cold": 2 * BLOCK, "tail": 16}
    for name in ("queue_time", "prefill_time", "decode_time", "time_to_first_token"):
        assert growth.total(f"{name}_seconds_count") == 2
    assert growth.total("request_latency_seconds_count") == 2
    assert growth.total("request_prompt_tokens_sum") == 80
    assert growth.total("request_generation_tokens_sum") == 12 + num_stopped
    # Each prompt token that wasn't cached is computed once, and each drawn one but the last.
    assert growth.of("worker_tokens_total") == {
        "prefill": 80 - 2 * BLOCK,
        "decode": 11 + num_stopped - 1,
    }
    assert growth.total("steps_total") == growth.total("worker_steps_total")
    assert growth.of("vllm:request_success_total").keys() == {
        f"{reason} {stack_model(stack)}" for reason in ("length", "stop")
    }
    growth.check_sums(2)


def stack_model(stack: Stack) -> str:
    return Path(stack.model).name


def test_http_requests_have_their_endpoint(stack: Stack) -> None:
    prompt = prompt_of(20, seed=2)
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with Growth(stack) as growth, httpx.Client(base_url=stack.url, timeout=60) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        # Other endpoints are no requests for tokens.
        assert client.get("/v1/models").status_code == 200
        assert client.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
        assert client.get("/v1/nothing").status_code == 404
    by_endpoint = {key.split()[0]: value for key, value in growth.of("requests_total").items()}
    assert by_endpoint == {"completions": 1, "chat_completions": 1}
    growth.check_sums(2)


def test_what_is_rejected_before_it_leaves_the_router(stack: Stack) -> None:
    with Growth(stack) as growth, httpx.Client(base_url=stack.url, timeout=60) as client:
        statuses = [
            client.post("/v1/completions", json=body).status_code
            for body in (
                {"prompt": [20] * 10, "temperature": -1},
                {"prompt": [20] * 10, "model": "another"},
                {"prompt": prompt_of(100, seed=3), "max_tokens": 1 << 20},
            )
        ]
    assert statuses == [400, 404, 400]
    assert growth.of("requests_total") == {"completions rejected": 3}
    assert growth.total("vllm:request_success_total") == 0
    assert growth.total("prefix_cache_queries_total") == 0
    growth.check_sums(3, num_sequences=0)


def test_what_is_rejected_because_too_much_waits(stack: Stack) -> None:
    messages = [
        request(prompt_of(100, seed=10 + i), max_tokens=2, ignore_eos=True) for i in range(16)
    ]

    async def main() -> list[Answer | BaseException]:
        async with open_channel(stack.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            tasks = [asyncio.create_task(generate(stub, message)) for message in messages]
            # Nothing is computed until somebody was refused.
            with pauses(stack.workers):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            return await asyncio.gather(*tasks, return_exceptions=True)

    with Growth(stack) as growth:
        results = asyncio.run(main())
    errors = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    num_refused, num_answered = len(errors), len(messages) - len(errors)
    assert 0 < num_refused < len(messages)
    expected = {"grpc_generate rejected": num_refused, "grpc_generate length": num_answered}
    assert growth.of("requests_total") == expected
    outcomes = growth.of("sequence_outcomes_total")
    assert outcomes["length"] == num_answered
    # The rest was refused by the router, which knew by then that the cell is full.
    assert 0 < outcomes["rejected"] <= num_refused
    assert growth.total("queue_time_seconds_count") == num_answered
    assert growth.total("generation_tokens_total") == 2 * num_answered
    growth.check_sums(len(messages), num_sequences=int(num_answered + outcomes["rejected"]))


def test_what_fails(stack: Stack, tiny_folder: Path) -> None:
    # The prompt ends with a Q, another is the only token allowed, and QQ is not: none is left.
    (letter,) = Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode("Q").ids
    barred = request(
        [*prompt_of(19, seed=4), letter],
        max_tokens=9,
        allowed_token_ids=[letter],
        bad_words=["QQ"],
        ignore_eos=True,
    )
    with Growth(stack) as growth, pytest.raises(grpc.aio.AioRpcError) as caught:
        run_all(stack.grpc_address, [barred])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert growth.of("requests_total") == {"grpc_generate error": 1}
    assert growth.of("sequence_outcomes_total") == {"error": 1}
    assert growth.total("worker_row_errors_total") == 1
    assert growth.total("generation_tokens_total") == 0
    growth.check_sums(1)


def test_who_leaves_and_who_waits_too_long(stack: Stack) -> None:
    messages = [
        request(prompt_of(20, seed=seed), max_tokens=300, ignore_eos=True) for seed in (5, 6)
    ]

    async def leave(stub: inference_pb2_grpc.InferenceStub) -> None:
        call = stub.Generate(messages[0], timeout=PATIENCE_S)
        await call.read()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.read()

    async def main() -> grpc.StatusCode:
        async with open_channel(stack.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await leave(stub)
            # No step runs until its time is over.
            with pauses(stack.workers):
                call = stub.Generate(messages[1], timeout=1.0)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call.read()
            return await call.code()

    with Growth(stack) as growth:
        code = asyncio.run(main())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    expected = {"grpc_generate cancelled": 1, "grpc_generate deadline": 1}
    assert growth.of("requests_total") == expected
    assert growth.of("sequence_outcomes_total") == {"cancelled": 1, "deadline": 1}
    # Latencies are those of answers in full.
    assert growth.total("request_latency_seconds_count") == 0
    assert growth.of("vllm:request_success_total") == {f"abort {stack_model(stack)}": 2}
    growth.check_sums(2)


@contextlib.contextmanager
def pauses(workers: list[Service]) -> Generator[None]:
    for worker in workers:
        worker.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill(signal.SIGCONT)


def test_a_worker_is_lost_and_memory_runs_out(stack: Stack) -> None:
    """The one running request moves; then two siblings don't fit on the worker that is left."""
    message = request(prompt_of(40, seed=7), max_tokens=200, ignore_eos=True)

    async def main() -> Answer:
        async with open_channel(stack.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            is_begun = asyncio.Event()
            task = asyncio.create_task(generate(stub, message, on_message=lambda _: is_begun.set()))
            await is_begun.wait()
            with pauses(stack.workers):
                victim = await asyncio.to_thread(holder_of_blocks, stack)
                stack.workers[victim].kill(signal.SIGKILL)
                stack.workers[victim].process.wait(10)
            return await task

    with Growth(stack) as growth:
        answer = asyncio.run(main())
    assert len(answer.ids) == 200
    assert growth.of("requests_total") == {"grpc_generate length": 1}
    assert growth.of("moves_total") == {"crash": 1}
    # A move is no query: what is computed again is counted apart, prompt and all.
    assert growth.total("prefix_cache_queries_total") == 40
    assert growth.of("recomputed_tokens_total").keys() == {"move"}
    assert 40 <= growth.total("recomputed_tokens_total") < 240
    growth.check_sums(1)

    siblings = request(
        prompt_of(64, seed=8), max_tokens=200, ignore_eos=True, n=2, temperature=1.0, seed=1
    )
    with Growth(stack) as growth:
        (both,) = run_all(stack.grpc_address, [siblings])
    assert [len(choice.token_ids) for choice in both.choices.values()] == [200, 200]
    assert growth.of("sequence_outcomes_total") == {"length": 2}
    # Each would need 17 blocks, three of them shared: 31 of 24. The second one gives way once, and
    # can't come back before the first one has ended.
    assert growth.total("preemptions_total") == 1
    assert growth.of("recomputed_tokens_total").keys() == {"preemption"}
    assert growth.total("prefix_cache_queries_total") == 2 * 64
    assert growth.total("prefix_cache_hits_total") == 3 * BLOCK
    computed = growth.total("worker_tokens_total")
    again = growth.total("recomputed_tokens_total")
    assert computed == 2 * (64 + 200 - 1) - 3 * BLOCK + again
    growth.check_sums(1, num_sequences=2)


def holder_of_blocks(stack: Stack) -> int:
    """The number of the worker on which blocks are used, when the scheduler has said so."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        metrics = stack.scheduler_metrics()
        for number in range(len(stack.workers)):
            name = f'octavo_kv_blocks{{state="used",worker="worker-{number}"}}'
            if metrics.get(name):
                return number
        time.sleep(0.05)
    raise AssertionError("no worker uses blocks")
