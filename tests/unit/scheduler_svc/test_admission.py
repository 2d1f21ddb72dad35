"""The queue's order and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ContextLengthError, OverloadedError
from octavo_scheduler.admission import AdmissionQueue, check_fits
from octavo_scheduler.sequence import Request, Sequence, Submission, make_sequences


def sequence(serial: int, priority: int = 0, length: int = 10) -> Sequence:
    submission = Submission(
        handle=serial,
        request_id="",
        prompt_token_ids=bytes(4 * length),
        root_hash=bytes(16),
        block_hashes=(),
        sampling=b"",
        max_tokens=5,
        min_tokens=0,
        ending_ids=frozenset(),
        priority=priority,
    )
    request = Request(submission, 1, serial, 0.0, None, length)
    request.sequences = make_sequences(request, 16)
    return request.sequences[0]


Item = tuple[int, bool, bool]  # priority, came back, is removed


@given(items=st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.booleans()), max_size=30))
def test_order_is_priority_then_came_back_then_age(items: list[Item]) -> None:
    queue = AdmissionQueue(10_000)
    sequences = [sequence(serial, priority) for serial, (priority, _, _) in enumerate(items)]
    for one, (_, came_back, _) in zip(sequences, items, strict=True):
        if not came_back:
            queue.push(one)
    # Whoever comes back last may be the oldest.
    for one, (_, came_back, _) in reversed(list(zip(sequences, items, strict=True))):
        if came_back:
            queue.push_front(one)
    for one, (_, _, is_removed) in zip(sequences, items, strict=True):
        if is_removed:
            queue.remove(one)
    kept = [i for i, item in enumerate(items) if not item[2]]
    expected = sorted(kept, key=lambda i: (-items[i][0], not items[i][1], i))
    assert list(queue.candidates(100)) == [sequences[i] for i in expected]
    assert list(queue.candidates(3)) == [sequences[i] for i in expected[:3]]
    assert len(queue) == len(kept)
    assert queue.num_tokens == 10 * len(kept)


def test_candidates_may_be_removed_meanwhile() -> None:
    queue = AdmissionQueue(1000)
    for serial in range(5):
        queue.push(sequence(serial))
    served: list[int] = []
    for one in queue.candidates(4):
        served.append(one.request.serial)
        queue.remove(one)
    assert served == [0, 1, 2, 3]
    assert len(queue) == 1


def test_full_queue_says_when_to_retry() -> None:
    queue = AdmissionQueue(100)
    queue.check_room(500, 0.0)  # an empty queue takes anything that fits a worker
    queue.push(sequence(0, length=90))
    queue.check_room(10, 0.0)
    with pytest.raises(OverloadedError) as caught:
        queue.check_room(1010, 500.0)
    assert caught.value.retry_after_ms == 2000
    for number in ("90", "1010", "100"):
        assert number in caught.value.message


def test_never_fitting_names_what_to_change() -> None:
    check_fits(100, 28, 128)
    with pytest.raises(ContextLengthError) as caught:
        check_fits(100, 29, 128)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthError) as caught:
        check_fits(200, 1, 128)
    assert caught.value.param == "prompt"
