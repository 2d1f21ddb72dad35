"""API keys: `key[:tenant]`, compared in constant time.

Must not know: HTTP frameworks, grpc. Entry points: `KeyRing.from_setting`,
`KeyRing.authenticate`.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import AuthenticationError, ConfigurationError

_SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The accepted keys and whose they are. Empty = the service is open."""

    tenants: tuple[tuple[bytes, str], ...]

    @classmethod
    def from_setting(cls, text: str) -> "KeyRing":
        """Parse `key[:tenant],key[:tenant]`. Raises ConfigurationError without the key."""
        tenants: dict[bytes, str] = {}
        for position, part in enumerate(filter(None, map(str.strip, text.split(",")))):
            key, _, tenant = part.partition(":")
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigurationError(
                    f"OCTAVO_API_KEYS: key number {position + 1} must be printable ASCII "
                    "without spaces",
                    param="api_keys",
                )
            if key.encode() in tenants:
                raise ConfigurationError(
                    f"OCTAVO_API_KEYS: key number {position + 1} appears twice", param="api_keys"
                )
            tenants[key.encode()] = tenant
        return cls(tuple(tenants.items()))

    @property
    def is_open(self) -> bool:
        return not self.tenants

    def authenticate(self, headers: Sequence[bytes]) -> str:
        """The tenant of the one Authorization header. Raises AuthenticationError.

        Every key is compared, so that the time says nothing about which one nearly fits.
        """
        if self.is_open:
            return ""
        if not headers:
            raise AuthenticationError("no API key: send the header 'Authorization: Bearer <key>'")
        if len(headers) > 1:
            raise AuthenticationError("more than one Authorization header: send one")
        scheme, _, key = headers[0].strip().partition(b" ")
        key = key.strip()
        if scheme.lower() != _SCHEME.encode() or not key:
            raise AuthenticationError("the Authorization header must read 'Bearer <key>'")
        found: str | None = None
        for known, tenant in self.tenants:
            if hmac.compare_digest(known, key):
                found = tenant
        if found is None:
            raise AuthenticationError("the API key is not known here")
        return found
