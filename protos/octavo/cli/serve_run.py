"""Drives a load against one server: open loop (arrivals don't wait) or closed loop.

Must not know: HTTP (a `Sender` sends), statistics. Entry point: `run_load`.
"""

import asyncio
import contextlib
import itertools
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from octavo.cli.serve_client import Outcome
from octavo.cli.serve_load import Arrival

# So many bodies are made before the clock starts, the rest on the way.
_PREPARED_TOKENS = 1_000_000
_PREPARED_REQUESTS = 2_000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent."""

    arrival: Arrival
    body: str


# Sends at once; the second argument is when it was due (of `time.perf_counter`), if at a time.
Sender = Callable[[Prepared, float | None], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All outcomes, in the order of their ends, and how busy the measuring client was."""

    outcomes: tuple[Outcome, ...]
    started_s: float
    elapsed_s: float
    max_in_flight: int
    client_cpu: float  # seconds of CPU per second


class Progress:
    """Counts for a progress bar. `told` is called at each change."""

    def __init__(self, told: Callable[["Progress"], None] = lambda _: None) -> None:
        self.num_sent = self.num_ended = self.num_failed = self.max_in_flight = 0
        self._told = told

    def sent(self) -> None:
        self.num_sent += 1
        self.max_in_flight = max(self.max_in_flight, self.num_sent - self.num_ended)
        self._told(self)

    def ended(self, outcome: Outcome) -> None:
        self.num_ended += 1
        self.num_failed += outcome.error is not None
        self._told(self)


async def run_load(
    requests: Iterable[Prepared],
    sender: Sender,
    *,
    concurrency: int | None = None,
    duration_s: float | None = None,
    progress: Progress | None = None,
) -> LoadResult:
    """Send `requests` at their times, or with `concurrency` clients that each wait for an answer
    before the next question. After `duration_s` nothing new is sent; what runs may end."""
    progress = progress or Progress()
    outcomes: list[Outcome] = []
    waiting = _prepared_ahead(requests)
    cpu_s, started_s = time.process_time(), time.perf_counter()
    end_s = float("inf") if duration_s is None else started_s + duration_s

    async def one(request: Prepared, due_s: float | None) -> None:
        progress.sent()
        outcome = await sender(request, due_s)
        outcomes.append(outcome)
        progress.ended(outcome)

    async def client() -> None:
        while time.perf_counter() < end_s and (request := next(waiting, None)) is not None:
            await one(request, None)

    async with asyncio.TaskGroup() as group:
        if concurrency is not None:
            for _ in range(concurrency):
                group.create_task(client())
        else:
            await _send_on_time(
                waiting, started_s, end_s, lambda *item: group.create_task(one(*item))
            )
    elapsed_s = time.perf_counter() - started_s
    client_cpu = (time.process_time() - cpu_s) / elapsed_s
    return LoadResult(
        tuple(outcomes), started_s, elapsed_s, progress.max_in_flight, round(client_cpu, 3)
    )


async def _send_on_time(
    requests: Iterator[Prepared],
    started_s: float,
    end_s: float,
    start: Callable[[Prepared, float], object],
) -> None:
    """An arrival that is late already goes at once: the schedule never waits for a server."""
    for request in requests:
        assert request.arrival.due_s is not None, "an open loop has times"
        due_s = started_s + request.arrival.due_s
        if due_s >= end_s:
            return
        wait_s = due_s - time.perf_counter()
        # Also without a wait, others must come to read what arrived.
        await asyncio.sleep(max(0.0, wait_s))
        start(request, due_s)


def _prepared_ahead(requests: Iterable[Prepared]) -> Iterator[Prepared]:
    """`requests`, the first of them made before this returns."""
    source = iter(requests)
    head: list[Prepared] = []
    num_tokens = 0
    while num_tokens < _PREPARED_TOKENS and len(head) < _PREPARED_REQUESTS:
        if (request := next(source, None)) is None:
            break
        head.append(request)
        num_tokens += request.arrival.num_prompt_tokens
    return itertools.chain(head, source)


def allow_many_connections() -> None:
    """Every request in flight is an open file; the default limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems call their limit infinite and take less.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
