"""The queue's order and bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ContextLengthError, OverloadedError
from octavo_scheduler.admission import AdmissionQueue, QueueFullError, QueueLimits, check_fits
from octavo_scheduler.fairness import Shares
from octavo_scheduler.outlook import Outlook
from octavo_scheduler.sequence import Request, Sequence, Submission, make_sequences


def sequence(
    serial: int, priority: int = 0, length: int = 10, tenant: str = "", arrival: float = 0.0
) -> Sequence:
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
        tenant=tenant,
    )
    request = Request(submission, 1, serial, arrival, None, length)
    request.sequences = make_sequences(request, 16)
    return request.sequences[0]


def rate(tokens_per_s: float) -> Outlook:
    """Of prompts that all workers together compute."""
    return Outlook(tokens_per_s=tokens_per_s)


def queue_of(max_tokens: int) -> AdmissionQueue:
    return AdmissionQueue(QueueLimits(max_tokens), Shares())


Item = tuple[int, bool, bool]  # priority, came back, is removed


@given(items=st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.booleans()), max_size=30))
def test_order_is_priority_then_came_back_then_age(items: list[Item]) -> None:
    queue = queue_of(10_000)
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
    queue = queue_of(1000)
    for serial in range(5):
        queue.push(sequence(serial))
    served: list[int] = []
    for one in queue.candidates(4):
        served.append(one.request.serial)
        queue.remove(one)
    assert served == [0, 1, 2, 3]
    assert len(queue) == 1


def test_full_queue_says_when_to_retry() -> None:
    queue = queue_of(100)
    queue.check_room(500, Outlook())  # an empty queue takes anything that fits a worker
    queue.push(sequence(0, length=90))
    queue.check_room(10, Outlook())
    with pytest.raises(OverloadedError) as caught:
        queue.check_room(1010, rate(500.0))
    assert caught.value.retry_after_ms == 2000
    for number in ("90", "1010", "100"):
        assert number in caught.value.message
    # A smaller one would fit; beside 100 tokens nothing would.
    assert not isinstance(caught.value, QueueFullError)
    queue.push(sequence(1, length=10))
    with pytest.raises(QueueFullError):
        queue.check_room(1010, rate(500.0))


def test_never_fitting_names_what_to_change() -> None:
    check_fits(100, 28, 128)
    with pytest.raises(ContextLengthError) as caught:
        check_fits(100, 29, 128)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthError) as caught:
        check_fits(200, 1, 128)
    assert caught.value.param == "prompt"


def test_a_wait_is_bounded_by_how_fast_the_queue_drains() -> None:
    now = 0.0
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=8.0), Shares(), lambda: now)
    for serial in range(100):
        queue.push(sequence(serial, length=100))
    # 10,000 tokens at 2,000 a second; 2 s are kept for what is not foreseen.
    assert queue.check_room(100, rate(2000.0)) == 5.0
    with pytest.raises(OverloadedError, match=r"takes 10\.0 s and, as it went lately") as caught:
        queue.check_room(100, rate(1000.0))
    assert caught.value.retry_after_ms == 4000
    # It is seen to drain at 500 a second: what others assume doesn't matter any more.
    for one in list(queue.candidates(60)):
        now += 0.2
        queue.serve(one, 100)
    with pytest.raises(OverloadedError, match="that takes 8"):
        queue.check_room(100, rate(10**9))


def test_rows_that_end_together_are_waited_for() -> None:
    """What was measured says 10 sequences a second; but 4 at once, and then none for 0.4 s."""
    now = 0.0
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=1.0), Shares(), lambda: now)
    for serial in range(24):
        queue.push(sequence(serial, length=100))
    for _ in range(5):
        now += 0.4
        for one in list(queue.candidates(4)):
            queue.serve(one, 100)
    just_begun, about_to_end = (Outlook(left=np.full(4, share)) for share in (1.0, 0.05))
    expected_s = queue.check_room(100, about_to_end)
    assert expected_s == pytest.approx(0.4, rel=0.3)
    with pytest.raises(OverloadedError):
        queue.check_room(100, just_begun)


def test_a_usual_prompts_own_time_is_left_and_long_ones_are_let_in_like_others() -> None:
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=8.0), Shares())
    outlook = Outlook(tokens_per_s=1000.0, worker_token_s=0.001)
    for serial in range(5):
        queue.push(sequence(serial, length=1000))
    # 5 s and 1 s for itself, where 2 s of the bound are kept.
    assert queue.check_room(100, outlook) == pytest.approx(5.1)
    assert queue.check_room(50_000, outlook) == pytest.approx(55.0)
    queue.push(sequence(5, length=1000))
    for num_tokens in (100, 50_000):
        with pytest.raises(OverloadedError):
            queue.check_room(num_tokens, outlook)


def test_where_all_prompts_are_long_some_are_let_in() -> None:
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=8.0), Shares())
    queue.push(sequence(0, length=50_000))
    queue.check_room(50_000, Outlook(tokens_per_s=15_000.0, worker_token_s=0.001))


def answered(serial: int, arrival: float, expected_s: float | None, priority: int = 0) -> Sequence:
    """One that was let in, as its first token is drawn."""
    one = sequence(serial, priority, arrival=arrival)
    one.request.expected_ttft_s = expected_s
    return one


def test_waits_that_are_longer_than_expected_leave_less_room() -> None:
    now = 100.0
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=8.0), Shares(), lambda: now)
    queue.push(sequence(0, length=5000))
    for serial in range(20):
        queue.note_answered(answered(serial, now - 9.0, 6.0))
    with pytest.raises(OverloadedError, match=r"up to 3\.0 s more"):
        queue.check_room(100, rate(970.0))
    queue.check_room(100, rate(1030.0))
    # Lower priorities are passed by others: their errors are their own.
    queue.check_room(100, rate(900.0), priority=-1)


def test_waits_as_expected_give_the_whole_bound() -> None:
    now = 100.0
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=8.0), Shares(), lambda: now)
    queue.push(sequence(0, length=7900))
    with pytest.raises(OverloadedError):
        queue.check_room(100, rate(1000.0))
    for serial in range(1000):
        now += 0.1
        queue.note_answered(answered(serial, now - 6.0, 6.0))
    queue.check_room(100, rate(1000.0))


def test_what_teaches_nothing_about_long_waits() -> None:
    """Short waits, requests that waited for nothing, and those whose worker died."""
    now = 100.0
    queue = AdmissionQueue(QueueLimits(10**9, max_wait_s=8.0), Shares(), lambda: now)
    moved = answered(0, now - 20.0, 6.0)
    moved.num_moves = 1
    for one in (answered(1, now - 20.0, None), answered(2, now - 20.0, 1.0), moved):
        queue.note_answered(one)
    queue.push(sequence(3, length=5900))
    queue.check_room(100, rate(1000.0))
    AdmissionQueue(QueueLimits(10**9), Shares()).note_answered(answered(4, 0.0, 6.0))


def flooded(weights: dict[str, float] | None = None) -> AdmissionQueue:
    """Tenant "a" holds 900 of 1,000 tokens."""
    queue = AdmissionQueue(QueueLimits(1000), Shares(weights))
    for serial in range(90):
        queue.push(sequence(serial, tenant="a"))
    return queue


def test_a_prompt_that_passed_others_doesnt_make_their_wait_endless() -> None:
    """While a long prompt is computed, a short one passes the queue behind it."""
    now = 0.0
    limits = QueueLimits(10**9, max_wait_s=30.0)
    queue = AdmissionQueue(limits, Shares(), lambda: now)
    short = sequence(2, length=2)
    queue.push(sequence(1, length=6000))
    queue.push(short)
    now = 1.0
    queue.serve(short, 2)
    queue.check_room(500, rate(10_000.0))
    queue.push(sequence(3, length=500, tenant="other"))
    queue.check_room(500, rate(10_000.0))
    queue.check_room(500, rate(10_000.0), tenant="other")


def test_who_floods_the_queue_is_refused_and_others_are_not() -> None:
    queue = flooded()
    with pytest.raises(OverloadedError):
        queue.check_room(110, rate(1000.0), tenant="a")
    queue.check_room(110, rate(1000.0), tenant="b")
    # Beyond its share it is refused too: 510 of its own, and as many of the other's before.
    with pytest.raises(OverloadedError):
        queue.check_room(510, rate(1000.0), tenant="b")
    flooded({"b": 4.0}).check_room(510, rate(1000.0), tenant="b")


def test_higher_priorities_see_only_what_goes_before_them() -> None:
    queue = flooded()
    queue.check_room(900, rate(1000.0), tenant="a", priority=1)
    with pytest.raises(OverloadedError):
        queue.check_room(110, rate(1000.0), tenant="b", priority=-1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=40),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 3.0]), max_size=3),
)
def test_service_is_fair_and_keeps_each_tenants_order(
    items: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    shares = Shares(weights)
    queue = AdmissionQueue(QueueLimits(10**6), shares)
    for serial, (tenant, length) in enumerate(items):
        queue.push(sequence(serial, length=length, tenant=tenant))
    foreseen = list(queue.candidates(len(items)))
    order: list[Sequence] = []
    got = dict.fromkeys("abc", 0.0)
    while len(queue):
        waiting = {s.request.submission.tenant for s in queue.sequences()}
        (first,) = queue.candidates(1)
        tenant = first.request.submission.tenant
        # Among those that wait, nobody was served less for its weight.
        assert all(got[tenant] <= got[other] + 1e-9 for other in waiting)
        queue.serve(first, first.queue_tokens)
        got[tenant] += first.queue_tokens / shares.weight(tenant)
        order.append(first)
    assert order == foreseen
    for tenant in "abc":
        serials = [s.request.serial for s in order if s.request.submission.tenant == tenant]
        assert serials == sorted(serials)


def test_waiting_raises_the_priority() -> None:
    now = 0.0
    queue = AdmissionQueue(QueueLimits(1000, ageing_s=10.0), Shares(), lambda: now)
    old = sequence(0, priority=-2)
    queue.push(old)
    now = 19.0
    new = sequence(1, priority=0, arrival=now)
    queue.push(new)
    assert list(queue.candidates(2)) == [new, old]
    now = 20.0
    assert list(queue.candidates(2)) == [old, new]
    # Those who came back of a level still go before its fresh ones.
    back = sequence(2, priority=0, arrival=now)
    queue.push_front(back)
    assert list(queue.candidates(3)) == [old, back, new]


def test_an_end_corrects_what_was_charged() -> None:
    shares = Shares()
    queue = AdmissionQueue(QueueLimits(1000), shares)
    one = sequence(0, tenant="a")
    one.expected_output = 40
    before = shares.time("a")
    queue.push(one)
    queue.serve(one, 10)
    assert (shares.time("a") - before, one.charged_output) == (50.0, 40)
    # One that comes back was charged before.
    queue.push_front(one)
    queue.serve(one, 10)
    assert shares.time("a") - before == 50.0
