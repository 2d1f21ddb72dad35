"""The runner on a tiny model: whatever the plans, the tokens are those of a dense pass."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.row_event import RowEvent
from octavo_worker.plan import Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.runner import Runner
from tests.fakes.tiny_paged_model import VOCAB_SIZE, TinyPagedModel
from tests.unit.gpu_worker.runner_cases import (
    PROMPT,
    chunk,
    make_runner,
    repeat,
    row_add,
    run,
    tokens_of,
)


def generate(runner: Runner, add: RowAdd, prompt: list[int]) -> list[StepOutcome]:
    """A whole sequence of plan 1: its outcomes until it dies."""
    plan = Plan(1, 1000, added_rows=(add,), chunks=(chunk(add.row, prompt),))
    return [run(runner, plan), *repeat(runner)]


def test_prefill_and_repeats_draw_the_dense_tokens() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    outcomes = generate(runner, row_add(max_total=len(PROMPT) + 30), PROMPT)
    assert tokens_of(outcomes) == model.greedy(PROMPT, 30)
    assert [outcome.step for outcome in outcomes] == list(range(1, 31))
    assert [outcome.repeat for outcome in outcomes] == list(range(30))
    assert {outcome.plan_id for outcome in outcomes} == {1}
    events = [int(outcome.events[0]) for outcome in outcomes]
    assert events == [RowEvent.ALIVE] * 29 + [RowEvent.LENGTH]


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 39), max_size=6, unique=True),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=40, max_size=40),
)
def test_chunks_of_any_size_equal_the_whole_prompt(cuts: list[int], prompt: list[int]) -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    bounds = [0, *sorted(cuts), 40]
    add = row_add(blocks=(7, 3, 9), max_total=44)
    outcomes = []
    for plan_id, (start, end) in enumerate(itertools.pairwise(bounds), 1):
        plan = Plan(
            plan_id,
            decode_until=1000 if end == 40 else 0,
            added_rows=(add,) if start == 0 else (),
            chunks=(chunk(0, prompt[start:end], start, end == 40),),
        )
        outcomes.append(run(runner, plan))
    outcomes += repeat(runner)
    assert tokens_of(outcomes) == model.greedy(prompt, 4)


def test_prefill_rides_along_with_decodes() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    add = row_add(0, max_total=60)
    outcomes = [run(runner, Plan(1, added_rows=(add,), chunks=(chunk(0, PROMPT),)))]
    second = row_add(2, blocks=(9, 10), max_total=60)
    first_half, second_half = PROMPT[::-1][:10], PROMPT[::-1][10:]
    plan = Plan(2, added_rows=(second,), chunks=(chunk(2, first_half, is_last=False),))
    outcomes.append(run(runner, plan))
    outcomes.append(run(runner, Plan(3, 8, chunks=(chunk(2, second_half, 10),))))
    outcomes += repeat(runner)
    assert outcomes[-1].step == 8
    assert tokens_of(outcomes, 0) == model.greedy(PROMPT, 8)
    assert tokens_of(outcomes, 2) == model.greedy(PROMPT[::-1], 6)


def test_steps_stop_at_decode_until() -> None:
    runner = make_runner()
    plan = Plan(1, 3, added_rows=(row_add(),), chunks=(chunk(0, PROMPT),))
    outcomes = [run(runner, plan), *repeat(runner)]
    assert [outcome.step for outcome in outcomes] == [1, 2, 3]
    outcomes = [run(runner, Plan(2, 5)), *repeat(runner)]
    assert [(o.step, o.plan_id, o.repeat) for o in outcomes] == [(4, 2, 0), (5, 2, 1)]


def test_a_row_is_removed_and_added_in_one_plan() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    run(runner, Plan(1, added_rows=(row_add(),), chunks=(chunk(0, PROMPT),)))
    other = PROMPT[::-1]
    add = row_add(generation=2, blocks=(2, 1, 5), max_total=len(other) + 5)
    plan = Plan(2, 1000, removed_rows=(0,), added_rows=(add,), chunks=(chunk(0, other),))
    outcomes = [run(runner, plan), *repeat(runner)]
    assert tokens_of(outcomes) == model.greedy(other, 5)
    assert {int(outcome.generations[0]) for outcome in outcomes} == {2}


def test_cached_blocks_are_used_as_they_are() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    run(runner, Plan(1, added_rows=(row_add(),), chunks=(chunk(0, PROMPT),)))
    add = row_add(1, blocks=(1, 9), num_computed=16, max_total=24)
    plan = Plan(2, 1000, removed_rows=(0,), added_rows=(add,), chunks=(chunk(1, PROMPT[16:], 16),))
    outcomes = [run(runner, plan), *repeat(runner)]
    assert tokens_of(outcomes, 1) == model.greedy(PROMPT, 5)


def test_a_row_without_a_slot_waits_for_its_block() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    add = row_add(blocks=(1, 2), max_total=60)
    other = row_add(1, blocks=(3, 4, 5), max_total=60)
    plan = Plan(1, 25, added_rows=(add, other), chunks=(chunk(0, PROMPT), chunk(1, PROMPT[:4])))
    outcomes = [run(runner, plan), *repeat(runner)]
    # 19 prompt tokens and 13 decodes fill the two blocks' 32 slots; the draw needs none.
    assert len(tokens_of(outcomes, 0)) == 14
    assert len(tokens_of(outcomes, 1)) == 25
    update = np.array([[0, 2, 11]], np.int64)
    outcomes += [run(runner, Plan(2, 30, block_updates=update)), *repeat(runner)]
    assert tokens_of(outcomes, 0) == model.greedy(PROMPT, 19)
    assert tokens_of(outcomes, 1) == model.greedy(PROMPT[:4], 30)


def test_no_repeat_without_a_row_that_can_decode() -> None:
    runner = make_runner()
    add = row_add(blocks=(1, 2), max_total=60)
    outcomes = generate(runner, add, PROMPT)
    assert len(outcomes) == 14
    assert not runner.can_repeat


def test_stop_ids_are_drawn_from_min_total_tokens_on() -> None:
    model = TinyPagedModel()
    answer = model.greedy(PROMPT, 30)
    stop = Sampling(stop_token_ids=(answer[3],))
    first = answer.index(answer[3])
    for min_total in (0, len(PROMPT) + first + 1):
        add = row_add(sampling=stop, min_total=min_total)
        outcomes = generate(make_runner(model), add, PROMPT)
        assert tokens_of(outcomes) == answer[: first + 1]
        assert int(outcomes[-1].events[0]) == RowEvent.STOP
    add = row_add(
        sampling=stop, min_total=len(PROMPT) + first + 2, max_total=len(PROMPT) + first + 1
    )
    outcomes = generate(make_runner(model), add, PROMPT)
    assert int(outcomes[-1].events[0]) == RowEvent.LENGTH
    logits = model.dense_logits([*PROMPT, *answer[:first]])[-1]
    logits[answer[3]] = -torch.inf
    assert tokens_of(outcomes) == [*answer[:first], int(logits.argmax())]


def test_an_ending_id_outranks_the_length() -> None:
    model = TinyPagedModel()
    answer = model.greedy(PROMPT, 1)
    add = row_add(sampling=Sampling(stop_token_ids=(answer[0],)), max_total=len(PROMPT) + 1)
    outcomes = generate(make_runner(model), add, PROMPT)
    assert [int(event) for event in outcomes[0].events] == [RowEvent.STOP]
    assert len(outcomes) == 1


def test_many_stop_ids_widen_the_rows() -> None:
    model = TinyPagedModel()
    answer = model.greedy(PROMPT, 3)
    others = tuple(i for i in range(VOCAB_SIZE) if i not in answer)[:20]
    stop = Sampling(stop_token_ids=(*others, answer[2]))
    outcomes = generate(make_runner(model), row_add(sampling=stop), PROMPT)
    assert tokens_of(outcomes) == answer[: answer.index(answer[2]) + 1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    greedy = row_add(0, sampling=Sampling(logprobs=4), max_total=24)
    sampled = row_add(
        1, blocks=(9, 10), sampling=Sampling(temperature=2.0, seed=5, logprobs=0), max_total=24
    )
    silent = row_add(2, blocks=(11, 12), max_total=24)
    chunks = tuple(chunk(row, PROMPT) for row in range(3))
    plan = Plan(1, 100, added_rows=(greedy, sampled, silent), chunks=chunks)
    outcomes = [run(runner, plan), *repeat(runner)]
    contexts = {0: list(PROMPT), 1: list(PROMPT)}
    for outcome in outcomes:
        assert [item.entry for item in outcome.logprobs] == [0, 1]
        for item, wanted in zip(outcome.logprobs, (4, 0), strict=True):
            row, token = int(outcome.rows[item.entry]), int(outcome.token_ids[item.entry])
            expected = model.dense_logits(contexts[row])[-1].log_softmax(dim=-1)
            assert item.logprob == pytest.approx(float(expected[token]), abs=1e-4)
            assert item.rank == int((expected > expected[token]).sum())
            top = expected.topk(wanted)
            assert item.top_token_ids.tolist() == top.indices.tolist()
            np.testing.assert_allclose(item.top_logprobs, top.values.numpy(), atol=1e-4)
            contexts[row].append(token)


def test_a_seeded_row_draws_the_same_alone_and_in_a_crowd() -> None:
    model = TinyPagedModel()
    sampling = Sampling(temperature=1.3, top_p=0.95, top_k=40, seed=2**63 + 12345)
    add = row_add(2, sampling=sampling, max_total=50, sequence_index=1)
    alone = tokens_of(generate(make_runner(model), add, PROMPT), 2)
    crowd = [
        row_add(0, blocks=(20, 21, 22, 23), sampling=Sampling(), max_total=60),
        replace(add, sequence_index=0, row=1, block_ids=np.array([30, 31, 32, 33], np.int64)),
        row_add(3, blocks=(40, 41, 42, 43), sampling=Sampling(temperature=1.0), max_total=60),
    ]
    chunks = (chunk(0, PROMPT[:7]), *(chunk(row, PROMPT) for row in (1, 2, 3)))
    runner = make_runner(model)
    plan = Plan(1, 100, added_rows=(*crowd, add), chunks=chunks)
    outcomes = [run(runner, plan), *repeat(runner)]
    assert tokens_of(outcomes, 2) == alone
    assert tokens_of(outcomes, 1) != alone
    # Moved after ten tokens: the draws go on where they were.
    moved = replace(add, row=0, generation=9)
    rest = tokens_of(generate(make_runner(model), moved, PROMPT + alone[:10]), 0)
    assert rest == alone[10:]


def test_writing_to_a_block_drops_its_hash() -> None:
    runner = make_runner()
    digests = {block: bytes([block]) * 16 for block in range(1, 5)}
    add = row_add(blocks=(1, 2, 3, 4), max_total=64)
    run(runner, Plan(1, added_rows=(add,), chunks=(chunk(0, PROMPT + PROMPT),)))
    sealed = ((1, digests[1]), (2, digests[2]))
    run(runner, Plan(2, sealed=sealed))
    assert list(runner.sealed.inventory()) == [(1, digests[1]), (2, digests[2])]
    # The row leaves: its first block is worth the most. Block 2 gets another holder.
    run(runner, Plan(3, removed_rows=(0,)))
    assert list(runner.sealed.inventory()) == [(2, digests[2]), (1, digests[1])]
    add = row_add(1, blocks=(1, 2), num_computed=16)
    run(runner, Plan(4, added_rows=(add,), chunks=(chunk(1, PROMPT[16:], 16),)))
    assert list(runner.sealed.inventory()) == [(1, digests[1])]


def test_reset_frees_all_rows_and_keeps_sealed_blocks() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    plan = Plan(1, 50, added_rows=(row_add(),), chunks=(chunk(0, PROMPT),))
    run(runner, plan)
    run(runner, Plan(2, 50, sealed=((1, b"x" * 16),)))
    runner.reset()
    assert (runner.num_live_rows, runner.can_repeat) == (0, False)
    assert list(runner.sealed.inventory()) == [(1, b"x" * 16)]
    add = row_add(1, blocks=(1, 2), num_computed=16, max_total=25)
    outcomes = [run(runner, replace(plan, added_rows=(add,), chunks=(chunk(1, PROMPT[16:], 16),)))]
    outcomes += repeat(runner)
    assert tokens_of(outcomes, 1) == model.greedy(PROMPT, 6)
    assert outcomes[0].step == 1


def test_an_empty_plan_is_a_step() -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    outcome = run(runner, Plan(1, 5))
    assert (outcome.step, len(outcome.rows), model.num_forwards) == (1, 0, 0)
    assert not runner.can_repeat


def test_a_gap_is_idle_time_while_rows_live() -> None:
    runner = make_runner()
    began = time.perf_counter()
    added = row_add(max_total=len(PROMPT) + 3)
    first = run(runner, Plan(1, 10, added_rows=(added,), chunks=(chunk(0, PROMPT),)))
    assert first.gap_us == 0
    time.sleep(0.02)
    second = run(runner, None)
    assert 20_000 <= second.gap_us <= 1e6 * (time.perf_counter() - began)
    run(runner, None)
    # The row has ended: nobody waited for what comes now.
    time.sleep(0.02)
    again = row_add(row=1, blocks=(5, 6, 7, 8))
    assert run(runner, Plan(2, 0, added_rows=(again,), chunks=(chunk(1, PROMPT),))).gap_us == 0
    # It does now, but a new epoch begins without rows.
    time.sleep(0.02)
    runner.reset()
    assert run(runner, Plan(1, 0, added_rows=(added,), chunks=(chunk(0, PROMPT),))).gap_us == 0
