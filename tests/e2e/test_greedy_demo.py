"""Greedy answers of the demo model equal transformers', streamed text equals the whole."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.generation import request, run_all
from tests.e2e.greedy import assert_greedy
from tests.e2e.prompts import lengths, prompt_ids
from tests.e2e.stack import Stack, as_json, total

EOS = (2,)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "alone": {"at_once": 1},
    "all at once": {},
    "chunks of 64": {"worker_flags": ("--max-num-batched-tokens", "64")},
    "block size 32": {"worker_flags": ("--block-size", "32")},
    "small pool": {},
    "two workers": {"num_workers": 2},
}


def load_prompts(folder: Path, count: int, longest: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return prompt_ids(lambda text: tokenizer.encode(text).ids, lengths(count, longest))


def completion(url: str, ids: list[int], *, stream: bool) -> str:
    """Text of a greedy completion over HTTP, whole or joined from the stream's deltas."""
    body = {"prompt": ids, "temperature": 0, "max_tokens": 16, "stream": stream}
    headers = {"Content-Type": "application/json"}
    post = urllib.request.Request(f"{url}/v1/completions", as_json(body), headers)
    with urllib.request.urlopen(post, timeout=120) as answer:
        raw = answer.read().decode()
    if not stream:
        return json.loads(raw)["choices"][0]["text"]
    events = [line[6:] for line in raw.split("\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"])


def test_twelve_prompts_cold_and_warm(demo_stack: Stack, demo_folder: Path) -> None:
    prompts = load_prompts(demo_folder, 12, 200)
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    messages = [request(ids, max_tokens=16) for ids in prompts]
    cold = run_all(demo_stack.grpc_address, messages, at_once=1)
    assert_greedy(demo_folder, prompts, cold, 16, EOS)
    warm = run_all(demo_stack.grpc_address, messages)
    assert_greedy(demo_folder, prompts, warm, 16, EOS)
    assert [a.cached_tokens for a in warm] == [(len(p) - 1) // 16 * 16 for p in prompts]
    for answer in cold:
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
    demo_stack.wait_idle()


def test_streamed_text_equals_the_whole(demo_stack: Stack, demo_folder: Path) -> None:
    for ids in load_prompts(demo_folder, 5, 60):
        whole = completion(demo_stack.url, ids, stream=False)
        assert completion(demo_stack.url, ids, stream=True) == whole


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_sixty_prompts(name: str, demo_folder: Path, tmp_path: Path) -> None:
    """40,000 prompt tokens a configuration: some two minutes on two cores."""
    options = dict(CONFIGURATIONS[name])
    at_once = options.pop("at_once", None)
    if "num_workers" not in options:
        # A worker alone has all cores: the other services have little to do.
        options["environ"] = {"OMP_NUM_THREADS": str(os.cpu_count())}
    max_tokens, longest = 16, 1500
    if name == "small pool":
        # Room for the longest prompt and little more; long answers make the crowd collide.
        options["worker_flags"] = ("--num-kv-blocks", "130")
        max_tokens = 48
    prompts = load_prompts(demo_folder, 60, longest)
    messages = [request(ids, max_tokens=max_tokens) for ids in prompts]
    # Nothing is kept free for growth: a small pool's rows push one another out.
    flags = ("--check-integrity", "true", "--growth-reserve", "0")
    with Stack(tmp_path, model=demo_folder, scheduler_flags=flags, **options) as stack:
        cold = run_all(stack.grpc_address, messages, at_once=at_once)
        parted = assert_greedy(demo_folder, prompts, cold, max_tokens, EOS)
        if name in ("alone", "all at once"):
            warm = run_all(stack.grpc_address, messages, at_once=at_once)
            assert_greedy(demo_folder, prompts, warm, max_tokens, EOS)
            assert [a.cached_tokens for a in warm] == [(len(p) - 1) // 16 * 16 for p in prompts]
        if name == "small pool":
            assert total(stack.scheduler_metrics(), "octavo_preemptions_total") > 0
        stack.wait_idle()
    print(f"{name}: {parted} of {len(prompts)} prompts part at a near-tie")
