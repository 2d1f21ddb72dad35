"""Whether a stream that was disturbed is the one that it would have been. Entry: `check_answer`."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos.attempts import Attempt
from tests.chaos.traffic import Call
from tests.oracle import check_greedy


def check_answer(
    model: Path, call: Call, before: Attempt, after: Attempt, broken: Sequence[Attempt] = ()
) -> None:
    """`after` ended once and well, with all ids, none twice: those of the undisturbed `before`.

    Greedy text may differ where another batch shape's rounding flips a near-tie. What `broken`
    attempts had given before their router went is the answer's beginning.
    """
    assert not after.error
    num_ids = sum(len(choice.token_ids) for choice in after.choices)
    assert num_ids == after.completion_tokens, "an id is missing, or came twice"
    for was, now in zip(before.choices, after.choices, strict=True):
        assert now.finish in ("stop", "length")
        if now.finish == "length":
            assert len(now.token_ids) == call.fields["max_tokens"]
        if "logprobs" in call.fields:
            assert now.num_logprobs == len(now.token_ids)
        if now.token_ids == was.token_ids:
            assert (now.text, now.finish) == (was.text, was.finish)
            continue
        assert call.is_greedy, "a seeded stream went on with other draws"
        check = check_greedy(model, call.prompt_ids, now.token_ids)
        assert check.is_right, f"{check.wrong} after a move"
        assert check.num_near_ties
    for attempt in broken:
        for part, now in zip(attempt.choices, after.choices, strict=False):
            is_same = part.token_ids == now.token_ids[: len(part.token_ids)]
            assert is_same or call.is_greedy, "a retry drew another text"
