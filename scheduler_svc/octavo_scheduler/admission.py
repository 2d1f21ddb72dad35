"""The cell's one queue: bounded in tokens and in expected wait, by priority, fair to tenants.

Within a priority, sequences that come back (preempted, or moved from a lost worker) and
re-submits go first, by age, and pass the bounds. Fresh ones follow: the tenant that was served
least for its weight goes next (`fairness.py`), each tenant's own in the order of arrival. A
sequence rises by one priority each `ageing_s` that it waits. What never fits is refused before
it gets here.

The bounds look at what goes before a request: tokens of higher priorities, and of its own
priority what other tenants may take while its own tokens are served. So a tenant that floods
the queue makes itself wait, and is refused itself. How long that takes follows from how the
queue and the tenant's line drained lately and from how far running answers are (`pace.py`,
`outlook.py`); of the bound on it, `margin.py` keeps what such expectations were short by.

Must not know: workers, sessions, I/O. Entry points: `AdmissionQueue`, `check_fits`.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple

from octavo.errors import ContextLengthError, OverloadedError
from octavo_scheduler.fairness import Shares
from octavo_scheduler.margin import Margin
from octavo_scheduler.outlook import Outlook
from octavo_scheduler.pace import Pace
from octavo_scheduler.sequence import Sequence, order_of

_OrderedSet = OrderedDict[Sequence, None]
_MIN_RETRY_MS, _MAX_RETRY_MS = 100, 60_000
# Assumed while nothing was measured yet.
_DEFAULT_TOKENS_PER_S = 10_000.0
# A line moves as others let it: its pace is the mean over several of their bursts.
_LINE_MEMORY_S = 60.0
# Of the longest wait that is let in: waits from here on teach the margin.
_LONG_SHARE = 0.5
# Of the bound: so far a prompt's own time counts, or long ones alone would never be let in.
_OWN_SHARE = 0.25


def check_fits(num_prompt_tokens: int, max_tokens: int, max_request_tokens: int) -> None:
    """Raise ContextLengthError if no worker of the cell can ever hold the request."""
    total = num_prompt_tokens + max_tokens
    if total > max_request_tokens:
        raise ContextLengthError(
            f"{num_prompt_tokens} prompt tokens + {max_tokens} to generate = {total} exceed the "
            f"{max_request_tokens} that a worker can hold; shorten the prompt or lower max_tokens",
            param="max_tokens" if num_prompt_tokens < max_request_tokens else "prompt",
        )


class QueueFullError(OverloadedError):
    """Refused, and so would be the smallest request of this tenant and priority."""


class _Forecast(NamedTuple):
    """Tokens that go before, how long these, the own prompt and a usual one take, the rate."""

    ahead: int
    wait_s: float
    own_s: float
    usual_s: float
    tokens_per_s: float


class _Excess(NamedTuple):
    """Which limit is exceeded, in words, and the seconds until it no longer is."""

    limit: str
    excess_s: float


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds for what goes before a fresh request, and the time that raises a priority by one.

    `max_wait_s`, until the first token, and `ageing_s`: 0 = none.
    """

    max_tokens: int
    max_wait_s: float = 0.0
    ageing_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Line:
    """A tenant's fresh sequences of one priority."""

    sequences: _OrderedSet = field(default_factory=_OrderedSet)
    num_tokens: int = 0
    pace: Pace = field(default_factory=lambda: Pace(_LINE_MEMORY_S))

    @property
    def wait_s(self) -> float:
        """How long its last one waits, if the line goes on as it did; 0 = not measured."""
        return self.pace.wait_s(self.num_tokens, inf)


@dataclass(slots=True, eq=False)
class _Level:
    """One priority: who came back, and the tenants' lines."""

    priority: int
    back: _OrderedSet = field(default_factory=_OrderedSet)
    lines: dict[str, _Line] = field(default_factory=dict[str, _Line])
    num_tokens: int = 0

    def in_order(self, shares: Shares, limit: int) -> Iterator[Sequence]:
        """The first `limit`, as they would be served if all costs were as expected."""
        yield from order_of(list(self.back))[:limit]
        if len(self.lines) == 1:
            yield from list(islice(next(iter(self.lines.values())).sequences, limit))
            return
        # (virtual time, serial of the first) -> the tenant's others.
        heap: list[tuple[float, int, Sequence, Iterator[Sequence]]] = []
        for tenant, line in self.lines.items():
            others = iter(list(islice(line.sequences, limit)))
            first = next(others)
            heap.append((shares.time(tenant), first.request.serial, first, others))
        heapq.heapify(heap)
        while heap:
            time, _, first, others = heap[0]
            yield first
            tenant = first.request.submission.tenant
            time += first.queue_tokens / shares.weight(tenant)
            if (following := next(others, None)) is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (time, following.request.serial, following, others))


