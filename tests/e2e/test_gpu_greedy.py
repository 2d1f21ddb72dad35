"""On a card: tiny models of every family behind the real services equal transformers."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.generation import request, run_all
from tests.e2e.greedy import assert_greedy
from tests.e2e.prompts import lengths, prompt_ids
from tests.e2e.stack import Stack, total
from tests.tiny_models import TINY_EOS_TOKEN_IDS, TINY_FAMILIES, save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
MAX_TOKENS = 24
ON_CARD = ("--backend", "cuda", "--dtype", "float32", "--kv-cache-memory", "256MiB")


def load_prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return prompt_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids, lengths(count, 300)
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_model(model, family, head_dim=64)
    prompts = load_prompts(model, 24)
    messages = [request(ids, max_tokens=MAX_TOKENS) for ids in prompts]
    scheduler_flags = ("--check-integrity", "true")
    with Stack(
        tmp_path, model=model, worker_flags=ON_CARD, scheduler_flags=scheduler_flags
    ) as stack:
        cold = run_all(stack.grpc_address, messages)
        assert_greedy(model, prompts, cold, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        warm = run_all(stack.grpc_address, messages)
        assert_greedy(model, prompts, warm, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        assert [a.cached_tokens for a in warm] == [(len(p) - 1) // 16 * 16 for p in prompts]
        stack.wait_idle()


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-batched-tokens", "64"),
        ("--num-kv-blocks", "60"),
        ("--block-size", "32"),
    ],
    ids=["chunks of 64", "small pool", "block size 32"],
)
def test_schedules(flags: tuple[str, str], tiny_folder: Path, tmp_path: Path) -> None:
    prompts = load_prompts(tiny_folder, 60)
    messages = [request(ids, max_tokens=MAX_TOKENS) for ids in prompts]
    options: dict[str, Any] = {
        "worker_flags": (*ON_CARD, *flags),
        # Nothing is kept free for growth: a small pool's rows push one another out.
        "scheduler_flags": ("--growth-reserve", "0"),
    }
    with Stack(tmp_path, model=tiny_folder, **options) as stack:
        answers = run_all(stack.grpc_address, messages)
        assert_greedy(tiny_folder, prompts, answers, MAX_TOKENS, TINY_EOS_TOKEN_IDS)
        if "--num-kv-blocks" in flags:
            assert total(stack.scheduler_metrics(), "octavo_preemptions_total") > 0
        stack.wait_idle()


def test_seeded_text_is_the_same_alone_and_in_a_crowd(tiny_folder: Path, tmp_path: Path) -> None:
    messages = [
        request(ids, max_tokens=60, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
        for seed, ids in enumerate(load_prompts(tiny_folder, 20))
    ]
    with Stack(tmp_path, model=tiny_folder, worker_flags=ON_CARD) as stack:
        alone = run_all(stack.grpc_address, messages, at_once=1)
        crowd = run_all(stack.grpc_address, messages)
    assert [a.ids for a in crowd] == [a.ids for a in alone]
