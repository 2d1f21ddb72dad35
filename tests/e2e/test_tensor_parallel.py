"""kill -9 of one rank of a worker in mid-stream: the worker ends, its streams go on elsewhere."""

import os
import signal
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.generation import Answer, request, run_all
from tests.e2e.prompts import prompt_ids
from tests.e2e.stack import Stack, total
from tests.oracle import check_greedy
from tests.processes import children_of, wait_gone
from tests.tiny_models import save_tiny_model

NUM_STREAMS = 8
MAX_TOKENS = 60
KILLED_AFTER = 40  # messages, of all streams


@pytest.fixture(scope="module")
def gqa_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads on two kv heads, biases, a tied head."""
    overrides = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return save_tiny_model(tmp_path_factory.mktemp("gqa"), "qwen2", **overrides)


def test_a_killed_rank_loses_nothing(gqa_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gqa_folder / "tokenizer.json"))
    prompts = prompt_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        [5 + 7 * i for i in range(NUM_STREAMS)],
    )
    messages = [request(ids, max_tokens=MAX_TOKENS, ignore_eos=True) for ids in prompts]
    seen, lock = [0], threading.Lock()
    flags = ("--tensor-parallel", "2", "--num-kv-blocks", "128")
    with Stack(tmp_path, model=gqa_folder, num_workers=2, worker_flags=flags) as stack:
        victim, survivor = stack.workers
        (rank,) = children_of(victim.process.pid)
        (other,) = children_of(survivor.process.pid)

        def kill_in_mid_stream(_: Answer) -> None:
            with lock:
                seen[0] += 1
                if seen[0] == KILLED_AFTER:
                    os.kill(rank, signal.SIGKILL)

        undisturbed = run_all(stack.grpc_address, messages)
        disturbed = run_all(stack.grpc_address, messages, on_message=kill_in_mid_stream)
        assert victim.process.wait(30) == 1
        assert total(stack.scheduler_metrics(), "octavo_moves_total") > 0
        stack.wait_idle()
        # Nor does a rank outlive the worker.
        survivor.kill()
        wait_gone(other)
    for message, before, after in zip(messages, undisturbed, disturbed, strict=True):
        assert len(after.ids) == after.completion_tokens == MAX_TOKENS
        if after.ids != before.ids:
            # Only another batch shape's rounding of a near-tie may change a greedy text.
            check = check_greedy(gqa_folder, message.token_ids.token_ids, after.ids)
            assert check.is_right
            assert check.num_near_ties
