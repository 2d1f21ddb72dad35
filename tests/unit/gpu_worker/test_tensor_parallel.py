"""Workers of several ranks, as real processes over gloo: their answers, their ends."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from octavo.errors import ConfigurationError
from octavo.v1 import worker_pb2
from octavo_worker.parallel.links import Door, Link, dial, wait_hang_up
from octavo_worker.parallel.places import Place
from tests.fakes.leader_client import chunk, leader_client, row_add
from tests.oracle import check_greedy
from tests.processes import children_of, wait_gone
from tests.tiny_models import save_tiny_model
from tests.unit.gpu_worker.test_worker_process import (
    WorkerProcess,
    free_port,
    worker_process,
)

NUM_TOKENS = 24
BLOCKS = ("--num-kv-blocks", "64", "--max-num-seqs", "8")
PROMPTS = [[(7 * i + 11 * j * j) % 380 + 3 for j in range(5 + 9 * i)] for i in range(3)]


@pytest.fixture(scope="module")
def gqa_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads on two kv heads, biases, and a vocabulary that no even number divides."""
    folder = tmp_path_factory.mktemp("gqa")
    overrides = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 387}
    return save_tiny_model(folder, "qwen2", tie_word_embeddings=True, **overrides)


async def generate(address: str, num_ranks: int = 2) -> list[list[int]]:
    """The answers to `PROMPTS`: two decode while the third's prompt is computed."""
    async with leader_client(address) as client, asyncio.timeout(60):
        described = await client.describe()
        # Two layers, keys and values, a kv head or more a rank, of 16 dims in float32.
        assert described.capacity.kv_bytes_per_token == 2 * 2 * max(2, num_ranks) * 16 * 4
        assert described.capacity.device.startswith(f"{num_ranks} x CPU")
        steps = await client.lead()
        for plan_id, rows in ((1, (0, 1)), (2, (2,))):
            await steps.send(
                plan=worker_pb2.Plan(
                    plan_id=plan_id,
                    added_rows=[
                        row_add(
                            row, range(1 + 4 * row, 5 + 4 * row), len(PROMPTS[row]) + NUM_TOKENS
                        )
                        for row in rows
                    ],
                    chunks=[chunk(row, PROMPTS[row]) for row in rows],
                    decode_until=10_000 if plan_id == 2 else 0,
                )
            )
        await steps.read_steps(NUM_TOKENS + 1)
        return [steps.tokens(row) for row in range(len(PROMPTS))]


def check_answers(folder: Path, answers: list[list[int]]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert check_greedy(folder, prompt, answer).is_right


def test_two_ranks_answer_as_transformers_does(gqa_folder: Path, tmp_path: Path) -> None:
    with worker_process(gqa_folder, tmp_path, *BLOCKS, "--tensor-parallel", "2") as worker:
        address = worker.address()
        (other,) = children_of(worker.process.pid)
        check_answers(gqa_folder, asyncio.run(generate(address)))
        # Rank 0 decides when the others end, whoever else is told to.
        os.kill(other, signal.SIGTERM)
        check_answers(gqa_folder, asyncio.run(generate(address)))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log()
        wait_gone(other)
        assert "rank 1 ended" not in worker.log()


@pytest.mark.slow
def test_four_ranks_share_two_kv_heads(gqa_folder: Path, tmp_path: Path) -> None:
    with worker_process(gqa_folder, tmp_path, *BLOCKS, "--tensor-parallel", "4") as worker:
        address = worker.address()
        others = children_of(worker.process.pid)
        assert len(others) == 3
        check_answers(gqa_folder, asyncio.run(generate(address, num_ranks=4)))
        worker.process.kill()
        for other in others:
            wait_gone(other)


@contextlib.contextmanager
def torchrun(folder: Path, tmp_path: Path) -> Generator[list[WorkerProcess]]:
    """Two ranks with the environment that torchrun gives them."""
    port = str(free_port())
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_INTERNAL_TOKEN", "a secret of ranks")
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            patch.setenv(name, value)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "2")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(2):
            patch.setenv("RANK", str(rank))
            patch.setenv("LOCAL_RANK", str(rank))
            place = tmp_path / str(rank)
            place.mkdir()
            started = worker_process(folder, place, *BLOCKS, "--tensor-parallel", "2")
            workers.append(stack.enter_context(started))
        yield workers


def test_ranks_that_torchrun_starts_end_with_rank_0(gqa_folder: Path, tmp_path: Path) -> None:
    with torchrun(gqa_folder, tmp_path) as (leader, follower):
        assert leader.address()
        assert not children_of(leader.process.pid)
        assert follower.process.poll() is None
        leader.process.kill()
        assert follower.wait() == 1, follower.log()


def test_what_cant_be_shared_out_is_refused_at_start(tiny_folder: Path, tmp_path: Path) -> None:
    with worker_process(tiny_folder, tmp_path, *BLOCKS, "--tensor-parallel", "4") as worker:
        assert worker.wait() == 2
        log = worker.log()
    assert "OCTAVO_TENSOR_PARALLEL=4: config.json's num_attention_heads=6 can't be shared" in log
    assert "Traceback" not in log


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "2"}, "OCTAVO_TENSOR_PARALLEL=4, but WORLD_SIZE=2"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='': RANK is set, so this must be a number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"RANK": "4"}, "RANK=4: must be below WORLD_SIZE=4"),
    ],
)
def test_an_environment_of_other_ranks_is_refused(changes: dict[str, str], message: str) -> None:
    assert Place.of(TORCHRUN, 4).share.rank == 1
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Place.of(TORCHRUN | changes, 4)


def connect(door: Door, key: bytes) -> tuple[Link | None, Link | None]:
    """Both ends of a link to `door` by `key`: rank 0's, rank 3's."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(dial, "127.0.0.1", door.port, key, 3)
        accepted = door.accept(30)
        return accepted, None if dialled.exception() else dialled.result()


def test_links_carry_messages_in_order_and_tell_of_their_end() -> None:
    door = Door(b"key", on_loopback=True)
    with contextlib.closing(door):
        mine, theirs = connect(door, b"key")
        assert mine is not None
        assert theirs is not None
        assert mine.rank == 3
        for message in (b"one", b"", b"x" * 100_000):
            mine.send(message)
            assert theirs.receive() == message
        mine.send(b"last")
        mine.close()
        # Word of the end doesn't wait for what is unread.
        assert wait_hang_up([theirs]) is theirs
        assert theirs.receive() == b"last"
        assert theirs.receive() is None
        theirs.close()


def test_whoever_lacks_the_key_is_nobodys_rank() -> None:
    door = Door(b"key", on_loopback=True)
    with contextlib.closing(door):
        assert connect(door, b"another key") == (None, None)
        assert door.accept(0.01) is None
