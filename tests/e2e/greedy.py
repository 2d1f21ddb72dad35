"""The greedy oracle suite, the same for every model and configuration."""

from collections.abc import Sequence
from pathlib import Path

from octavo.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.e2e.generation import Answer
from tests.oracle import check_greedy


def assert_greedy(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    max_tokens: int,
    eos_token_ids: Sequence[int],
) -> int:
    """Every answer is transformers' greedy answer, but for near-ties in at most 1 % of prompts
    (and one prompt in a small suite); the number of prompts with a near-tie."""
    num_parted = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        choice = answer.choices[0]
        check = check_greedy(folder, prompt, choice.token_ids)
        assert check.is_right, (len(prompt), check, choice.token_ids)
        num_parted += check.num_near_ties > 0
        if choice.finish_reason == FINISH_REASON_STOP:
            assert choice.token_ids[-1] in eos_token_ids
        else:
            assert choice.finish_reason == FINISH_REASON_LENGTH
            assert len(choice.token_ids) == max_tokens
        assert answer.completion_tokens == len(choice.token_ids)
        assert answer.prompt_tokens == len(prompt)
    assert num_parted <= max(1, len(prompts) // 100), f"{num_parted} prompts part at a near-tie"
    return num_parted
