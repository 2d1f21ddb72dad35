"""Rules on logits and prompt log-probabilities through a real scheduler and worker, as ids."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from octavo.v1 import common_pb2
from tests.e2e.scheduler_session import Order, run_orders, u32s
from tests.e2e.stack import Stack
from tests.logit_rules import Rules, transformers_logits
from tests.oracle import NEAR_TIE, reference_model
from tests.tiny_models import TINY_VOCAB_SIZE

MAX_TOKENS = 40
NO_RULES = Rules()
RANDOM = Random(4)
PROMPTS = [
    [RANDOM.randrange(3, TINY_VOCAB_SIZE) for _ in range(n)] for n in (1, 15, 16, 17, 70, 33)
]


class Cell(NamedTuple):
    """`is_tight`: too few blocks for all requests at once."""

    is_tight: bool
    address: str


@contextmanager
def open_cell(folder: Path, model: Path, *, is_tight: bool) -> Generator[Cell]:
    """A scheduler and a worker; prompts come in small chunks."""
    flags = ("--num-kv-blocks", "24") if is_tight else ()
    stack = Stack(
        folder,
        model=model,
        worker_flags=("--max-num-batched-tokens", "64", *flags),
        scheduler_flags=("--check-integrity", "true", "--growth-reserve", "0"),
    )
    try:
        stack.start_worker().wait_ready()
        stack.start_scheduler().wait_ready()
        yield Cell(is_tight, stack.schedulers[0].address)
    finally:
        stack.close()


@pytest.fixture(scope="module")
def roomy(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cell]:
    with open_cell(tmp_path_factory.mktemp("roomy"), tiny_folder, is_tight=False) as cell:
        yield cell


@pytest.fixture(scope="module")
def tight(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cell]:
    with open_cell(tmp_path_factory.mktemp("tight"), tiny_folder, is_tight=True) as cell:
        yield cell


@pytest.fixture(params=["roomy", "tight"])
def cell(request: pytest.FixtureRequest) -> Cell:
    return request.getfixturevalue(request.param)


def sampling_of(rules: Rules = NO_RULES, **fields: Any) -> common_pb2.SamplingParams:
    params = common_pb2.SamplingParams(
        temperature=0.0,
        top_p=1.0,
        seed=1,
        max_tokens=MAX_TOKENS,
        min_tokens=rules.min_tokens,
        stop_token_ids=u32s(rules.ending_ids),
        presence_penalty=rules.presence,
        frequency_penalty=rules.frequency,
        repetition_penalty=rules.repetition,
        logit_bias_ids=u32s([token for token, _ in rules.bias]),
        logit_bias_values=np.array([value for _, value in rules.bias], "<f4").tobytes(),
        allowed_token_ids=u32s(rules.allowed),
        bad_words=[u32s(word) for word in rules.bad_words],
    )
    params.MergeFrom(common_pb2.SamplingParams(**fields))
    return params


def num_preemptions(orders: list[Order]) -> int:
    return sum(finished.num_preemptions for o in orders for finished in o.finished.values())


@torch.inference_mode()
def logits_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """fp32 [T, V]: transformers' logits after every prefix."""
    return reference_model(folder)(torch.tensor([token_ids])).logits[0]


def assert_greedy_by_rules(folder: Path, order: Order, rules: Rules) -> int:
    """Each token is the largest logit after transformers' processors; returns the near-ties."""
    prompt, answer = order.prompt, order.answer
    logits = logits_of(folder, prompt + answer)
    num_near_ties = 0
    for i, token in enumerate(answer):
        row = logits[len(prompt) + i - 1].clone()
        row = transformers_logits(row, prompt, answer[:i], rules)
        assert float(row.max() - row[token]) < NEAR_TIE, (i, token)
        num_near_ties += int(row.argmax()) != token
    ended = answer[-1] in rules.ending_ids
    assert not any(token in rules.ending_ids for token in answer[:-1])
    assert ended or len(answer) == MAX_TOKENS
    return num_near_ties


ALL = Rules(
    repetition=1.15,
    presence=0.4,
    frequency=0.3,
    bias=((5, 1.5), (60, -2.0), (100, 0.5)),
    allowed=tuple(range(0, TINY_VOCAB_SIZE, 3)),
    bad_words=((9,), (12, 15), (33, 36, 39)),
    min_tokens=12,
    ending_ids=tuple(range(0, TINY_VOCAB_SIZE, 21)),
)
RULES = [
    Rules(),
    Rules(repetition=1.3),
    Rules(presence=1.0, frequency=0.5),
    replace(Rules(), bias=((7, 100.0),)),
    Rules(min_tokens=10, ending_ids=tuple(range(0, TINY_VOCAB_SIZE, 7))),
    ALL,
]


