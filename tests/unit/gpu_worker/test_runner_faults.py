"""Bad values and bad orders: they fail their row, and no other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.row_event import RowEvent
from octavo_worker.plan import Plan, Sampling
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


def test_later_plans_may_name_a_dead_row() -> None:
    model = TinyPagedModel()
    answer = model.greedy(PROMPT, 2)
    runner = make_runner(model)
    add = row_add(sampling=Sampling(stop_token_ids=(answer[0],)))
    other = row_add(1, blocks=(10, 11), max_total=60)
    plan = Plan(1, added_rows=(add, other), chunks=(chunk(0, PROMPT), chunk(1, PROMPT)))
    assert len(run(runner, plan).rows) == 2
    update = np.array([[0, 4, 20]], np.int64)
    outcome = run(runner, Plan(2, block_updates=update, chunks=(chunk(0, [1], 19),)))
    assert outcome.rows.tolist() == [1]
    assert outcome.faults == ()


def test_dead_on_the_device_only() -> None:
    """What a card does: the next step is launched before the host knows of a death."""
    model = TinyPagedModel()
    answer = model.greedy(PROMPT, 5)
    runner = make_runner(model)
    stop = Sampling(stop_token_ids=(answer[0],))
    adds = (row_add(0, sampling=stop), row_add(1, blocks=(10, 11), max_total=60))
    runner.submit(Plan(1, 9, added_rows=adds, chunks=(chunk(0, PROMPT), chunk(1, PROMPT))))
    for _ in range(3):
        runner.submit(None)
    outcomes = [runner.poll() for _ in range(4)]
    rows = [outcome.rows.tolist() for outcome in outcomes if outcome]
    assert rows == [[0, 1], [1], [1], [1]]
    assert tokens_of([o for o in outcomes if o], 1) == answer[:4]


def test_bad_values_fail_their_row_only() -> None:
    model = TinyPagedModel(broken_ids=(33,))
    runner = make_runner(model)
    adds = (row_add(0), row_add(1, blocks=(10, 11), max_total=60))
    bad = [*PROMPT[:5], 33, *PROMPT[5:]]
    plan = Plan(1, 4, added_rows=adds, chunks=(chunk(0, bad), chunk(1, PROMPT)))
    outcomes = [run(runner, plan), *repeat(runner)]
    assert outcomes[0].events.tolist() == [RowEvent.ERROR, RowEvent.ALIVE]
    assert [(f.row, f.generation, f.message) for f in outcomes[0].faults] == [
        (0, 1, "non-finite logits")
    ]
    assert tokens_of(outcomes, 1) == model.greedy(PROMPT, 4)
    # The row's blocks hold NaN now; their next holder must not notice.
    add = row_add(0, generation=2, max_total=len(PROMPT) + 9)
    plan = Plan(2, 1000, removed_rows=(0, 1), added_rows=(add,), chunks=(chunk(0, PROMPT),))
    assert tokens_of([run(runner, plan), *repeat(runner)]) == model.greedy(PROMPT, 9)


def test_sampled_rows_survive_bad_values_next_to_them() -> None:
    runner = make_runner(TinyPagedModel(broken_ids=(33,)))
    sampling = Sampling(temperature=1.0, top_p=0.9, min_p=0.1, seed=3)
    adds = (row_add(0, sampling=sampling), row_add(1, blocks=(10, 11), sampling=sampling))
    plan = Plan(1, added_rows=adds, chunks=(chunk(0, [33]), chunk(1, PROMPT)))
    assert run(runner, plan).events.tolist() == [RowEvent.ERROR, RowEvent.ALIVE]


@pytest.mark.parametrize(
    ("values", "is_bad"),
    [
        ({0: -torch.inf, 5: -torch.inf}, False),
        ({3: torch.nan}, True),
        ({3: torch.inf}, True),
        (dict.fromkeys(range(VOCAB_SIZE), -torch.inf), True),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_logit_is_no_bad_value(
    values: dict[int, float], is_bad: bool, temperature: float
) -> None:
    class Masked(TinyPagedModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = super().logits(hidden)
            for token_id, value in values.items():
                logits[0, token_id] = value
            return logits

    sampling = Sampling(temperature=temperature, top_p=0.9)
    adds = (row_add(0, sampling=sampling), row_add(1, blocks=(10, 11), sampling=sampling))
    plan = Plan(1, added_rows=adds, chunks=(chunk(0, PROMPT), chunk(1, PROMPT)))
    outcome = run(make_runner(Masked()), plan)
    assert outcome.events.tolist() == [RowEvent.ERROR if is_bad else RowEvent.ALIVE, RowEvent.ALIVE]
    assert is_bad or int(outcome.token_ids[0]) not in values


BAD_PLANS = {
    "row outside": (Plan(1, added_rows=(row_add(9),)), "row 9 is outside 0 .. 3"),
    "block outside": (
        Plan(1, added_rows=(row_add(blocks=(64,)),)),
        "a block id is outside 1 .. 63",
    ),
    "null block": (Plan(1, added_rows=(row_add(blocks=(1, 0)),)), "a block id is outside 1 .. 63"),
    "chunk start": (
        Plan(1, added_rows=(row_add(),), chunks=(chunk(0, PROMPT, 3),)),
        "chunk starts at 3, but 0 tokens are computed",
    ),
    "token id": (
        Plan(1, added_rows=(row_add(),), chunks=(chunk(0, [VOCAB_SIZE]),)),
        "token id 97: the vocabulary has 97",
    ),
    "empty chunk": (
        Plan(1, added_rows=(row_add(),), chunks=(chunk(0, []),)),
        "an empty chunk",
    ),
    "beyond the table": (
        Plan(1, added_rows=(row_add(blocks=(1,)),), chunks=(chunk(0, PROMPT),)),
        "chunk ends at 19, beyond 1 blocks",
    ),
    "no room": (
        Plan(1, added_rows=(row_add(max_total=19),), chunks=(chunk(0, PROMPT),)),
        "chunk ends at 19: no room below 19 tokens",
    ),
    "too long": (
        Plan(1, added_rows=(row_add(max_total=257),)),
        "max_total_tokens 257: must be 1 .. 256",
    ),
    "not a number": (
        Plan(1, added_rows=(row_add(sampling=Sampling(temperature=float("nan"))),)),
        "sampling parameter out of range: temperature",
    ),
    "computed beyond the table": (
        Plan(1, added_rows=(row_add(blocks=(1,), num_computed=17),)),
        "17 computed tokens exceed 1 blocks",
    ),
    "block update": (
        Plan(1, added_rows=(row_add(),), block_updates=np.array([[0, 4, 0]], np.int64)),
        "block id 0 is outside 1 .. 63",
    ),
    "gap in the table": (
        Plan(1, added_rows=(row_add(),), block_updates=np.array([[0, 5, 9]], np.int64)),
        "block-table index 5 of a row of 4 blocks",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_order_fails_its_row_and_no_other(name: str) -> None:
    model = TinyPagedModel()
    runner = make_runner(model)
    neighbour = row_add(1, generation=7, blocks=(40, 41), max_total=60)
    bad, message = BAD_PLANS[name]
    plan = replace(
        bad,
        decode_until=3,
        added_rows=(*bad.added_rows, neighbour),
        chunks=(*bad.chunks, chunk(1, PROMPT)),
    )
    outcomes = [run(runner, plan), *repeat(runner)]
    assert len(outcomes[0].faults) == 1
    assert outcomes[0].faults[0].message.startswith(message)
    assert outcomes[0].faults[0].generation == 1
    is_neighbour = outcomes[0].rows == 1
    assert outcomes[0].events[~is_neighbour].tolist() == [RowEvent.ERROR]
    assert outcomes[1].faults == ()
    assert tokens_of(outcomes, 1) == model.greedy(PROMPT, 3)


def test_rows_that_nobody_holds_are_reported() -> None:
    runner = make_runner()
    updates = np.array([[2, 0, 5]], np.int64)
    outcome = run(runner, Plan(1, block_updates=updates, chunks=(chunk(3, PROMPT),)))
    assert [fault.message for fault in outcome.faults] == [
        "nobody holds row 2",
        "nobody holds row 3",
    ]
    assert run(runner, Plan(2, removed_rows=(1, 99))).faults == ()


def test_a_row_added_twice_fails_both_holders() -> None:
    runner = make_runner()
    run(runner, Plan(1, added_rows=(row_add(),), chunks=(chunk(0, PROMPT),)))
    outcome = run(runner, Plan(2, added_rows=(row_add(generation=2, blocks=(0,)),)))
    assert [fault.generation for fault in outcome.faults] == [1, 2]
