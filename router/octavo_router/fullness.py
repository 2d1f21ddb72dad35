"""What a full cell refused just now, so that the next such request is refused without asking it.

A refusal that its size didn't cause holds for every request of the tenant, of that priority or
less, until the cell has less to compute than when it refused. Under overload most requests are
so refused by one look-up: before a tokenizer or a scheduler works for them, and at the cost of
those who are served. It also ends with time: what goes before a tenant's request is not only
what the cell has in all. Must not know: sessions, the wire.
Entry point: `Fullness`.
"""

from dataclasses import dataclass

from octavo.errors import OverloadedError

# Short beside any wait that is worth refusing for.
MAX_AGE_S = 0.25


@dataclass(frozen=True, slots=True)
class _Refusal:
    priority: int
    # The cell's backlog, as told with the refusal.
    backlog_tokens: int
    until: float
    error: OverloadedError


class Fullness:
    """One cell's refusals that still hold, one a tenant. Times: any one clock, in seconds."""

    __slots__ = ("_refusals",)

    def __init__(self) -> None:
        self._refusals: dict[str, _Refusal] = {}

    def refused(
        self, tenant: str, priority: int, backlog_tokens: int, now: float, error: OverloadedError
    ) -> None:
        """The cell, with this backlog, takes nothing of the tenant at this priority."""
        known = self._refusals.get(tenant)
        # What is refused although a higher priority was is no news.
        if known is None or known.until <= now or known.priority <= priority:
            refusal = _Refusal(priority, backlog_tokens, now + MAX_AGE_S, error)
            self._refusals[tenant] = refusal

    def hear(self, backlog_tokens: int) -> None:
        """The cell told its load: what it refused with a larger one it may take now."""
        if self._refusals:
            self._refusals = {
                tenant: refusal
                for tenant, refusal in self._refusals.items()
                if backlog_tokens >= refusal.backlog_tokens
            }

    def find(self, tenant: str, priority: int, now: float) -> OverloadedError | None:
        """The refusal that holds for such a request, whatever its size."""
        known = self._refusals.get(tenant)
        if known is None or now >= known.until or priority > known.priority:
            return None
        return known.error
