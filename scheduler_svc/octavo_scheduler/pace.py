"""How fast the queue drains, measured while it is a queue: tokens that left it over time.

What limits a cell (prefill, rows, blocks) doesn't matter: all of it shows here. Must not know:
sequences, workers. Entry point: `Pace`.
"""

from math import exp

# Old measurements count less: by 1 / e each so many seconds of queueing.
MEMORY_S = 10.0
# A queue that is empty again sooner limits nobody.
_GRACE_S = 0.1
_LEAST_MEASURED_S = 0.5
# A short measurement foretells no longer wait than so many times itself: a queue stands still, but
# for short prompts, while a long one that has just left it is computed.
_FARTHEST, _SHORT_S = 20.0, 5.0


class Pace:
    """Give it every change; times are the caller's clock, in seconds."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._tokens = 0.0
        self._measured_s = 0.0
        # When measuring goes on; None = the queue is empty.
        self._since: float | None = None

    def fill(self, now: float) -> None:
        """The queue is no longer empty."""
        self._since = now + _GRACE_S

    def empty(self) -> None:
        self._since = None

    def serve(self, now: float, num_tokens: int) -> None:
        """Tokens left the queue to be computed."""
        if self._since is None or now < self._since:
            return
        passed_s = now - self._since
        fading = exp(-passed_s / self._memory_s)
        self._tokens = self._tokens * fading + num_tokens
        self._measured_s = self._measured_s * fading + passed_s
        self._since = now

    def wait_s(self, num_tokens: int, default_tokens_per_s: float) -> float:
        """How long so many tokens take to leave the queue, if it goes on as it did."""
        rate = self.tokens_per_s
        if not rate:
            return num_tokens / default_tokens_per_s
        wait_s = num_tokens / rate
        is_short = self._measured_s < _SHORT_S
        return min(wait_s, _FARTHEST * self._measured_s) if is_short else wait_s

    @property
    def tokens_per_s(self) -> float:
        """0 = not measured yet."""
        if self._measured_s < _LEAST_MEASURED_S:
            return 0.0
        return self._tokens / self._measured_s
