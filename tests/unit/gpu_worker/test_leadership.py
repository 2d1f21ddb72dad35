"""Leadership: one leader, epochs that only grow, silence, release; whatever the order."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.errors import FailedPreconditionError
from octavo_worker.leadership import Leadership, Seat

SILENCE_S = 3.0


def led(leader_id: str = "a", now: float = 0.0) -> Leadership:
    leadership = Leadership("boot", SILENCE_S)
    epoch = leadership.attach(leader_id, leadership.epoch, now)
    leadership.open_stream("boot", epoch, now)
    return leadership


def test_the_first_attach_begins_epoch_one() -> None:
    leadership = Leadership("boot", SILENCE_S)
    assert (leadership.epoch, leadership.leader_id, leadership.seat) == (0, "", Seat.EMPTY)
    assert leadership.attach("a", 0, 0.0) == 1
    assert (leadership.leader_id, leadership.seat) == ("a", Seat.ATTACHED)
    leadership.open_stream("boot", 1, 0.5)
    assert leadership.seat is Seat.LIVE


@pytest.mark.parametrize("scheduler_id", ["a", "b"])
def test_a_live_leader_is_not_replaced(scheduler_id: str) -> None:
    leadership = led()
    with pytest.raises(FailedPreconditionError, match="led by 'a' in epoch 1"):
        leadership.attach(scheduler_id, 1, 2.9)
    assert (leadership.epoch, leadership.leader_id) == (1, "a")


def test_a_silent_leader_is() -> None:
    leadership = led()
    leadership.hear(1, 2.0)
    with pytest.raises(FailedPreconditionError, match="led by"):
        leadership.attach("b", 1, 4.9)
    assert leadership.attach("b", 1, 5.1) == 2
    with pytest.raises(FailedPreconditionError, match="epoch 1 is not led any more"):
        leadership.open_stream("boot", 1, 5.2)
    # What the old one still sends or ends means nothing.
    leadership.hear(1, 100.0)
    leadership.close_stream(1)
    assert (leadership.seat, leadership.leader_id) == (Seat.ATTACHED, "b")
    assert leadership.attach("c", 2, 9.0) == 3


def test_a_broken_stream_frees_the_seat_at_once() -> None:
    leadership = led()
    leadership.close_stream(1)
    assert (leadership.seat, leadership.leader_id) == (Seat.EMPTY, "")
    with pytest.raises(FailedPreconditionError, match="attach again"):
        leadership.open_stream("boot", 1, 0.1)
    assert leadership.attach("b", 1, 0.1) == 2


def test_an_attach_without_its_stream_yet_holds_against_others_only() -> None:
    leadership = Leadership("boot", SILENCE_S)
    leadership.attach("a", 0, 0.0)
    with pytest.raises(FailedPreconditionError, match="led by 'a'"):
        leadership.attach("b", 1, 1.0)
    assert leadership.attach("a", 1, 1.0) == 2
    assert leadership.attach("b", 2, 4.1) == 3


def test_the_expected_epoch_must_be_the_current_one() -> None:
    leadership = Leadership("boot", SILENCE_S)
    with pytest.raises(FailedPreconditionError, match=r"expected_epoch is 1, but .* epoch is 0"):
        leadership.attach("a", 1, 0.0)
    assert leadership.epoch == 0


def test_a_leader_has_a_name() -> None:
    with pytest.raises(FailedPreconditionError, match="scheduler_id is empty"):
        Leadership("boot", SILENCE_S).attach("", 0, 0.0)


def test_streams_of_another_boot_or_a_second_one_are_refused() -> None:
    leadership = led()
    with pytest.raises(FailedPreconditionError, match="boot_id is 'other'"):
        leadership.open_stream("other", 1, 0.0)
    with pytest.raises(FailedPreconditionError, match="has a live stream already"):
        leadership.open_stream("boot", 1, 0.0)


def test_no_stream_before_any_attach() -> None:
    with pytest.raises(FailedPreconditionError, match="attach again"):
        Leadership("boot", SILENCE_S).open_stream("boot", 0, 0.0)


class LeadershipMachine(RuleBasedStateMachine):
    """Schedulers that attach, stream, fall silent and break, in any order.

    The model: who may send, and since when the worker has heard nothing from it.
    """

    @initialize()
    def start(self) -> None:
        self.leadership = Leadership("boot", SILENCE_S)
        self.now = 0.0
        self.epochs = [0]
        self.live_epoch: int | None = None
        self.heard_at = 0.0

    @rule(seconds=st.floats(0.0, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(scheduler_id=st.sampled_from("abc"), lag=st.integers(0, 2))
    def attach(self, scheduler_id: str, lag: int) -> None:
        leadership = self.leadership
        expected = leadership.epoch - lag
        is_silent = self.now - self.heard_at > SILENCE_S
        must_refuse = lag > 0 or (self.live_epoch is not None and not is_silent)
        try:
            epoch = leadership.attach(scheduler_id, expected, self.now)
        except FailedPreconditionError:
            holds = leadership.seat is Seat.ATTACHED and scheduler_id != leadership.leader_id
            assert must_refuse or (holds and not is_silent)
            return
        assert not must_refuse
        self.epochs.append(epoch)
        self.live_epoch, self.heard_at = None, self.now

    @rule(lag=st.integers(0, 2))
    def open_stream(self, lag: int) -> None:
        leadership = self.leadership
        epoch = leadership.epoch - lag
        can_open = lag == 0 and leadership.seat is Seat.ATTACHED
        try:
            leadership.open_stream("boot", epoch, self.now)
        except FailedPreconditionError:
            assert not can_open
            return
        assert can_open
        self.live_epoch, self.heard_at = epoch, self.now

    @rule(lag=st.integers(0, 2))
    def hear(self, lag: int) -> None:
        epoch = self.leadership.epoch - lag
        self.leadership.hear(epoch, self.now)
        if lag == 0:
            self.heard_at = self.now

    @rule(lag=st.integers(0, 2))
    def close_stream(self, lag: int) -> None:
        epoch = self.leadership.epoch - lag
        self.leadership.close_stream(epoch)
        if epoch == self.live_epoch:
            self.live_epoch = None

    @invariant()
    def epochs_count_up(self) -> None:
        assert self.epochs == list(range(len(self.epochs)))
        assert self.leadership.epoch == self.epochs[-1]

    @invariant()
    def at_most_the_newest_epoch_is_live(self) -> None:
        leadership = self.leadership
        is_live = leadership.seat is Seat.LIVE
        assert is_live == (self.live_epoch is not None)
        assert not is_live or self.live_epoch == leadership.epoch
        assert (leadership.leader_id == "") == (leadership.seat is Seat.EMPTY)


TestLeadershipMachine = LeadershipMachine.TestCase
