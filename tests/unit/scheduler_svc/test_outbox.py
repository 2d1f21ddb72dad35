"""Frames: one entry a sequence, tokens in the order of their steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler.outbox import Outbox, StartedNote
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


def test_a_start_travels_with_what_comes_next() -> None:
    """A frame of its own would make the first token wait for the next flush."""
    calls: list[None] = []
    outbox = Outbox(lambda: calls.append(None))
    note = StartedNote(1, 0, 16, 3)
    outbox.started(note)
    assert not calls
    assert not outbox.is_empty
    ids = np.array([7], np.uint32)
    handle, index = np.array([1], np.uint64), np.array([0], np.uint32)
    outbox.push(TokenColumns(np.ones(1, np.int64), handle, index, ids, {}))
    assert len(calls) == 1
    frame = outbox.take()
    assert frame.started == [note]
    assert frame.tokens is not None
