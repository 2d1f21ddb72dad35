"""The cell's one queue: bounded in tokens and in expected wait, by priority, fair to tenants.

Within a priority, sequences that come back (preempted, or moved from a lost worker) and
re-submits go first, by age, and pass the bounds. Fresh ones follow: the tenant that was served
least for its weight goes next (`fairness.py`), each tenant's own in the order of arrival. A
sequence rises by one priority each `ageing_s` that it waits. What never fits is refused before
it gets here.

The bounds look at what goes before a request: tokens of higher priorities, and of its own
priority what other tenants may take while its own tokens are served. So a tenant that floods
the queue makes itself wait, and is refused itself.

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
from octavo_scheduler.pace import Pace
from octavo_scheduler.sequence import Sequence, order_of

_OrderedSet = OrderedDict[Sequence, None]
_MIN_RETRY_MS, _MAX_RETRY_MS = 100, 60_000
# Assumed while nothing was measured yet.
_DEFAULT_TOKENS_PER_S = 10_000.0


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


class _Excess(NamedTuple):
    """What is too much: tokens that go before, the limit in words, seconds beyond it."""

    ahead: int
    limit: str
    excess_s: float


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds for what goes before a fresh request, and the time that raises a priority by one.

    `max_wait_s` and `ageing_s`: 0 = none.
    """

    max_tokens: int
    max_wait_s: float = 0.0
    ageing_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Line:
    """A tenant's fresh sequences of one priority."""

    sequences: _OrderedSet = field(default_factory=_OrderedSet)
    num_tokens: int = 0
    pace: Pace = field(default_factory=Pace)

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
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_room(
        self, num_tokens: int, default_tokens_per_s: float, *, priority: int = 0, tenant: str = ""
    ) -> None:
        """Raise OverloadedError, with a time to retry, if fresh tokens don't fit now.

        `default_tokens_per_s`: how fast the queue drains, if that was not measured yet.
        """
        why = self._why_not(num_tokens, default_tokens_per_s, priority, tenant)
        if why is None:
            return
        is_full = self._why_not(1, default_tokens_per_s, priority, tenant) is not None
        raise (QueueFullError if is_full else OverloadedError)(
            f"{why.ahead} prompt tokens wait before this request, which adds {num_tokens}; "
            f"{why.limit}. Try again later or on another cell",
            retry_after_ms=round(min(max(1000 * why.excess_s, _MIN_RETRY_MS), _MAX_RETRY_MS)),
        )

    def _why_not(
        self, num_tokens: int, default_tokens_per_s: float, priority: int, tenant: str
    ) -> "_Excess | None":
        ahead = self._tokens_ahead(num_tokens, priority, tenant)
        if not ahead:
            return None
        default_tokens_per_s = default_tokens_per_s or _DEFAULT_TOKENS_PER_S
        rate = self._pace.tokens_per_s or default_tokens_per_s
        limits = self._limits
        # What others may yet send before its turn shows in how its own line moves.
        wait_s = self._pace.wait_s(ahead, default_tokens_per_s)
        wait_s = max(wait_s, self._line_wait_s(priority, tenant))
        if ahead + num_tokens > limits.max_tokens:
            excess_s = (ahead + num_tokens - limits.max_tokens) / rate
            limit = f"at most {limits.max_tokens} may wait"
        elif limits.max_wait_s and wait_s > limits.max_wait_s:
            excess_s = wait_s - limits.max_wait_s
            limit = f"that takes {wait_s:.1f} s, over {limits.max_wait_s:g} s"
        else:
            return None
        return _Excess(ahead, limit, excess_s)

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
