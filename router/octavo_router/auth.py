"""API keys: `key[:tenant]`, compared in constant time.

Keys from a file are read again when it changes, so that they rotate without a restart.
Must not know: HTTP frameworks, grpc. Entry points: `KeyRing.from_setting`,
`KeyRing.authenticate`, `follow_file`.
"""

import asyncio
import hmac
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import AuthenticationError, ConfigurationError
from octavo.file_stamp import stamp_of
from octavo.setting import FileSecret

log = logging.getLogger(__name__)
_SCHEME = "bearer"
_SEPARATORS = re.compile(r"[,\r\n]")
# Between two looks at the file.
FOLLOW_S = 2.0


@dataclass(slots=True)
class KeyRing:
    """The accepted keys and whose they are, one by one. Empty = the service is open."""

    tenants: tuple[tuple[bytes, str], ...]

    @classmethod
    def from_setting(cls, text: str) -> "KeyRing":
        """Parse `key[:tenant],key[:tenant]`, in a file also one a line.

        Raises ConfigurationError without the key.
        """
        tenants: dict[bytes, str] = {}
        parts = filter(None, map(str.strip, _SEPARATORS.split(text)))
        for position, part in enumerate(parts):
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


async def follow_file(keys: KeyRing, secret: FileSecret, every_s: float = FOLLOW_S) -> None:
    """Let `keys` be what the file of `secret` says, until cancelled.

    A file that can't be read, is empty or is wrong leaves the keys as they are.
    """
    seen = secret.stamp
    while True:
        await asyncio.sleep(every_s)
        stamp = stamp_of(secret.path)
        if stamp == seen:
            continue
        seen = stamp
        try:
            tenants = KeyRing.from_setting(FileSecret("api_keys", secret.path)).tenants
        except ConfigurationError as error:
            log.error("%s; the keys that were there stay", error.message)
            continue
        keys.tenants = tenants
        log.info("%d API keys read from %s", len(tenants), secret.path)
