"""Certificates in files that may be renewed while the process runs.

Every new connection, at either end, is made with what the files hold then; connections that live
keep what they were made with. Files that are caught half renewed (the key isn't the certificate's
yet) are passed over until they fit. Must not know: gRPC, settings. Entry points: `TlsFiles`,
`Renewal`, `https_context`.
"""

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from octavo.errors import ConfigurationError
from octavo.file_stamp import FileStamp, stamp_of

log = logging.getLogger(__name__)
MadeT = TypeVar("MadeT")


class TlsMaterial(NamedTuple):
    """PEM bytes: a certificate with its chain, its key, and the authorities that are trusted."""

    cert: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; `name` is the settings' prefix, for errors. `ca` "" = none."""

    name: str
    cert: str
    key: str
    ca: str

    def read(self) -> TlsMaterial:
        """What the files hold now. Raises ConfigurationError naming the variable that is wrong."""
        cert, key = self._read("cert"), self._read("key")
        ca = self._read("ca") if self.ca else None
        self.context(ssl.PROTOCOL_TLS_SERVER)
        return TlsMaterial(cert, key, ca)

    def context(self, protocol: int) -> ssl.SSLContext:
        """A context with the files' certificate and authorities. Raises ConfigurationError."""
        context = ssl.SSLContext(protocol)
        try:
            # Without a password: the library would ask the terminal for one.
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise self._wrong(
                "key", f"{self.key} is no key of the certificate in {self.cert}: {_reason(error)}"
            ) from None
        if self.ca:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ssl.SSLError) as error:
                message = f"{self.ca} holds no certificates: {_reason(error)}"
                raise self._wrong("ca", message) from None
        return context

    def stamp(self) -> tuple[FileStamp, ...]:
        """Differs once a file was renewed."""
        return tuple(stamp_of(path) for path in (self.cert, self.key, self.ca) if path)

    def _read(self, part: str) -> bytes:
        path: str = getattr(self, part)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise self._wrong(part, f"{path} can't be read: {error.strerror}") from None

    def _wrong(self, part: str, message: str) -> ConfigurationError:
        setting = f"{self.name}_{part}"
        return ConfigurationError(f"OCTAVO_{setting.upper()}: {message}", param=setting)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return getattr(error, "strerror", None) or str(error)


class Renewal(Generic[MadeT]):
    """What was made of the files, and made anew once they changed. Usable from any thread."""

    def __init__(self, files: TlsFiles, make: Callable[[], MadeT]) -> None:
        """Raises ConfigurationError if the files aren't right."""
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._stamp = files.stamp()
        self.made = make()

    def renewed(self) -> MadeT | None:
        """The new one if the files changed and fit together, else None."""
        with self._lock:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self.made = self._make()
            except ConfigurationError as error:
                log.warning("%s; going on with the certificate that was there", error.message)
                return None
            log.info("certificate in %s renewed", self._files.cert)
            return self.made


def https_context(files: TlsFiles) -> ssl.SSLContext:
    """For an HTTPS server; asks clients for a certificate if `files` has authorities.

    Raises ConfigurationError.
    """

    def make() -> ssl.SSLContext:
        context = files.context(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        if files.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    renewal = Renewal(files, make)
    first = renewal.made

    def on_hello(connection: Any, server_name: str | None, initial: ssl.SSLContext) -> None:  # noqa: ARG001
        renewal.renewed()
        if renewal.made is not first:
            connection.context = renewal.made

    first.sni_callback = on_hello
    return first