def test_greedy_by_rules_equals_transformers_cold_warm_and_preempted(
    cell: Cell, tiny_folder: Path
) -> None:
    cases = [(prompt, rules) for prompt in PROMPTS for rules in RULES]
    for _ in ("cold", "warm"):
        orders = [Order(prompt, sampling_of(rules)) for prompt, rules in cases]
        run_orders(cell.address, orders)
        near_ties = [
            assert_greedy_by_rules(tiny_folder, order, rules)
            for order, (_, rules) in zip(orders, cases, strict=True)
        ]
        assert sum(near_ties) <= 1
        assert (num_preemptions(orders) > 0) == cell.is_tight


def test_seeded_penalized_siblings_are_the_same_after_preemption(roomy: Cell, tight: Cell) -> None:
    rules = Rules(repetition=1.3, presence=0.5, bad_words=((5, 6), (7,)))
    texts: list[list[dict[int, list[int]]]] = []
    for cell in (roomy, tight):
        orders = [
            Order(prompt, sampling_of(rules, temperature=0.9, seed=i + 1), num_sequences=2)
            for i, prompt in enumerate(PROMPTS)
        ]
        run_orders(cell.address, orders)
        assert (num_preemptions(orders) > 0) == cell.is_tight
        texts.append([order.tokens for order in orders])
    assert texts[0] == texts[1]
    assert all(len(ids) == MAX_TOKENS for tokens in texts[0] for ids in tokens.values())
    assert all(tokens[0] != tokens[1] for tokens in texts[0])


def assert_prompt_logprobs(folder: Path, order: Order, wanted: int) -> None:
    expected = logits_of(folder, order.prompt).log_softmax(dim=-1)
    positions = [position for position, _ in order.prompt_logprobs]
    assert positions == list(range(1, len(order.prompt)))
    for position, values in order.prompt_logprobs:
        row, token = expected[position - 1], order.prompt[position]
        assert values.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert abs(values.rank - int((row > row[token]).sum())) <= 1
        top = np.frombuffer(values.top_logprobs, "<f4")
        np.testing.assert_allclose(top, row.topk(wanted).values.numpy(), atol=1e-4)
        ids = np.frombuffer(values.top_token_ids, "<u4").astype(np.int64)
        np.testing.assert_allclose(row[torch.from_numpy(ids)].numpy(), top, atol=1e-4)


def test_prompt_logprobs_cold_twice_and_among_ordinary_requests(
    cell: Cell, tiny_folder: Path
) -> None:
    random = Random(9)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 80, 150)
    prompts = [[random.randrange(3, TINY_VOCAB_SIZE) for _ in range(n)] for n in lengths]
    for is_warm in (False, True):
        asking = [
            Order(p, sampling_of(prompt_logprobs=2, logprobs=0, max_tokens=1 + 9 * (i % 2)))
            for i, p in enumerate(prompts)
        ]
        siblings = Order(prompts[-2], sampling_of(prompt_logprobs=0), num_sequences=2)
        plain = [Order(p, sampling_of()) for p in prompts]
        mixed = [order for pair in zip(asking, plain, strict=True) for order in pair]
        run_orders(cell.address, [*mixed, siblings])
        for order in asking:
            assert_prompt_logprobs(tiny_folder, order, 2)
            assert order.num_cached_tokens == 0
            assert len(order.logprobs) == len(order.answer) > 0
        assert_prompt_logprobs(tiny_folder, siblings, 0)
        assert siblings.tokens[0] == siblings.tokens[1]
        for order in plain:
            assert order.prompt_logprobs == []
            assert_greedy_by_rules(tiny_folder, order, NO_RULES)
        if is_warm and not cell.is_tight:
            cached = [order.num_cached_tokens for order in plain]
            assert cached == [(n - 1) // 16 * 16 for n in lengths]


def test_a_request_whose_rules_bar_every_token_fails_alone(cell: Cell, tiny_folder: Path) -> None:
    barred = Order(PROMPTS[1], sampling_of(Rules(allowed=(7,), bad_words=((7,),))))
    refused = Order(PROMPTS[1], sampling_of(Rules(allowed=(TINY_VOCAB_SIZE,))))
    good = Order(PROMPTS[1], sampling_of(ALL))
    run_orders(cell.address, [barred, refused, good])
    assert barred.finished[0].reason == common_pb2.FINISH_REASON_ERROR
    assert "allowed_token_ids" in barred.finished[0].error.message
    assert "allowed_token_ids" in refused.rejected
    assert_greedy_by_rules(tiny_folder, good, ALL)
