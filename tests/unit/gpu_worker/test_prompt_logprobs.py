"""Log-probabilities of the prompt: whatever the chunks, those of one dense pass."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_worker import prompt_logprobs
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.plan import Chunk, Plan, PromptLogprobs, RowAdd, Sampling, StepOutcome
from octavo_worker.row_limits import RowLimits
from octavo_worker.runner import Runner
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

torch.set_num_threads(1)
BLOCK_SIZE = 16
MODEL = TinyPagedModel()
PROMPT = [(13 * i + 7 * i * i + 3) % VOCAB_SIZE for i in range(40)]


def make_runner() -> Runner:
    limits = RowLimits(4, 64, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(64, BLOCK_SIZE)
    return Runner(MODEL, CpuBackend(), caches, limits, torch.device("cpu"))


def row_add(
    row: int = 0,
    prompt: list[int] = PROMPT,
    answer: tuple[int, ...] = (),
    wanted: int | None = 2,
    generation: int = 1,
) -> RowAdd:
    return RowAdd(
        row=row,
        generation=generation,
        sampling=Sampling(prompt_logprobs=wanted),
        sequence_index=0,
        block_ids=np.arange(1 + 6 * row, 7 + 6 * row),
        num_computed_tokens=0,
        max_total_tokens=90,
        history_token_ids=np.array([*prompt, *answer], np.int64),
        num_prompt_tokens=len(prompt),
    )


def run(runner: Runner, plan: Plan) -> StepOutcome:
    runner.submit(plan)
    outcome = runner.poll()
    assert outcome is not None
    return outcome


def in_chunks(
    runner: Runner, add: RowAdd, cuts: list[int], first_plan: int = 1
) -> list[StepOutcome]:
    """The row's known tokens, cut there; one plan a chunk."""
    known = add.history_token_ids
    bounds = [0, *cuts, len(known)]
    outcomes = []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        chunk = Chunk(add.row, start, known[start:end], is_last=end == len(known))
        added = (add,) if start == 0 else ()
        removed = (add.row,) if start == 0 else ()
        plan = Plan(first_plan + index, 0, removed, added_rows=added, chunks=(chunk,))
        outcomes.append(run(runner, plan))
    return outcomes


def pieces_of(outcomes: list[StepOutcome], row: int = 0) -> list[PromptLogprobs]:
    return [piece for o in outcomes for piece in o.prompt_logprobs if piece.row == row]


def check(pieces: list[PromptLogprobs], prompt: list[int] = PROMPT, wanted: int = 2) -> None:
    """The pieces join to positions 1 .. len(prompt) - 1 and hold the dense pass's values."""
    expected = MODEL.dense_logits(prompt).log_softmax(dim=-1)
    position = 1
    for piece in pieces:
        assert piece.start == position
        assert len(piece.logprobs) == len(piece.ranks) > 0
        for i, logprob in enumerate(piece.logprobs):
            row = expected[position - 1]
            assert logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
            assert piece.ranks[i] == int((row > row[prompt[position]]).sum())
            top = row.topk(wanted)
            assert piece.top_token_ids[i].tolist() == top.indices.tolist()
            np.testing.assert_allclose(piece.top_logprobs[i], top.values.numpy(), atol=1e-4)
            position += 1
    assert position == len(prompt)


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, 39), max_size=8, unique=True).map(sorted),
    wanted=st.sampled_from([0, 1, 5]),
)
def test_chunk_borders_anywhere(cuts: list[int], wanted: int) -> None:
    outcomes = in_chunks(make_runner(), row_add(wanted=wanted), cuts)
    check(pieces_of(outcomes), wanted=wanted)
    assert int(outcomes[-1].token_ids[0]) == MODEL.greedy(PROMPT, 1)[0]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_prompts_of_any_length_twice_in_the_same_row(length: int) -> None:
    runner = make_runner()
    for generation in (1, 2):
        add = row_add(prompt=PROMPT[:length], generation=generation)
        pieces = pieces_of(in_chunks(runner, add, [], first_plan=generation))
        assert {piece.generation for piece in pieces} == ({generation} if length > 1 else set())
        check(pieces, PROMPT[:length])


def test_logits_are_made_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "_MOST_LOGITS", 7 * VOCAB_SIZE)
    sizes = []
    model = TinyPagedModel()

    class Counting(TinyPagedModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            sizes.append(len(hidden))
            return model.logits(hidden)

    limits = RowLimits(4, 64, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(64, BLOCK_SIZE)
    runner = Runner(Counting(), CpuBackend(), caches, limits, torch.device("cpu"))
    check(pieces_of(in_chunks(runner, row_add(), [])))
    assert sizes == [1, 7, 7, 7, 7, 7, 4]


def test_beside_ordinary_rows_which_pay_nothing() -> None:
    runner = make_runner()
    plain = row_add(0, wanted=None)
    asking = row_add(1, prompt=PROMPT[::-1])
    other = row_add(2, prompt=PROMPT[5:25], wanted=1)
    chunks = [Chunk(0, 0, plain.history_token_ids, is_last=True)]
    chunks += [Chunk(1, 0, asking.history_token_ids[:30], is_last=False)]
    chunks += [Chunk(2, 0, other.history_token_ids, is_last=True)]
    plan = Plan(1, added_rows=(plain, asking, other), chunks=tuple(chunks))
    outcomes = [run(runner, plan)]
    rest = Chunk(1, 30, asking.history_token_ids[30:], is_last=True)
    outcomes.append(run(runner, Plan(2, 9, chunks=(rest,))))
    check(pieces_of(outcomes, 1), PROMPT[::-1])
    check(pieces_of(outcomes, 2), PROMPT[5:25], wanted=1)
    assert pieces_of(outcomes, 0) == []
    while runner.can_repeat:
        runner.submit(None)
        outcome = runner.poll()
        assert outcome is not None
        assert outcome.prompt_logprobs == ()
        outcomes.append(outcome)
    tokens = [int(o.token_ids[list(o.rows).index(0)]) for o in outcomes]
    assert tokens == MODEL.greedy(PROMPT, len(tokens))


def test_generated_tokens_of_a_resumed_row_are_no_prompt() -> None:
    answer = tuple(MODEL.greedy(PROMPT, 20))
    for cuts in ([], [38], [39], [40], [41], [50]):
        outcomes = in_chunks(make_runner(), row_add(answer=answer), cuts)
        check(pieces_of(outcomes))
        assert int(outcomes[-1].token_ids[0]) == MODEL.greedy(PROMPT, 21)[-1]


def test_a_failed_row_reports_nothing_more() -> None:
    runner = make_runner()
    first = Chunk(0, 0, np.array(PROMPT[:10]), is_last=False)
    gap = Chunk(0, 20, np.array(PROMPT[20:]), is_last=True)
    outcomes = [run(runner, Plan(1, added_rows=(row_add(),), chunks=(first,)))]
    outcomes.append(run(runner, Plan(2, chunks=(gap,))))
    assert [piece.start for piece in pieces_of(outcomes)] == [1]
    again = replace(row_add(generation=2), sampling=Sampling())
    plan = Plan(3, 0, (0,), added_rows=(again,), chunks=(replace(gap, start=0),))
    assert run(runner, plan).prompt_logprobs == ()
