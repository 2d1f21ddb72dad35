"""Frames: one entry a sequence, tokens in the order of their steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler.outbox import Outbox
from octavo_scheduler.results import TokenColumns

STEP = st.dictionaries(
    st.tuples(st.integers(1, 4), st.integers(0, 2)), st.integers(0, 99), max_size=8
)


@given(steps=st.lists(STEP, max_size=6))
def test_merged_steps_keep_every_token_and_its_logprob(
    steps: list[dict[tuple[int, int], int]],
) -> None:
    calls: list[None] = []
    outbox = Outbox(lambda: calls.append(None))
    expected: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        keys = list(step)
        outbox.push(
            TokenColumns(
                np.ones(len(keys), np.int64),
                np.array([handle for handle, _ in keys], np.uint64),
                np.array([index for _, index in keys], np.uint32),
                np.array(list(step.values()), np.uint32),
                {i: step[key] for i, key in enumerate(keys) if key[1] == 1},
            )
        )
        for key, token in step.items():
            expected.setdefault(key, []).append(token)
    assert bool(calls) == bool(expected) == (not outbox.is_empty)
    frame = outbox.take()
    assert outbox.is_empty
    if frame.tokens is None:
        assert not expected
        return
    tokens = frame.tokens
    ids = tokens.token_ids.tolist()
    ends = np.cumsum(tokens.counts)
    keys = list(zip(tokens.handles.tolist(), tokens.indexes.tolist(), strict=True))
    merged = {
        key: ids[end - count : end]
        for key, end, count in zip(keys, ends.tolist(), tokens.counts.tolist(), strict=True)
    }
    assert merged == expected
    with_logprobs = {
        i
        for key, end, count in zip(keys, ends.tolist(), tokens.counts.tolist(), strict=True)
        for i in range(end - count, end)
        if key[1] == 1
    }
    assert set(tokens.logprobs) == with_logprobs
    assert all(tokens.logprobs[i] == ids[i] for i in with_logprobs)
