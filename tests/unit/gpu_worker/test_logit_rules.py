"""Penalties, bias, masks: through the runner, greedy text is that of transformers' processors."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.row_event import RowEvent
from octavo_worker.backends import choose_backend
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import load_model
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.row_limits import RowLimits
from octavo_worker.runner import Model, Runner
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches
from tests.logit_rules import Rules, greedy, plain_logits, transformers_logits
from tests.oracle import reference_model

torch.set_num_threads(1)
BLOCK_SIZE = 16
NUM_TOKENS = 24
PROMPT = [5, 17, 3, 88, 21, 40, 9, 9, 60, 2, 31, 77, 14, 50, 6, 1, 23, 42, 11]
MODEL = TinyPagedModel()


def logits_of(token_ids: list[int]) -> torch.Tensor:
    return MODEL.dense_logits(token_ids)[-1]


def make_runner(model: Model = MODEL, num_rows: int = 6) -> Runner:
    limits = RowLimits(num_rows, 64, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(64, BLOCK_SIZE)
    return Runner(model, CpuBackend(), caches, limits, torch.device("cpu"))


def sampling_of(rules: Rules, **changes: int | float | None) -> Sampling:
    sampling = Sampling(
        presence_penalty=rules.presence,
        frequency_penalty=rules.frequency,
        repetition_penalty=rules.repetition,
        logit_bias_ids=tuple(token for token, _ in rules.bias),
        logit_bias_values=tuple(value for _, value in rules.bias),
        allowed_token_ids=rules.allowed,
        bad_words=rules.bad_words,
        stop_token_ids=rules.ending_ids,
    )
    return replace(sampling, **changes)


def row_add(
    row: int,
    rules: Rules,
    prompt: list[int],
    answer: list[int] | None = None,
    *,
    num_tokens: int = NUM_TOKENS,
    generation: int = 1,
    sampling: Sampling | None = None,
) -> RowAdd:
    """A row with its own blocks, whose `answer` was generated before."""
    num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
    known = [*prompt, *(answer or [])]
    return RowAdd(
        row=row,
        generation=generation,
        sampling=sampling or sampling_of(rules),
        sequence_index=0,
        block_ids=np.arange(1 + 8 * row, 1 + 8 * row + num_blocks),
        num_computed_tokens=0,
        max_total_tokens=len(prompt) + num_tokens,
        min_total_tokens=len(prompt) + rules.min_tokens + 1,
        history_token_ids=np.array(known, np.int64),
        num_prompt_tokens=len(prompt),
    )


def chunk_of(add: RowAdd) -> Chunk:
    return Chunk(add.row, 0, add.history_token_ids, is_last=True)


def run_plan(runner: Runner, plan: Plan) -> list[StepOutcome]:
    """The plan's step and its repeats."""
    runner.submit(plan)
    outcomes = [runner.poll()]
    while runner.can_repeat:
        runner.submit(None)
        outcomes.append(runner.poll())
    return [outcome for outcome in outcomes if outcome is not None]


def tokens_of(outcomes: list[StepOutcome], row: int) -> list[int]:
    return [
        int(token)
        for outcome in outcomes
        for holder, token, event in zip(
            outcome.rows, outcome.token_ids, outcome.events, strict=True
        )
        if holder == row and event != RowEvent.ERROR
    ]