class AdmissionQueue:
    """Sequences that wait for a row."""

    def __init__(
        self, limits: QueueLimits, shares: Shares, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.num_tokens = 0
        self._limits = limits
        self._shares = shares
        self._clock = clock
        self._pace = Pace()
        self._levels: dict[int, _Level] = {}
        # By priority: what passes the lower ones errs for them alone.
        self._margins: dict[int, Margin] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_room(
        self, num_tokens: int, outlook: Outlook, *, priority: int = 0, tenant: str = ""
    ) -> float | None:
        """Expected seconds to the first token of fresh tokens; None = they go next.

        Raises OverloadedError, with a time to retry, if they don't fit now.
        """
        forecast = self._foresee(num_tokens, outlook, priority, tenant)
        if forecast is None:
            return None
        why = self._why_not(num_tokens, forecast, priority)
        if why is None:
            return forecast.wait_s + forecast.own_s
        least = self._foresee(1, outlook, priority, tenant)
        is_full = least is not None and self._why_not(1, least, priority) is not None
        raise (QueueFullError if is_full else OverloadedError)(
            f"{forecast.ahead} prompt tokens wait before this request, which adds {num_tokens}; "
            f"{why.limit}. Try again later or on another cell",
            retry_after_ms=round(min(max(1000 * why.excess_s, _MIN_RETRY_MS), _MAX_RETRY_MS)),
        )

    def note_answered(self, sequence: Sequence) -> None:
        """Its first token was drawn: what was expected of that is compared."""
        request = sequence.request
        expected_s = request.expected_ttft_s
        # A worker that was lost is no error of the expectation.
        if expected_s is None or not self._limits.max_wait_s or sequence.num_moves:
            return
        now, margin = self._clock(), self._margin(request.submission.priority)
        # Errors grow with the wait, and it's the long waits that are bounded.
        if expected_s >= _LONG_SHARE * (self._limits.max_wait_s - margin.seconds):
            margin.add(now, now - request.arrival - expected_s)

    def push(self, sequence: Sequence) -> None:
        """Queue a fresh sequence."""
        level = self._count(sequence, 1)
        tenant = sequence.request.submission.tenant
        line = level.lines.get(tenant)
        if line is None:
            line = level.lines[tenant] = _Line()
            line.pace.fill(self._clock())
        assert sequence not in line.sequences
        line.sequences[sequence] = None
        line.num_tokens += sequence.queue_tokens

    def push_front(self, sequence: Sequence) -> None:
        """Queue a sequence that comes back, before the fresh ones of its priority."""
        level = self._count(sequence, 1)
        assert sequence not in level.back
        level.back[sequence] = None

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence got a row, where `num_tokens` are to be computed; its tenant is charged.

        Not again for one that comes back. The answer's tokens are charged as expected; whoever
        ends the sequence corrects them.
        """
        level, now = self._levels[sequence.request.submission.priority], self._clock()
        is_fresh = sequence not in level.back
        self._pace.serve(now, sequence.queue_tokens)
        if is_fresh:
            line = level.lines[sequence.request.submission.tenant]
            line.pace.serve(now, sequence.queue_tokens)
        self.remove(sequence)
        if is_fresh:
            sequence.charged_output = sequence.expected_output
            num_tokens += sequence.charged_output
            self._shares.serve(sequence.request.submission.tenant, num_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        level = self._count(sequence, -1)
        if sequence in level.back:
            del level.back[sequence]
        else:
            tenant = sequence.request.submission.tenant
            line = level.lines[tenant]
            del line.sequences[sequence]
            line.num_tokens -= sequence.queue_tokens
            if not line.sequences:
                del level.lines[tenant]
        if not level.back and not level.lines:
            del self._levels[level.priority]

    def candidates(self, limit: int) -> Iterator[Sequence]:
        """The first `limit` in order of service; the caller may remove them meanwhile."""
        levels = list(self._levels.values())
        if len(levels) == 1:
            yield from islice(levels[0].in_order(self._shares, limit), limit)
            return
        now = self._clock()
        heap: list[tuple[tuple[int, int, int], Sequence, Iterator[Sequence]]] = []
        for level in levels:
            others = level.in_order(self._shares, limit)
            first = next(others)
            heap.append((self._rank(first, now), first, others))
        heapq.heapify(heap)
        for _ in range(limit):
            if not heap:
                return
            _, first, others = heap[0]
            yield first
            if (following := next(others, None)) is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (self._rank(following, now), following, others))

    def sequences(self) -> list[Sequence]:
        """All, in no particular order."""
        return [
            sequence
            for level in self._levels.values()
            for place in (level.back, *(line.sequences for line in level.lines.values()))
            for sequence in place
        ]

    def _rank(self, sequence: Sequence, now: float) -> tuple[int, int, int]:
        """Smaller goes first: the aged priority, then the age."""
        request = sequence.request
        priority = request.submission.priority
        if self._limits.ageing_s:
            priority += int((now - request.arrival) / self._limits.ageing_s)
        return (-priority, request.serial, sequence.index)

    def _count(self, sequence: Sequence, sign: int) -> _Level:
        """Account a sequence that comes (+1) or goes (-1); its level."""
        priority = sequence.request.submission.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority)
        if not self._size:
            self._pace.fill(self._clock())
        self._size += sign
        tokens = sign * sequence.queue_tokens
        self.num_tokens += tokens
        level.num_tokens += tokens
        if not self._size:
            self._pace.empty()
        return level

    def _foresee(
        self, num_tokens: int, outlook: Outlook, priority: int, tenant: str
    ) -> _Forecast | None:
        """What fresh tokens have to wait for; None = nothing."""
        ahead = self._tokens_ahead(num_tokens, priority, tenant)
        if not ahead:
            return None
        tokens_a_sequence = self.num_tokens / self._size
        default = outlook.drain_tokens_per_s(tokens_a_sequence) or _DEFAULT_TOKENS_PER_S
        wait_s = self._pace.wait_s(ahead, default)
        wait_s *= outlook.bunching(round(ahead / tokens_a_sequence))
        # What others may yet send before its turn shows in how its own line moves.
        wait_s = max(wait_s, self._line_wait_s(priority, tenant))
        token_s = outlook.worker_token_s
        times_s = (wait_s, num_tokens * token_s, tokens_a_sequence * token_s)
        return _Forecast(ahead, *times_s, self._pace.tokens_per_s or default)

    def _why_not(self, num_tokens: int, forecast: _Forecast, priority: int) -> _Excess | None:
        limits, excess = self._limits, forecast.ahead + num_tokens - self._limits.max_tokens
        if excess > 0:
            limit = f"at most {limits.max_tokens} may wait"
            return _Excess(limit, excess / forecast.tokens_per_s)
        if not limits.max_wait_s:
            return None
        margin_s = self._margin(priority).seconds
        # Not its own: where many are refused, only the shortest prompts would get in.
        own_s = min(forecast.usual_s, _OWN_SHARE * limits.max_wait_s)
        excess_s = forecast.wait_s + own_s + margin_s - limits.max_wait_s
        if excess_s <= 0.0:
            return None
        limit = (
            f"that takes {forecast.wait_s:.1f} s and, as it went lately, up to {margin_s:.1f} s "
            f"more, and the first token is to come within {limits.max_wait_s:g} s"
        )
        return _Excess(limit, excess_s)

    def _margin(self, priority: int) -> Margin:
        margin = self._margins.get(priority)
        if margin is None:
            margin = self._margins[priority] = Margin(self._limits.max_wait_s)
        return margin

    def _line_wait_s(self, priority: int, tenant: str) -> float:
        level = self._levels.get(priority)
        line = None if level is None else level.lines.get(tenant)
        return 0.0 if line is None else line.wait_s

    def _tokens_ahead(self, num_tokens: int, priority: int, tenant: str) -> int:
        """Tokens that are served before the last of these, by priority and fair share."""
        ahead = sum(
            level.num_tokens for level in self._levels.values() if level.priority > priority
        )
        level = self._levels.get(priority)
        if level is None:
            return ahead
        own = level.lines[tenant].num_tokens if tenant in level.lines else 0
        share = (own + num_tokens) / self._shares.weight(tenant)
        fresh = sum(line.num_tokens for line in level.lines.values())
        others = sum(
            min(line.num_tokens, int(share * self._shares.weight(other)))
            for other, line in level.lines.items()
            if other != tenant
        )
        return ahead + (level.num_tokens - fresh) + own + others
