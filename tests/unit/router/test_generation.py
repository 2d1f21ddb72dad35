"""Ids to deltas: what is shown, counted and cut, however the ids and the end arrive."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from octavo.blocks import HASH_VERSION
from octavo.cancel_reason import CancelReason
from octavo.errors import CancelledError, DeadlineError, OctavoError, UnavailableError
from octavo.metrics import RouterMetrics
from octavo_router.flights import Finish, Flight, Inbox, PromptOrder, ResolvedSampling, TokenLogprob
from octavo_router.generation import MAX_IDS_PER_TURN, Delta, Generation
from octavo_router.outcomes import RequestRecord
from octavo_router.requests import Endpoint
from octavo_router.served_model import ServedModel
from tests.fakes.byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer

MODEL = ServedModel("m", "r", 16, "fp32", HASH_VERSION, 1000, VOCAB_SIZE, (EOS,))
PROMPT = np.arange(3, dtype=np.uint32)


class Carrier:
    """Notes what was cancelled."""

    def __init__(self) -> None:
        self.cancels: list[tuple[int | None, CancelReason, int]] = []

    def cancel(
        self, flight: Flight, index: int | None, reason: CancelReason, num_kept: int
    ) -> None:
        assert flight.carrier is self
        self.cancels.append((index, reason, num_kept))


class Bench:
    """A generation of one flight, fed by hand."""

    def __init__(self, n: int = 1, stop: tuple[str, ...] = (), **options: Any) -> None:
        sampling = ResolvedSampling(1.0, 1.0, 0, 0.0, 7, 100, (EOS, ord(";")), None)
        order = PromptOrder(
            request_id="r",
            token_ids=PROMPT,
            model=MODEL,
            hashes=MODEL.hash_prompt(PROMPT, None),
            hash_salt=None,
            sampling=sampling,
            num_sequences=n,
            tenant="",
            deadline=None,
        )
        inbox = Inbox()
        self.metrics = RouterMetrics(CollectorRegistry())
        self.flight = Flight(order, inbox, is_quiet=options.get("is_quiet", False))
        self.carrier = Carrier()
        self.flight.carrier = self.carrier
        record = RequestRecord(self.metrics, Endpoint.COMPLETIONS)
        self.generation = Generation(
            [self.flight], inbox, ByteTokenizer(), stop, record, options.get("deadline")
        )

    async def news(self) -> list[Delta]:
        async with asyncio.timeout(5):
            return await self.generation.news()

    def outcome(self) -> str:
        (sample,) = [
            s
            for family in self.metrics.registry.collect()
            for s in family.samples
            if s.name == "octavo_requests_total" and s.value
        ]
        assert sample.value == 1
        return sample.labels["outcome"]


def run(check: Callable[[], Any]) -> None:
    asyncio.run(check())


def test_the_ending_id_may_come_before_its_finish() -> None:
    async def check() -> None:
        bench = Bench()
        bench.flight.deliver(0, [97, EOS])
        (first,) = await bench.news()
        assert (first.text, list(first.token_ids), first.finish) == ("a", [97], None)
        bench.flight.finish(0, Finish.STOP)
        (last,) = await bench.news()
        assert (last.text, list(last.token_ids), last.finish) == ("", [EOS], Finish.STOP)
        assert bench.generation.usage() == (3, 2, 0)
        assert bench.outcome() == "stop"
        assert bench.carrier.cancels == []

    run(check)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 255).filter(lambda i: i != ord(";")), max_size=30), st.data())
def test_any_split_gives_the_whole_text(ids: list[int], data: st.DataObject) -> None:
    async def check() -> None:
        bench = Bench()
        ending = data.draw(st.sampled_from([[], [EOS], [ord(";")]]))
        rest, texts, seen = [*ids, *ending], "", []
        while rest:
            count = data.draw(st.integers(1, len(rest)))
            bench.flight.deliver(0, rest[:count])
            rest = rest[count:]
            if data.draw(st.booleans()):
                for delta in await bench.news():
                    texts += delta.text
                    seen += delta.token_ids
        bench.flight.finish(0, Finish.STOP if ending else Finish.LENGTH)
        while not bench.generation.is_finished:
            for delta in await bench.news():
                texts += delta.text
                seen += delta.token_ids
        assert texts == bytes(ids).decode("utf-8", "replace")
        assert seen == [*ids, *ending]

    run(check)


def test_a_stop_cuts_everything_and_is_told() -> None:
    async def check() -> None:
        bench = Bench(n=2, stop=("bc",))
        logprobs = [TokenLogprob(-float(i), ()) for i in range(5)]
        bench.flight.deliver_logprobs(1, logprobs)
        bench.flight.deliver(1, [*b"abcde"])
        (delta,) = await bench.news()
        assert (delta.choice, delta.text, delta.finish) == (1, "a", Finish.STOP)
        assert list(delta.token_ids) == [*b"abc"]
        assert delta.logprobs == logprobs[:3]
        assert bench.carrier.cancels == [(1, CancelReason.STOP, 3)]
        # What was under way is dropped.
        bench.flight.deliver(1, [*b"xyz"])
        bench.flight.finish(1, Finish.LENGTH)
        bench.flight.finish(0, Finish.LENGTH)
        deltas = await bench.news()
        assert [(d.choice, d.finish) for d in deltas] == [(0, Finish.LENGTH)]
        assert bench.generation.usage().completion_tokens == 3
        assert bench.generation.is_finished
        assert bench.outcome() == "length"

    run(check)


def test_a_stop_in_the_last_frame_needs_no_cancel() -> None:
    async def check() -> None:
        bench = Bench(stop=("b",))
        bench.flight.deliver(0, [*b"abc"])
        bench.flight.finish(0, Finish.LENGTH)
        (delta,) = await bench.news()
        assert (delta.text, delta.finish) == ("a", Finish.STOP)
        assert bench.generation.usage().completion_tokens == 2
        assert bench.carrier.cancels == []

    run(check)


def test_several_frames_are_one_delta() -> None:
    async def check() -> None:
        bench = Bench(n=2)
        for index, data in [(0, b"a"), (1, b"x"), (0, b"b"), (0, b"c")]:
            bench.flight.deliver(index, [*data])
        assert [(d.choice, d.text) for d in await bench.news()] == [(0, "abc"), (1, "x")]

    run(check)


def test_a_quiet_flight_wakes_for_the_first_ids_and_the_end() -> None:
    async def check() -> None:
        bench = Bench(is_quiet=True)
        bench.flight.deliver(0, [97])
        assert [d.text for d in await bench.news()] == ["a"]
        waiting = asyncio.create_task(bench.news())
        await asyncio.sleep(0)
        bench.flight.deliver(0, [98])
        await asyncio.sleep(0.01)
        assert not waiting.done()
        bench.flight.finish(0, Finish.LENGTH)
        assert [(d.text, d.finish) for d in await waiting] == [("b", Finish.LENGTH)]

    run(check)


@pytest.mark.parametrize(
    ("end", "error", "outcome", "reason"),
    [
        (lambda b: b.generation.cancel(), CancelledError, "cancelled", CancelReason.CLIENT),
        (lambda b: b.flight.fail(OctavoError("x")), OctavoError, "error", None),
        (lambda b: b.flight.fail(UnavailableError("x")), UnavailableError, "error", None),
        (
            lambda b: b.flight.fail(UnavailableError("x", retry_after_ms=1)),
            UnavailableError,
            "rejected",
            None,
        ),
        (lambda b: b.flight.fail(DeadlineError("x")), DeadlineError, "deadline", None),
    ],
)
def test_ends_that_are_errors(
    end: Callable[[Bench], None], error: type[Exception], outcome: str, reason: CancelReason | None
) -> None:
    async def check() -> None:
        bench = Bench(n=2)
        bench.flight.deliver(0, [97])
        end(bench)
        with pytest.raises(error):
            await bench.news()
        bench.generation.close()
        bench.generation.close()
        assert bench.outcome() == outcome
        assert bench.carrier.cancels == ([] if reason is None else [(None, reason, 0)])

    run(check)


def test_the_deadline_ends_it() -> None:
    async def check() -> None:
        bench = Bench(deadline=asyncio.get_running_loop().time() + 0.01)
        with pytest.raises(DeadlineError):
            await bench.news()
        assert bench.outcome() == "deadline"
        assert bench.carrier.cancels == [(None, CancelReason.DEADLINE, 0)]

    run(check)


def test_closing_early_cancels() -> None:
    async def check() -> None:
        bench = Bench()
        bench.generation.close()
        assert bench.outcome() == "cancelled"
        assert bench.carrier.cancels == [(None, CancelReason.CLIENT, 0)]

    run(check)


def test_much_news_is_handed_out_in_turns() -> None:
    async def check() -> None:
        bench = Bench(n=3)
        for index in range(3):
            bench.flight.deliver(index, [97] * MAX_IDS_PER_TURN)
        others: list[int] = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        assert [(d.choice, len(d.text)) for d in await bench.news()] == [(0, MAX_IDS_PER_TURN)]
        assert others == [1]
        bench.flight.deliver(0, [98])
        bench.flight.deliver(2, [98])
        seen: list[tuple[int, int]] = []
        while len(seen) < 3:
            seen += [(d.choice, len(d.text)) for d in await bench.news()]
        assert seen == [(1, MAX_IDS_PER_TURN), (2, MAX_IDS_PER_TURN + 1), (0, 1)]

    run(check)


def test_headers_wait_for_all_rows_or_any_news() -> None:
    async def check() -> None:
        bench = Bench()
        generation, flight = bench.generation, bench.flight
        other = Flight(flight.order, flight.inbox)
        generation.flights = [flight, other]
        assert not await generation.wait_admitted(0.01)
        flight.start(0)
        assert not await generation.wait_admitted(0.01), "the other one has no row"
        # Its tokens aren't held back for the other's row.
        flight.deliver(0, [97])
        assert await generation.wait_admitted(5)
        (delta,) = await bench.news()
        assert delta.text == "a"
        other.start(0)
        assert await generation.wait_admitted(5)

    run(check)
