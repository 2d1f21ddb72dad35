"""Greedy answers equal transformers' on a random tiny model, however they were scheduled."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.generation import request, run_all
from tests.e2e.greedy import assert_greedy
from tests.e2e.prompts import lengths, prompt_ids
from tests.e2e.stack import Stack, total
from tests.tiny_models import TINY_EOS_TOKEN_IDS, save_tiny_model

MAX_TOKENS = 24
NUM_PROMPTS = 60
LONGEST = 300


@pytest.fixture(scope="module")
def prompts(tiny_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return prompt_ids(encode, lengths(NUM_PROMPTS, LONGEST))


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "alone": {"at_once": 1},
    "all at once": {},
    "chunks of 64": {"worker_flags": ("--max-num-batched-tokens", "64")},
    "block size 32": {"worker_flags": ("--block-size", "32")},
    # Admitted by their prompts alone: they collide.
    "small pool": {
        "worker_flags": ("--num-kv-blocks", "60"),
        "scheduler_flags": ("--growth-reserve", "0"),
    },
    "two workers": {"num_workers": 2},
    "no lease": {"scheduler_flags": ("--lease-steps", "0")},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_greedy_equals_transformers(
    name: str, tiny_folder: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    options = dict(CONFIGURATIONS[name])
    at_once = options.pop("at_once", None)
    scheduler_flags = ("--check-integrity", "true", *options.pop("scheduler_flags", ()))
    messages = [request(ids, max_tokens=MAX_TOKENS) for ids in prompts]
    with Stack(tmp_path, model=tiny_folder, scheduler_flags=scheduler_flags, **options) as stack:
        cold = run_all(stack.grpc_address, messages, at_once=at_once)
        assert_greedy(tiny_folder, prompts, cold, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        warm = run_all(stack.grpc_address, messages, at_once=at_once)
        assert_greedy(tiny_folder, prompts, warm, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        if name == "small pool":
            assert total(stack.scheduler_metrics(), "octavo_preemptions_total") > 0
        elif name != "two workers":
            block = 32 if name == "block size 32" else 16
            expected = [(len(ids) - 1) // block * block for ids in prompts]
            assert [answer.cached_tokens for answer in warm] == expected
        if name == "two workers":
            metrics = stack.scheduler_metrics()
            steps = [v for k, v in metrics.items() if k.startswith("octavo_steps_total")]
            assert len(steps) == 2
            assert all(steps)
        stack.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_shorter_than_most_prompts(
    family: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """In chunks across a window's border, and from a cached prefix that has left the window."""
    model = tmp_path / "model"
    save_tiny_model(model, family, sliding_window=40)
    prompts = prompts[:20]
    messages = [request(ids, max_tokens=MAX_TOKENS) for ids in prompts]
    flags = ("--max-num-batched-tokens", "64")
    with Stack(tmp_path, model=model, worker_flags=flags) as stack:
        cold = run_all(stack.grpc_address, messages)
        assert_greedy(model, prompts, cold, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        warm = run_all(stack.grpc_address, messages)
        assert_greedy(model, prompts, warm, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        assert [answer.cached_tokens for answer in warm] == [
            (len(p) - 1) // 16 * 16 for p in prompts
        ]


def test_seeded_text_is_the_same_alone_in_a_crowd_and_after_preemption(
    tiny_folder: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    def seeded(ids: list[int], seed: int) -> object:
        return request(ids, max_tokens=60, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)

    messages = [seeded(ids, seed) for seed, ids in enumerate(prompts[:20])]
    (tmp_path / "roomy").mkdir()
    (tmp_path / "tight").mkdir()
    with Stack(tmp_path / "roomy", model=tiny_folder) as stack:
        alone = run_all(stack.grpc_address, messages, at_once=1)
        crowd = run_all(stack.grpc_address, messages)
    options: dict[str, Any] = {
        "worker_flags": ("--num-kv-blocks", "40"),
        "scheduler_flags": ("--growth-reserve", "0"),
    }
    with Stack(tmp_path / "tight", model=tiny_folder, **options) as stack:
        tight = run_all(stack.grpc_address, messages)
        assert total(stack.scheduler_metrics(), "octavo_preemptions_total") > 0
    assert [a.ids for a in crowd] == [a.ids for a in alone]
    assert [a.ids for a in tight] == [a.ids for a in alone]
    assert all(len(a.ids) == 60 for a in alone)
