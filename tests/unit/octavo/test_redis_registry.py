"""The registry's default intervals keep what the design promises of them."""

from octavo.redis_registry import RegistryTiming

DEFAULT = RegistryTiming()


def test_state_is_written_again_within_five_seconds_of_redis_return() -> None:
    link = DEFAULT.link
    # An attempt that began just before the return, its pause, one more attempt, and for a
    # Redis that came back empty a renewal that finds nothing.
    longest_s = 2 * link.call_s + link.max_pause_s + 2 * DEFAULT.write_s
    assert longest_s <= 5
    assert DEFAULT.renew_s + 2 * DEFAULT.write_s + link.call_s <= 5


def test_a_lease_survives_a_lost_renewal() -> None:
    lost_s = DEFAULT.link.call_s + DEFAULT.link.min_pause_s
    assert DEFAULT.renew_s + lost_s + DEFAULT.write_s < DEFAULT.lease.record_s
    assert DEFAULT.lease.record_s == 3.0
    assert DEFAULT.renew_s == 1.0
    assert DEFAULT.lease.record_s < DEFAULT.lease.filter_s <= 30.0 < DEFAULT.lease.member_s


def test_redis_is_spoken_to_seldom() -> None:
    assert 0.05 <= DEFAULT.write_s <= 0.1
    assert DEFAULT.read_s >= 0.5
    assert DEFAULT.read_filters_s >= 2.0
