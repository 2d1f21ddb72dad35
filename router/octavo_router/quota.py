"""What tenants may take per minute, as the operator wrote it.

Must not know: meters, Redis. Entry points: `Quota`, `QuotaTable.from_setting`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigurationError

_EVERYBODY = "*"
_PART = re.compile(r"([1-9][0-9]{0,11})([rt])/m")


@dataclass(frozen=True, slots=True)
class Quota:
    """Per minute; 0 = no limit. Tokens are those of prompts and answers together."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class QuotaTable:
    """Quotas by tenant; `default` is that of every other tenant, each on its own."""

    by_tenant: Mapping[str, Quota]
    default: Quota | None

    @classmethod
    def from_setting(cls, parts: Sequence[str]) -> "QuotaTable":
        """Parse `tenant=60r/m:100000t/m` each. Raises ConfigurationError."""
        by_tenant: dict[str, Quota] = {}
        for part in parts:
            tenant, _, text = part.rpartition("=")
            if not tenant or tenant in by_tenant:
                raise _mistake(part, "a tenant, once")
            by_tenant[tenant] = _parse(part, text)
        default = by_tenant.pop(_EVERYBODY, None)
        return cls(by_tenant, default)

    def of(self, tenant: str) -> Quota | None:
        """None = no limit."""
        return self.by_tenant.get(tenant, self.default)

    def __bool__(self) -> bool:
        return bool(self.by_tenant) or self.default is not None


def _parse(part: str, text: str) -> Quota:
    limits: dict[str, int] = {}
    for limit in text.split(":"):
        found = _PART.fullmatch(limit.strip())
        if found is None or found[2] in limits:
            raise _mistake(part, "limits such as 60r/m, 100000t/m or 60r/m:100000t/m")
        limits[found[2]] = int(found[1])
    return Quota(limits.get("r", 0), limits.get("t", 0))


def _mistake(part: str, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"OCTAVO_TENANT_QUOTAS: {part!r} must name {wanted}", param="tenant_quotas"
    )
