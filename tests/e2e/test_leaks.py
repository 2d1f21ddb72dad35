"""Clients that leave at any moment leave nothing behind."""

import asyncio
import random
from pathlib import Path

import grpc.aio
from tokenizers import Tokenizer

from octavo.serving import open_channel
from octavo.v1 import inference_pb2_grpc
from tests.e2e.generation import Answer, generate, request
from tests.e2e.prompts import prompt_ids
from tests.e2e.stack import Stack, total

NUM_REQUESTS = 300
NUM_LEAVERS = NUM_REQUESTS // 3
# Of those who leave, so many do before their first token; the others after some messages.
NUM_EARLY_LEAVERS = 25
# A leaver asks for far more than it could get before it leaves, however slowly its cancel
# travels on a busy machine: it is always cut.
LEAVERS_MAX_TOKENS = 1500


class Client:
    """One request; a leaver is cut by `leave_after` messages (0: some ms after its start)."""

    def __init__(self, ids: list[int], rng: random.Random, leave_after: int | None) -> None:
        max_tokens = rng.randint(1, 60) if leave_after is None else LEAVERS_MAX_TOKENS
        n = rng.choice((1, 1, 1, 3))
        self.message = request(ids, max_tokens=max_tokens, n=n, ignore_eos=True)
        self.leave_after = leave_after
        self.num_received = 0
        self.is_cut = False
        self._delay_s = rng.random() * 6
        self._early_s = rng.uniform(0.0, 0.05)
        self._may_leave = asyncio.Event()

    async def run(self, stub: inference_pb2_grpc.InferenceStub) -> None:
        await asyncio.sleep(self._delay_s)
        task = asyncio.ensure_future(generate(stub, self.message, on_message=self._on_message))
        if self.leave_after is not None:
            if self.leave_after:
                await self._may_leave.wait()
            else:
                await asyncio.sleep(self._early_s)
            task.cancel()
        try:
            await task
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            self.is_cut = True

    def _on_message(self, answer: Answer) -> None:
        self.num_received = sum(len(choice.token_ids) for choice in answer.choices.values())
        num_messages = sum(choice.num_messages for choice in answer.choices.values())
        if num_messages == self.leave_after:
            self._may_leave.set()


def test_a_third_of_the_clients_leave_and_nothing_leaks(tiny_folder: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    prompts = prompt_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        [rng.randint(1, 120) for _ in range(NUM_REQUESTS)],
    )
    leave_after: list[int | None] = [None] * NUM_REQUESTS
    leave_after[:NUM_LEAVERS] = [rng.randint(1, 20) for _ in range(NUM_LEAVERS)]
    leave_after[:NUM_EARLY_LEAVERS] = [0] * NUM_EARLY_LEAVERS
    flags = ("--check-integrity", "true")
    worker_flags = ("--num-kv-blocks", "200")
    with Stack(
        tmp_path, model=tiny_folder, scheduler_flags=flags, worker_flags=worker_flags
    ) as stack:

        async def run() -> list[Client]:
            cases = zip(prompts, leave_after, strict=True)
            clients = [Client(ids, rng, messages) for ids, messages in cases]
            async with open_channel(stack.grpc_address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                async with asyncio.TaskGroup() as group:
                    for client in clients:
                        group.create_task(client.run(stub))
            return clients

        clients = asyncio.run(run())
        for client in clients:
            whole = client.message.max_tokens * client.message.n
            assert client.is_cut == (client.leave_after is not None)
            assert client.num_received < whole if client.is_cut else client.num_received == whole
        stack.wait_idle()
        metrics = stack.router_metrics()
        assert total(metrics, "octavo_requests_in_flight") == 0
        # A client that left at once may never have been heard of.
        ended = {
            outcome: metrics.get(
                f'octavo_requests_total{{endpoint="grpc_generate",outcome="{outcome}"}}', 0
            )
            for outcome in ("length", "cancelled")
        }
        num_cut = ended["cancelled"]
        num_received = total(metrics, "octavo_requests_total")
        assert ended == {
            "length": NUM_REQUESTS - NUM_LEAVERS,
            "cancelled": num_received - (NUM_REQUESTS - NUM_LEAVERS),
        }
        assert num_cut >= NUM_LEAVERS - NUM_EARLY_LEAVERS
        print(f"{NUM_REQUESTS} requests, {num_cut:.0f} cut while they were in flight")
        # The scheduler ended each sequence that it ever had, and the cut ones as cancelled.
        outcomes = stack.scheduler_metrics()
        cancelled = outcomes['octavo_sequence_outcomes_total{outcome="cancelled"}']
        assert cancelled >= NUM_LEAVERS - NUM_EARLY_LEAVERS
        worker_log = stack.workers[0].log()
        assert "Traceback" not in worker_log + stack.schedulers[0].log() + stack.routers[0].log()
