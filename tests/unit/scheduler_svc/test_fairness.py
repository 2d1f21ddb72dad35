"""Shares of tenants: by weight, nothing saved up, nothing remembered for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigurationError
from octavo_scheduler.fairness import BURST_TOKENS, Shares, parse_weights


def served(shares: Shares, backlogged: list[str], num_rounds: int, tokens: int) -> dict[str, int]:
    """Serve whoever is least advanced, `num_rounds` times."""
    totals = dict.fromkeys(backlogged, 0)
    for _ in range(num_rounds):
        tenant = min(backlogged, key=shares.time)
        shares.serve(tenant, tokens)
        totals[tenant] += tokens
    return totals


def test_backlogged_tenants_are_served_by_weight() -> None:
    shares = Shares({"gold": 3.0})
    totals = served(shares, ["gold", "plain"], 400, 100)
    assert totals["gold"] == pytest.approx(3 * totals["plain"], rel=0.02)


def test_who_was_away_has_saved_a_burst_and_no_more() -> None:
    shares = Shares({"late": 2.0})
    served(shares, ["busy"], 10_000, 1000)
    first = served(shares, ["busy", "late"], 2 * BURST_TOKENS // 1000, 1000)
    assert first["late"] >= 2 * BURST_TOKENS - 2000
    then = served(shares, ["busy", "late"], 300, 1000)
    assert abs(2 * then["busy"] - then["late"]) <= 3000


def test_corrections_count() -> None:
    shares = Shares()
    shares.serve("a", 100)
    shares.serve("b", 100)
    shares.correct("a", 50)
    assert shares.time("a") > shares.time("b")
    shares.correct("a", -100)
    assert shares.time("a") < shares.time("b")


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1000)), max_size=300))
def test_the_present_never_goes_back(steps: list[tuple[int, int]]) -> None:
    shares = Shares()
    last = shares.time("nobody")
    for tenant, tokens in steps:
        shares.serve(str(tenant), tokens)
        assert shares.time("nobody") >= last
        last = shares.time("nobody")


def test_memory_is_bounded_however_many_tenants_come() -> None:
    shares = Shares()
    for i in range(10_000):
        shares.serve(f"tenant-{i}", 10_000 - i)
    assert len(shares._times) <= 1025


def test_weights_are_read_and_checked() -> None:
    assert parse_weights(["a=2", "team=x=0.5"]) == {"a": 2.0, "team=x": 0.5}
    for wrong in ("a", "a=", "=1", "a=0", "a=-1", "a=inf", "a=nan", "a=b"):
        with pytest.raises(ConfigurationError, match="tenant=weight"):
            parse_weights([wrong])
