"""Fair shares: which tenant of those that wait goes next, by tokens served over weight.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over tokens, as "Fairness in Serving Large
Language Models" (Sheng et al., 2024) counts them: each tenant has a virtual time that advances
by (tokens served / weight); who is least advanced goes first. A tenant that took less than its
share keeps a little of what it left, so that its bursts pass a flood of others; more it can't
save up.

Must not know: sequences, queues, time. Entry points: `Shares`, `parse_weights`.
"""

import math
from collections.abc import Iterable, Mapping

from octavo.errors import ConfigurationError

# Idle tenants whose past still counts are remembered up to this many.
_MAX_IDLE = 1024
# Tokens (times its weight) that a tenant may have saved up.
BURST_TOKENS = 65_536


def parse_weights(items: Iterable[str]) -> dict[str, float]:
    """`tenant=weight` items. Raises ConfigurationError."""
    weights: dict[str, float] = {}
    for item in items:
        tenant, _, text = item.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not tenant or not (0 < weight < math.inf):
            raise ConfigurationError(
                f"OCTAVO_TENANT_WEIGHTS: {item!r} is no tenant=weight with a weight above 0",
                param="tenant_weights",
            )
        weights[tenant] = weight
    return weights


class Shares:
    """Virtual times of tenants; a weight that wasn't given is 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._times: dict[str, float] = {}
        self._present = 0.0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def time(self, tenant: str) -> float:
        """Virtual time of a tenant; never further back from the present than a burst."""
        earliest = self._present - BURST_TOKENS
        return max(self._times.get(tenant, earliest), earliest)

    def serve(self, tenant: str, num_tokens: int) -> None:
        """The tenant, whose turn it was, gets this much."""
        started = self.time(tenant)
        self._present = max(self._present, started)
        self._times[tenant] = started + num_tokens / self.weight(tenant)
        if len(self._times) > _MAX_IDLE:
            self._forget_idle()

    def correct(self, tenant: str, num_tokens: int) -> None:
        """It turned out to be this much more (or less, if negative)."""
        self._times[tenant] = self.time(tenant) + num_tokens / self.weight(tenant)

    def _forget_idle(self) -> None:
        """Of tenants that saved all they may, nothing needs to be known."""
        earliest = self._present - BURST_TOKENS
        self._times = {t: time for t, time in self._times.items() if time > earliest}
        if len(self._times) > _MAX_IDLE:
            latest = sorted(self._times.items(), key=lambda item: item[1])[-_MAX_IDLE // 2 :]
            self._times = dict(latest)
