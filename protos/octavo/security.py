"""How Octavo's services prove to each other who they are: certificates, and a shared token.

Both are options and independent. With certificates every server asks its clients for theirs.
The token travels as metadata of each call, once per call and never per message; servers that
have one refuse calls without it, but for health probes. Must not know: any service's messages.
Entry points: `Security.of`, `public_security`.
"""

import functools
import hmac
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import grpc.aio

from octavo.errors import ConfigurationError
from octavo.setting import environment_name
from octavo.settings import CommonSettings, RouterSettings
from octavo.tls import Renewal, TlsFiles

TOKEN_KEY = "octavo-internal-token"
_OPEN_METHODS = "/grpc.health.v1.Health/"
_REFUSAL = "the internal token is missing or wrong: set OCTAVO_INTERNAL_TOKEN alike everywhere"


@dataclass(frozen=True, slots=True)
class Security:
    """One process's means. `tokens`: the first is sent, each is accepted.

    `server_name`: what peers' certificates must name; "" = the host that is dialled.
    """

    tls: TlsFiles | None = None
    server_name: str = ""
    tokens: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, settings: CommonSettings) -> "Security":
        """As the settings want it. Raises ConfigurationError for files that aren't right."""
        tls = _files("tls", settings.tls_cert, settings.tls_key, settings.tls_ca)
        if tls is not None and not tls.ca:
            raise ConfigurationError(
                "OCTAVO_TLS_CA: is needed beside OCTAVO_TLS_CERT: services ask each other for "
                "certificates that it signed",
                param="tls_ca",
            )
        tokens = tuple(filter(None, map(str.strip, settings.internal_token.split(","))))
        if not all(token.isascii() and token.isprintable() for token in tokens):
            raise ConfigurationError(
                "OCTAVO_INTERNAL_TOKEN: must be printable ASCII", param="internal_token"
            )
        return cls(tls, settings.tls_server_name, tokens)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What a server listens with; None = plaintext. Raises ConfigurationError."""
        files = self.tls
        if files is None:
            return None

        def make() -> Any:
            cert, key, ca = files.read()
            return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

        renewal = Renewal(files, make)
        return grpc.dynamic_ssl_server_credentials(
            renewal.made,
            renewal.renewed,  # type: ignore[arg-type] - None is "as before"; its stub forgot
            require_client_authentication=bool(files.ca),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """What a new channel dials with; None = plaintext. Raises ConfigurationError."""
        if self.tls is None:
            return None
        cert, key, ca = self.tls.read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def channel_options(self) -> list[tuple[str, Any]]:
        if self.tls is None or not self.server_name:
            return []
        return [("grpc.ssl_target_name_override", self.server_name)]

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What a server puts before all others."""
        return [TokenGuard(self.tokens)] if self.tokens else []

    def sign(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """The channel, with the token on each of its calls."""
        return _TokenChannel(channel, self.tokens[0]) if self.tokens else channel  # type: ignore[return-value]


OPEN = Security()


def public_security(settings: RouterSettings) -> Security:
    """The router's doors: a certificate of their own, clients' only if asked for.

    Raises ConfigurationError.
    """
    cert, key, ca = settings.public_tls_cert, settings.public_tls_key, settings.public_tls_ca
    return Security(_files("public_tls", cert, key, ca))


def _files(name: str, cert: str, key: str, ca: str) -> TlsFiles | None:
    """Raises ConfigurationError if only some are given, or what they hold isn't right."""
    if not (cert or key or ca):
        return None
    for part, path in (("cert", cert), ("key", key)):
        if not path:
            raise ConfigurationError(
                f"{environment_name(f'{name}_{part}')}: is missing beside the other {name} files",
                param=f"{name}_{part}",
            )
    files = TlsFiles(name, cert, key, ca)
    files.read()
    return files


class TokenGuard(grpc.aio.ServerInterceptor):
    """Ends calls that don't bring one of `tokens`, before their method hears of them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = [token.encode() for token in tokens]
        self._refusing = grpc.stream_stream_rpc_method_handler(_refuse)  # type: ignore[arg-type]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method.startswith(_OPEN_METHODS) or self._knows(handler_call_details):
            return await continuation(handler_call_details)
        return self._refusing

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        """Compares every token, in a time that tells nothing of which one nearly fits."""
        given = [value for key, value in details.invocation_metadata or () if key == TOKEN_KEY]
        if len(given) != 1:
            return False
        token = given[0].encode() if isinstance(given[0], str) else given[0]
        return max(hmac.compare_digest(token, known) for known in self._tokens)


async def _refuse(request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:  # noqa: ARG001
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)


class _TokenChannel:
    """A channel whose calls carry the token. Messages don't pass through here, only calls do."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((TOKEN_KEY, token),)

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return made

        def method(*arguments: Any, **options: Any) -> Any:
            call = made(*arguments, **options)

            @functools.wraps(call.__call__)
            def with_token(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
                return call(*arguments, metadata=(*(metadata or ()), *self._metadata), **options)

            return with_token

        return method

    async def __aenter__(self) -> "_TokenChannel":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._channel.close()
