"""kill -9 of one of two workers in mid-stream: every stream goes on, nothing lost or doubled."""

import signal
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.generation import Answer, request, run_all
from tests.e2e.prompts import prompt_ids
from tests.e2e.stack import Stack, total
from tests.oracle import check_greedy

NUM_STREAMS = 20
MAX_TOKENS = 150


@pytest.fixture(scope="module")
def prompts(tiny_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return prompt_ids(encode, [5 + 7 * i for i in range(NUM_STREAMS)])


class KillAfter:
    """Called with every message; runs `action` once when enough messages were seen."""

    def __init__(self, num_messages: int, action: object) -> None:
        self._left = num_messages
        self._action = action
        self._lock = threading.Lock()

    def __call__(self, _: Answer) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._action()  # type: ignore[operator]


# test_fleet.py kills one in the middle of a whole fleet, in every test run.
@pytest.mark.slow
@pytest.mark.parametrize("after_messages", [1, 60, 400])
def test_streams_survive(
    after_messages: int, tiny_folder: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    greedy = [request(ids, max_tokens=MAX_TOKENS, ignore_eos=True) for ids in prompts[::2]]
    seeded = [
        request(ids, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.8, seed=i, logprobs=0)
        for i, ids in enumerate(prompts[1::2])
    ]
    messages = [*greedy, *seeded]
    with Stack(tmp_path, model=tiny_folder, num_workers=2) as stack:
        undisturbed = run_all(stack.grpc_address, messages)
        victim = stack.workers[0]
        kill = KillAfter(after_messages, lambda: victim.kill(signal.SIGKILL))
        disturbed = run_all(stack.grpc_address, messages, on_message=kill)
        assert victim.process.wait(5) == -signal.SIGKILL
        assert total(stack.scheduler_metrics(), "octavo_moves_total") > 0
        stack.wait_idle()
    for message, before, after in zip(messages, undisturbed, disturbed, strict=True):
        assert len(after.ids) == after.completion_tokens == MAX_TOKENS
        assert len(after.choices[0].logprobs) == (MAX_TOKENS if message.HasField("logprobs") else 0)
        if after.ids != before.ids:
            # Only another batch shape's rounding of a near-tie may change a greedy text.
            assert message.temperature == 0
            check = check_greedy(tiny_folder, message.token_ids.token_ids, after.ids)
            assert check.is_right
            assert check.num_near_ties
