"""One tenant's quota as this router counts it: pure arithmetic, no I/O, no waiting.

A router spends what it was dealt (buckets). A request is counted when it comes, its tokens when its
prompt is known (plus the `max_tokens` it asked for), and corrected when it ended. Tokens may run
into debt by the one request that was let in last; the debt is paid before the next. Before the
first deal there is a small slice, which is all by which routers can exceed a quota; while no deal
comes each goes on with the quota divided by the routers last seen. Must not know: Redis, HTTP.
Entry points: `Meter.begin`, `Meter.needs`, `Meter.apply`, `Meter.headers`.
"""

import math
from collections.abc import Callable

from octavo.errors import RateLimitError
from octavo_router.buckets import Deal, Need, Share
from octavo_router.quota import Quota

# Before the first deal, and as a loan from other routers: a tenth of the minute's quota.
_SLICES = 10
# Without a deal for so long the store is away. Idle meters deal every second.
STALE_S = 2.5
_MINUTE_S = 60.0
_MIN_RETRY_MS = 1000


class _Side:
    """One bucket: requests or tokens. `quota` 0 = no limit."""

    __slots__ = (
        "_allowed",
        "_has_loan",
        "_left",
        "_left_at",
        "name",
        "quota",
        "spent",
        "told",
        "wanted",
    )

    def __init__(self, name: str, quota: int, now: float) -> None:
        self.name = name
        self.quota = quota
        # All that was ever spent here; what the last answered deal knew of it.
        self.spent = 0
        self.told = 0
        self.wanted = 0
        self._allowed: float = max(1, quota // _SLICES)
        self._has_loan = False
        # In all, as of `_left_at`, what this router spent since not deducted.
        self._left: float | None = None
        self._left_at = now

    @property
    def room(self) -> float:
        """What may be spent here now."""
        return self._allowed - self.spent

    def left(self, now: float) -> float:
        """An estimate of what all routers have left."""
        return self._known(now) - (self.spent - self.told)

    def need(self, now: float) -> Need:
        known = None if self._left is None else self._known(now)
        return Need(self.quota, self.spent, self.told, self.wanted, known)

    def apply(self, need: Need, share: Share, num_routers: int, now: float) -> None:
        """`share` answers `need`."""
        if share.granted or share.left <= 0:
            self._allowed = need.spent + share.granted
            self._has_loan = False
        elif not self._has_loan:
            # Others hold what there is, and give it back soon: a little is borrowed, once.
            self._allowed = need.spent + min(self.quota // _SLICES, share.left // (2 * num_routers))
            self._has_loan = True
        self.told = need.spent
        self._left, self._left_at = share.left, now
        self.wanted = 0

    def refill(self, seconds: float, num_routers: int) -> None:
        """The store is away: this router's part of what comes in."""
        share = self.quota / num_routers
        if self.room < share:
            self._allowed += min(share - self.room, share * seconds / _MINUTE_S)

    def retry_after_ms(self, needed: float, now: float) -> int:
        """Until `needed` is there; never so soon that a deal can't have come."""
        missing = needed - self.left(now)
        return max(_MIN_RETRY_MS, math.ceil(missing * _MINUTE_S * 1000 / self.quota))

    def headers(self, now: float) -> dict[str, str]:
        left = min(self.quota, max(0.0, self.left(now)))
        reset_s = (self.quota - left) * _MINUTE_S / self.quota
        return {
            f"x-ratelimit-limit-{self.name}": str(self.quota),
            f"x-ratelimit-remaining-{self.name}": str(int(left)),
            f"x-ratelimit-reset-{self.name}": format_duration(reset_s),
        }

    def _known(self, now: float) -> float:
        if self._left is None:
            return float(self.quota)
        return min(self.quota, self._left + self.quota * (now - self._left_at) / _MINUTE_S)


class Meter:
    """One tenant. `on_news`: something was spent, or is missing. Times in s of `clock`."""

    def __init__(
        self, tenant: str, quota: Quota, clock: Callable[[], float], on_news: Callable[[], None]
    ) -> None:
        now = clock()
        self.tenant = tenant
        self._clock = clock
        self._on_news = on_news
        self._requests = _Side("requests", quota.requests, now)
        self._tokens = _Side("tokens", quota.tokens, now)
        self._sides = [side for side in (self._requests, self._tokens) if side.quota]
        self.num_routers = 1
        self._refilled_at = now
        self.used_at = now
        # Of the last answered deal, and of the oldest spending that none has seen.
        self.dealt_at = -math.inf
        self.news_since: float | None = None
        self.num_charges = 0

    def begin(self) -> "Charge":
        """Count a request. Raises RateLimitError if there is no room for it."""
        self._refresh()
        self._check(self._requests, 1, self._requests.room >= 1)
        # A debt of tokens is known before the prompt is.
        self._check(self._tokens, 1, self._tokens.room > 0)
        self._spend(self._requests, 1)
        return Charge(self)

    def take_tokens(self, count: int) -> None:
        """Raises RateLimitError if there is no room, or never will be."""
        quota = self._tokens.quota
        if quota and count > quota:
            raise RateLimitError(
                f"the request needs {count} tokens (prompt and max_tokens), the limit is {quota} "
                "per minute: ask for less"
            )
        self._refresh()
        self._check(self._tokens, count, self._tokens.room > 0)
        self._spend(self._tokens, count)

    def correct_tokens(self, count: int) -> None:
        """Add `count`, which may be negative, to what was taken."""
        if count:
            self._spend(self._tokens, count)

    def give_back_request(self) -> None:
        self._spend(self._requests, -1)

    def needs(self, now: float) -> tuple[Need, Need]:
        """What to tell the store."""
        return self._requests.need(now), self._tokens.need(now)

    def apply(self, needs: tuple[Need, Need], deal: Deal) -> None:
        """The store answered `needs`."""
        now = self._clock()
        for side, need, share in zip(
            (self._requests, self._tokens), needs, deal.shares, strict=True
        ):
            side.apply(need, share, deal.num_routers, now)
        self.num_routers = deal.num_routers
        self.dealt_at = now
        is_told = all(side.spent == side.told for side in self._sides)
        self.news_since = None if is_told else now

    def headers(self) -> dict[str, str]:
        """As OpenAI's API has them; only of limits that there are."""
        now = self._clock()
        return {name: text for side in self._sides for name, text in side.headers(now).items()}

    def _refresh(self) -> None:
        now = self._clock()
        self.used_at = now
        since = max(self._refilled_at, self.dealt_at + STALE_S)
        if now > since:
            for side in self._sides:
                side.refill(now - since, self.num_routers)
        self._refilled_at = now

    def _check(self, side: _Side, count: int, has_room: bool) -> None:
        if not side.quota or has_room:
            return
        # Others hold more than they need: take a good piece of what is left.
        side.wanted = max(side.wanted, count, side.quota // _SLICES)
        self._tell()
        needed = 1 if side is self._requests else 0
        raise RateLimitError(
            f"rate limit reached for {side.name}: {side.quota} per minute; try again later",
            retry_after_ms=side.retry_after_ms(needed, self._clock()),
        )

    def _spend(self, side: _Side, count: int) -> None:
        if side.quota:
            side.spent += count
            self._tell()

    def _tell(self) -> None:
        if self.news_since is None:
            self.news_since = self._clock()
            self._on_news()


class Charge:
    """What one request takes of its tenant's quota."""

    __slots__ = ("_is_settled", "_meter", "_taken")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._taken = 0
        self._is_settled = False
        meter.num_charges += 1

    def take_tokens(self, count: int) -> None:
        """Before the work begins. Raises RateLimitError; then `cancel`."""
        self._meter.take_tokens(count)
        self._taken = count

    def settle(self, num_tokens: int) -> None:
        """The request ended; it used so many. Only the first call counts."""
        if not self._is_settled:
            self._is_settled = True
            self._meter.num_charges -= 1
            self._meter.correct_tokens(num_tokens - self._taken)

    def cancel(self) -> None:
        """The request never began."""
        if not self._is_settled:
            self.settle(0)
            self._meter.give_back_request()


def format_duration(seconds: float) -> str:
    """As OpenAI's reset headers: `120ms`, `7.66s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