ANSWER = greedy(logits_of, PROMPT, NUM_TOKENS, Rules(), plain_logits)
CASES = {
    "none": Rules(),
    "repetition": Rules(repetition=1.3),
    "repetition below one": Rules(repetition=0.8),
    "presence": Rules(presence=0.9),
    "frequency": Rules(frequency=1.0),
    "negative penalties": Rules(presence=-0.7, frequency=-0.3),
    "bias": Rules(bias=((ANSWER[0], -3.0), (44, 2.5))),
    "forced": Rules(bias=((7, 100.0),)),
    "allowed": Rules(allowed=(4, 8, 15, 16, 23, 42)),
    "one allowed": Rules(allowed=(8,)),
    "bad tokens": Rules(bad_words=((ANSWER[0],), (ANSWER[1],))),
    "bad phrases": Rules(bad_words=((ANSWER[2], ANSWER[3]), (PROMPT[-1], ANSWER[0]), (3, 4, 5))),
    "a bad phrase over the border": Rules(bad_words=((*PROMPT[-3:], *ANSWER[:3]),)),
    "min_tokens": Rules(min_tokens=6, ending_ids=(ANSWER[1], ANSWER[4])),
    "min_tokens of none": Rules(min_tokens=0, ending_ids=(ANSWER[1],)),
    "many ending ids": Rules(min_tokens=9, ending_ids=tuple(range(1, VOCAB_SIZE, 2))),
    "all": Rules(
        repetition=1.2,
        presence=0.5,
        frequency=0.25,
        bias=((ANSWER[0], 1.5), (60, -2.0)),
        allowed=tuple(range(0, VOCAB_SIZE, 2)),
        bad_words=((ANSWER[1],), (ANSWER[0], 42), (9, 9, 60)),
        min_tokens=5,
        ending_ids=(4, 10, 20, 30, 40, 50, 60, 70, 80, 90),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(name: str) -> None:
    rules = CASES[name]
    add = row_add(2, rules, PROMPT)
    outcomes = run_plan(make_runner(), Plan(1, 99, added_rows=(add,), chunks=(chunk_of(add),)))
    expected = greedy(logits_of, PROMPT, NUM_TOKENS, rules, transformers_logits)
    assert tokens_of(outcomes, 2) == expected
    assert greedy(logits_of, PROMPT, NUM_TOKENS, rules, plain_logits) == expected
    assert name in ("none", "min_tokens of none") or expected != ANSWER


def test_every_case_at_once_and_none_disturbs_another() -> None:
    cases = list(CASES.values())
    runner = make_runner(num_rows=7)
    for plan_id, start in enumerate(range(0, len(cases), 7), 1):
        adds = [row_add(i, rules, PROMPT) for i, rules in enumerate(cases[start : start + 7])]
        plan = Plan(
            plan_id,
            10_000,
            removed_rows=tuple(range(7)),
            added_rows=tuple(adds),
            chunks=tuple(map(chunk_of, adds)),
        )
        outcomes = run_plan(runner, plan)
        for row, rules in enumerate(cases[start : start + 7]):
            expected = greedy(logits_of, PROMPT, NUM_TOKENS, rules, plain_logits)
            assert tokens_of(outcomes, row) == expected, rules


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_checkpoint_of_transformers(device: str, tiny_folder: Path) -> None:
    """The real decoder in float32 against the real model and its processors.

    On a card, steps without rules are captured ones: rows that end leave them behind.
    """
    reference = reference_model(tiny_folder)

    @torch.inference_mode()
    def logits_of(token_ids: list[int]) -> torch.Tensor:
        return reference(torch.tensor([token_ids])).logits[0, -1].clone()

    backend, place = choose_backend(device)
    model = load_model(tiny_folder, dtype="float32", device=place, load_format="auto")
    config = model.config
    limits = RowLimits(8, 80, BLOCK_SIZE, 256, config.vocab_size)
    shape = (80, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [
        (torch.zeros(shape, device=place), torch.zeros(shape, device=place))
        for _ in range(config.num_layers)
    ]
    runner = Runner(model, backend, caches, limits, place)
    if device == "cuda":
        runner.capture()
    names = ("none", "repetition", "bias", "bad phrases", "min_tokens", "many ending ids", "all")
    cases = [CASES[name] for name in names]
    adds = [row_add(row, rules, PROMPT) for row, rules in enumerate(cases)]
    plain = row_add(len(cases), Rules(), PROMPT, num_tokens=2 * NUM_TOKENS)
    adds.append(plain)
    plan = Plan(1, 99, added_rows=tuple(adds), chunks=tuple(map(chunk_of, adds)))
    outcomes = run_plan(runner, plan)
    for row, rules in enumerate(cases):
        expected = greedy(logits_of, PROMPT, NUM_TOKENS, rules, transformers_logits)
        assert tokens_of(outcomes, row) == expected, rules
    expected = greedy(logits_of, PROMPT, 2 * NUM_TOKENS, Rules(), plain_logits)
    assert tokens_of(outcomes, len(cases)) == expected


TOKEN = st.integers(0, VOCAB_SIZE - 1)
NEAR = st.sampled_from([*ANSWER[:6], *PROMPT[-3:]])
RULES = st.builds(
    Rules,
    repetition=st.sampled_from([1.0, 0.7, 1.1, 2.0]),
    presence=st.sampled_from([0.0, -2.0, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, -1.0, 0.1, 2.0]),
    bias=st.dictionaries(TOKEN | NEAR, st.floats(-5, 5, width=32), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    allowed=st.just(()) | st.lists(TOKEN, min_size=12, max_size=90, unique=True).map(tuple),
    bad_words=st.lists(
        st.lists(TOKEN | NEAR, min_size=1, max_size=4).map(tuple), max_size=5, unique=True
    ).map(tuple),
    min_tokens=st.integers(0, 8),
    ending_ids=st.lists(TOKEN | NEAR, max_size=6, unique=True).map(tuple),
)


@settings(deadline=None, max_examples=30)
@given(
    rules=st.lists(st.just(Rules()) | RULES, min_size=1, max_size=4),
    prompts=st.lists(st.lists(TOKEN, min_size=1, max_size=20), min_size=4, max_size=4),
    cut=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_any_rules_on_any_rows_through_preemptions(
    rules: list[Rules], prompts: list[list[int]], cut: int, seed: int
) -> None:
    """Each row leaves after `cut` tokens and goes on in another row, told what was what."""
    runner = make_runner()
    answers: list[list[int]] = [[] for _ in rules]
    alive = list(range(len(rules)))
    places = Random(seed).sample(range(6), len(rules))
    for plan_id, until in ((1, cut), (2, 12)):
        adds = [
            row_add(places[i], rules[i], prompts[i], answers[i], num_tokens=12, generation=plan_id)
            for i in alive
        ]
        removed = tuple(range(6)) if plan_id > 1 else ()
        chunks = tuple(map(chunk_of, adds))
        if not adds or until == 0:
            runner.submit(Plan(plan_id))
            runner.poll()
            continue
        plan = Plan(plan_id, until, removed, added_rows=tuple(adds), chunks=chunks)
        if plan_id > 1:
            plan = replace(plan, decode_until=100)
        outcomes = run_plan(runner, plan)
        for i in alive:
            answers[i] += tokens_of(outcomes, places[i])
        alive = [
            i
            for i in alive
            if not any(
                event != RowEvent.ALIVE and row == places[i]
                for outcome in outcomes
                for row, event in zip(outcome.rows, outcome.events, strict=True)
            )
        ]
        places = places[::-1]
    for i, answer in enumerate(answers):
        expected: list[int] = []
        while len(expected) < 12:
            logits = plain_logits(
                logits_of([*prompts[i], *expected]), prompts[i], expected, rules[i]
            )
            if not logits.isfinite().any():
                break  # the rules bar every token: the row failed here
            best = logits.topk(2).values
            assume(float(best[0] - best[1]) > 1e-4)  # a near-tie may go either way
            expected.append(int(logits.argmax()))
            if expected[-1] in rules[i].ending_ids:
                break
        assert answer == expected, rules[i]


def test_a_phrase_longer_than_the_context_bars_nothing() -> None:
    """As in transformers: the phrase counts once the context is as long as it."""
    first = greedy(logits_of, [5], 1, Rules(), plain_logits)[0]
    rules = Rules(bad_words=((5, first),))
    add = row_add(0, rules, [5], num_tokens=6)
    outcomes = run_plan(make_runner(), Plan(1, 99, added_rows=(add,), chunks=(chunk_of(add),)))
    expected = greedy(logits_of, [5], 6, rules, transformers_logits)
    assert tokens_of(outcomes, 0) == expected
    assert expected[0] == first


def test_a_row_with_fewer_phrases_than_its_neighbour_is_barred_no_other_token() -> None:
    few = Rules(bad_words=((1, 2),), allowed=(0,))
    many = Rules(bad_words=((1, 2), (3, 4, 5), (6, 7), (8, 9, 10, 11)))
    adds = (row_add(0, many, PROMPT), row_add(1, few, PROMPT))
    plan = Plan(1, 5, added_rows=adds, chunks=tuple(map(chunk_of, adds)))
    assert tokens_of(run_plan(make_runner(), plan), 1) == [0] * 5


def test_rules_that_bar_every_token_fail_their_row_and_say_so() -> None:
    barred = Rules(allowed=(4, 8), bad_words=((4,),), min_tokens=3, ending_ids=(8,))
    adds = (row_add(0, barred, PROMPT), row_add(1, Rules(), PROMPT))
    plan = Plan(1, 5, added_rows=adds, chunks=tuple(map(chunk_of, adds)))
    outcomes = run_plan(make_runner(), plan)
    assert outcomes[0].events.tolist() == [RowEvent.ERROR, RowEvent.ALIVE]
    assert [fault.row for fault in outcomes[0].faults] == [0]
    assert "allowed_token_ids" in outcomes[0].faults[0].message
    assert tokens_of(outcomes, 1) == ANSWER[:5]


def test_rules_hide_no_bad_value() -> None:
    model = TinyPagedModel(broken_ids=(33,))
    rules = Rules(allowed=(4, 8), bad_words=((5,), (33, 4)), repetition=1.5)
    adds = (row_add(0, rules, [33]), row_add(1, rules, PROMPT))
    plan = Plan(1, added_rows=adds, chunks=tuple(map(chunk_of, adds)))
    outcomes = run_plan(make_runner(model), plan)
    assert outcomes[0].events.tolist() == [RowEvent.ERROR, RowEvent.ALIVE]


def test_siblings_count_their_own_tokens() -> None:
    rules = Rules(presence=2.0, frequency=2.0)
    sampling = sampling_of(rules, temperature=3.0, seed=11)
    adds = [replace(row_add(i, rules, PROMPT, sampling=sampling), sequence_index=i) for i in (0, 1)]
    plan = Plan(1, 99, added_rows=tuple(adds), chunks=tuple(map(chunk_of, adds)))
    together = run_plan(make_runner(), plan)
    texts = [tokens_of(together, row) for row in (0, 1)]
    assert texts[0] != texts[1]
    for row, add in enumerate(adds):
        alone = run_plan(make_runner(), Plan(1, 99, added_rows=(add,), chunks=(chunk_of(add),)))
        assert tokens_of(alone, row) == texts[row]


def test_sampled_rows_draw_from_the_changed_logits() -> None:
    allowed = Rules(allowed=tuple(range(10)), bad_words=((3,),), presence=1.0)
    sampling = sampling_of(allowed, temperature=5.0, seed=3, top_p=0.95)
    add = row_add(0, allowed, PROMPT, sampling=sampling)
    outcomes = run_plan(make_runner(), Plan(1, 99, added_rows=(add,), chunks=(chunk_of(add),)))
    tokens = tokens_of(outcomes, 0)
    assert len(tokens) == NUM_TOKENS
    assert set(tokens) <= set(range(10)) - {3}
    assert len(set(tokens)) > 4


def test_logprobs_are_raw_whatever_the_rules() -> None:
    """A forced token is reported as unlikely as the model finds it, rank and all."""
    rules = Rules(bias=((7, 100.0),), presence=1.0, repetition=1.5)
    add = row_add(0, rules, PROMPT, sampling=sampling_of(rules, logprobs=2))
    outcomes = run_plan(make_runner(), Plan(1, 9, added_rows=(add,), chunks=(chunk_of(add),)))
    for index, outcome in enumerate(outcomes):
        expected = logits_of([*PROMPT, *[7] * index]).log_softmax(dim=-1)
        (item,) = outcome.logprobs
        assert int(outcome.token_ids[0]) == 7
        assert item.logprob == pytest.approx(float(expected[7]), abs=1e-4)
        assert item.rank == int((expected > expected[7]).sum()) > 2
        assert item.top_token_ids.tolist() == expected.topk(2).indices.tolist()


def test_only_rows_with_rules_take_room_and_give_it_back() -> None:
    runner = make_runner()
    plain = row_add(0, Rules(), PROMPT)
    run_plan(runner, Plan(1, added_rows=(plain,), chunks=(chunk_of(plain),)))
    rules = runner._rules  # type: ignore[attr-defined]
    assert rules.num_slots_used == 0
    assert all(pool.num_slots == 0 for pool in rules._pools)
    adds = [row_add(row, CASES["all"], PROMPT) for row in range(1, 6)]
    run_plan(runner, Plan(2, added_rows=tuple(adds), chunks=tuple(map(chunk_of, adds))))
    assert rules.num_slots_used == 20
    run_plan(runner, Plan(3, removed_rows=(1, 2, 3)))
    assert rules.num_slots_used == 8
    # A row that failed is replaced without having been removed.
    again = [row_add(4, Rules(presence=1.0), PROMPT, generation=2)]
    run_plan(runner, Plan(4, added_rows=tuple(again)))
    assert rules.num_slots_used == 5
    runner.reset()
    assert rules.num_slots_used == 0


def test_a_row_past_its_min_tokens_is_an_ordinary_one() -> None:
    rules = Rules(min_tokens=3, ending_ids=(VOCAB_SIZE - 1,))
    add = row_add(0, rules, PROMPT)
    runner = make_runner()
    runner.submit(Plan(1, 9, added_rows=(add,), chunks=(chunk_of(add),)))
    for _ in range(8):
        runner.submit(None)
    works = [step.work for step in runner._pending]  # type: ignore[attr-defined]
    assert [work.rules is not None for work in works] == [True] * 3 + [False] * 6


BAD_RULES = {
    "presence_penalty": {"presence_penalty": float("nan")},
    "frequency_penalty": {"frequency_penalty": float("inf")},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "logit_bias": {"logit_bias_ids": (1, 2), "logit_bias_values": (1.0,)},
    "token ids": {"allowed_token_ids": (VOCAB_SIZE,)},
    "bad_words": {"bad_words": ((),)},
    "logprobs": {"prompt_logprobs": 21},
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_a_bad_rule_fails_its_row(name: str) -> None:
    bad = replace(row_add(0, Rules(), PROMPT), sampling=Sampling(**BAD_RULES[name]))
    good = row_add(1, CASES["all"], PROMPT)
    adds = (bad, good)
    outcome = run_plan(make_runner(), Plan(1, added_rows=adds, chunks=tuple(map(chunk_of, adds))))[
        0
    ]
    assert [fault.message for fault in outcome.faults] == [
        f"sampling parameter out of range: {name}"
    ]
    assert len(tokens_of([outcome], 1)) == 1


def test_rules_that_need_a_history_fail_without_one() -> None:
    sampling = sampling_of(Rules(presence=1.0))
    for history, num_prompt in (([], 0), (PROMPT, 0), (PROMPT, 20), ([1, VOCAB_SIZE], 1)):
        add = replace(
            row_add(0, Rules(), PROMPT),
            sampling=sampling,
            history_token_ids=np.array(history, np.int64),
            num_prompt_tokens=num_prompt,
        )
        outcome = run_plan(make_runner(), Plan(1, added_rows=(add,)))[0]
        assert outcome.events.tolist() == [RowEvent.ERROR]
