"""A tenant's meter by a clock of the test's own, dealt to by a store in memory."""

import asyncio

import pytest

from octavo.errors import RateLimitError
from octavo_router.buckets import DealRequest, MemoryBuckets, MemoryStore
from octavo_router.meter import STALE_S, Charge, Meter, format_duration
from octavo_router.quota import Quota


class Bench:
    """Meters of one tenant in several routers, on one clock."""

    def __init__(self, quota: Quota, num_routers: int = 1) -> None:
        self.now = 1000.0
        self.num_news = 0
        store = MemoryStore(lambda: self.now)
        self._stores = [MemoryBuckets(store, f"r{index}") for index in range(num_routers)]
        self.meters = [
            Meter("acme", quota, lambda: self.now, self._on_news) for _ in range(num_routers)
        ]

    def _on_news(self) -> None:
        self.num_news += 1

    def deal(self, *indices: int) -> None:
        """For all routers in turn, or for some."""
        for index in indices or range(len(self.meters)):
            meter = self.meters[index]
            needs = meter.needs(self.now)
            request = DealRequest("acme", needs, meter.num_routers, False)
            (deal,) = asyncio.run(self._stores[index].deal([request]))
            assert deal is not None
            meter.apply(needs, deal)

    def begin_all(self, index: int = 0) -> list[Charge]:
        """As many requests as are let in."""
        charges: list[Charge] = []
        while True:
            try:
                charges.append(self.meters[index].begin())
            except RateLimitError:
                return charges


def refusal(meter: Meter) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        meter.begin()
    return caught.value


def test_one_router_gives_the_whole_quota_and_then_what_refills() -> None:
    bench = Bench(Quota(requests=60))
    bench.deal()
    assert len(bench.begin_all()) == 60
    error = refusal(bench.meters[0])
    assert error.retry_after_ms == 1000
    assert "60 per minute" in error.message
    bench.now += 10
    bench.deal()
    assert len(bench.begin_all()) == 10
    bench.now += 600
    bench.deal()
    assert len(bench.begin_all()) == 60


def test_before_the_first_deal_there_is_a_slice_that_the_deal_then_counts() -> None:
    bench = Bench(Quota(requests=60))
    assert len(bench.begin_all()) == 6
    bench.deal()
    assert len(bench.begin_all()) == 54
    assert len(Bench(Quota(requests=1)).begin_all()) == 1


def test_routers_share_one_quota() -> None:
    bench = Bench(Quota(requests=90), num_routers=3)
    bench.deal()
    bench.deal()
    bench.deal()
    let_in = [len(bench.begin_all(index)) for index in range(3)]
    assert sum(let_in) <= 90
    assert min(let_in) >= 15
    # What idle ones hold melts down to the busy one.
    for _ in range(12):
        bench.deal()
        bench.begin_all(0)
    assert bench.meters[0].headers()["x-ratelimit-remaining-requests"] == "0"


def test_a_router_that_joins_may_borrow_a_little_of_what_others_hold() -> None:
    bench = Bench(Quota(requests=100), num_routers=2)
    bench.deal(0)
    bench.deal(1)
    let_in = len(bench.begin_all(1))
    for _ in range(5):
        # Once: until the other gives back, it may spend all that it holds.
        bench.deal(1)
        let_in += len(bench.begin_all(1))
    assert 1 <= let_in <= 10
    bench.deal(0)
    bench.deal(1)
    assert let_in + len(bench.begin_all(0)) + len(bench.begin_all(1)) <= 100


def test_lost_answers_change_nothing() -> None:
    bench = Bench(Quota(requests=60))
    bench.deal()
    meter = bench.meters[0]
    for _ in range(5):
        meter.begin()
        # Executed, but the answer never came.
        request = DealRequest("acme", meter.needs(bench.now), 1, False)
        asyncio.run(bench._stores[0].deal([request]))
    bench.deal()
    assert len(bench.begin_all()) == 55


def test_tokens_are_taken_corrected_and_may_owe_one_request() -> None:
    bench = Bench(Quota(tokens=1000))
    bench.deal()
    meter = bench.meters[0]
    first = meter.begin()
    first.take_tokens(800)
    second = meter.begin()
    # Not all of it is there: it is let in and owes the rest.
    second.take_tokens(500)
    error = refusal(meter)
    assert error.retry_after_ms == pytest.approx(300 / 1000 * 60_000)
    bench.deal()
    first.settle(100)
    bench.deal()
    assert meter.headers()["x-ratelimit-remaining-tokens"] == "400"
    first.settle(5000)
    second.settle(550)
    bench.deal()
    assert meter.headers()["x-ratelimit-remaining-tokens"] == "350"


def test_a_request_that_never_fits_is_told_so() -> None:
    bench = Bench(Quota(requests=5, tokens=1000))
    bench.deal()
    charge = bench.meters[0].begin()
    with pytest.raises(RateLimitError, match="needs 1001 tokens") as caught:
        charge.take_tokens(1001)
    assert caught.value.retry_after_ms is None
    charge.cancel()
    assert len(bench.begin_all()) == 5


def test_a_cancelled_charge_gives_everything_back_once() -> None:
    bench = Bench(Quota(requests=2, tokens=100))
    bench.deal()
    charge = bench.meters[0].begin()
    charge.take_tokens(60)
    charge.cancel()
    charge.cancel()
    charge.settle(99)
    headers = bench.meters[0].headers()
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert headers["x-ratelimit-remaining-tokens"] == "100"


def test_while_the_store_is_away_each_router_goes_on_with_its_part() -> None:
    bench = Bench(Quota(requests=60), num_routers=2)
    for _ in range(4):
        bench.deal()
    before = len(bench.begin_all(0)) + len(bench.begin_all(1))
    assert before <= 60
    bench.now += STALE_S
    assert [len(bench.begin_all(index)) for index in (0, 1)] == [0, 0]
    let_in = [0, 0]
    for _ in range(60):
        bench.now += 1
        for index in (0, 1):
            let_in[index] += len(bench.begin_all(index))
    # A minute's quota over both, in a minute.
    assert [29 <= count <= 30 for count in let_in] == [True, True]
    bench.now += 3600
    assert [len(bench.begin_all(index)) for index in (0, 1)] == [30, 30]
    # Back again: no more than a bucket holds.
    for _ in range(4):
        bench.deal()
    assert len(bench.begin_all(0)) + len(bench.begin_all(1)) <= 60


def test_headers_as_openai_has_them() -> None:
    bench = Bench(Quota(requests=60, tokens=600_000))
    bench.deal()
    bench.meters[0].begin().take_tokens(60_000)
    assert bench.meters[0].headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600000",
        "x-ratelimit-remaining-tokens": "540000",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert set(Bench(Quota(tokens=5)).meters[0].headers()) == {
        f"x-ratelimit-{part}-tokens" for part in ("limit", "remaining", "reset")
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (7.66, "7.66s"), (59.5, "59.5s"), (360, "6m0s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_news_are_told_once_per_deal() -> None:
    bench = Bench(Quota(requests=60))
    bench.deal()
    for _ in range(5):
        bench.meters[0].begin()
    assert bench.num_news == 1
    bench.deal()
    assert bench.meters[0].news_since is None
    bench.meters[0].begin()
    assert bench.num_news == 2
