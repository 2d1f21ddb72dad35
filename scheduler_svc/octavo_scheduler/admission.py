"""The cell's one queue: bounded in tokens, by priority, first come first served.

Fresh sequences stand behind each other; sequences that come back (preempted, or moved from a
lost worker) and re-submits stand before them, by age, and pass the bound. What never fits is
refused before it gets here.

Must not know: workers, sessions, I/O. Entry points: `AdmissionQueue`, `check_fits`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from octavo.errors import ContextLengthError, OverloadedError
from octavo_scheduler.sequence import Sequence, order_of

_OrderedSet = OrderedDict[Sequence, None]
_MIN_RETRY_MS, _MAX_RETRY_MS = 100, 60_000
# Assumed while no prefill was measured yet.
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


class AdmissionQueue:
    """Sequences that wait for a row."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        # priority -> (come back, fresh)
        self._levels: dict[int, tuple[_OrderedSet, _OrderedSet]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_room(self, num_tokens: int, tokens_per_s: float) -> None:
        """Raise OverloadedError, with a time to retry, if fresh tokens don't fit now."""
        if not self._size or self.num_tokens + num_tokens <= self.max_tokens:
            return
        rate = tokens_per_s or _DEFAULT_TOKENS_PER_S
        excess = self.num_tokens + num_tokens - self.max_tokens
        retry_ms = int(1000 * excess / rate)
        raise OverloadedError(
            f"{self.num_tokens} prompt tokens wait already and this request adds {num_tokens}; "
            f"at most {self.max_tokens} may wait. Try again later or on another cell",
            retry_after_ms=min(max(retry_ms, _MIN_RETRY_MS), _MAX_RETRY_MS),
        )

    def push(self, sequence: Sequence) -> None:
        """Queue a fresh sequence."""
        self._put(sequence, 1)

    def push_front(self, sequence: Sequence) -> None:
        """Queue a sequence that comes back, before the fresh ones of its priority."""
        self._put(sequence, 0)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.submission.priority
        level = self._levels[priority]
        place = level[0] if sequence in level[0] else level[1]
        del place[sequence]
        self._size -= 1
        self.num_tokens -= sequence.queue_tokens
        if not level[0] and not level[1]:
            del self._levels[priority]

    def candidates(self, limit: int) -> Iterator[Sequence]:
        """The first `limit` in order of service; the caller may remove them meanwhile."""
        for priority in sorted(self._levels, reverse=True):
            back, fresh = self._levels[priority]
            level = [*order_of(list(back)), *islice(fresh, limit)][:limit]
            yield from level
            limit -= len(level)
            if limit <= 0:
                return

    def sequences(self) -> list[Sequence]:
        """All, in no particular order."""
        return [sequence for level in self._levels.values() for p in level for sequence in p]

    def _put(self, sequence: Sequence, place: int) -> None:
        priority = sequence.request.submission.priority
        level = self._levels.setdefault(priority, (_OrderedSet(), _OrderedSet()))
        assert sequence not in level[0]
        assert sequence not in level[1]
        level[place][sequence] = None
        self._size += 1
        self.num_tokens += sequence.queue_tokens
