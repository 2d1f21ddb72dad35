"""The outermost ASGI layer: CORS, API keys, request ids, and the last line of defence.

A browser's preflight (OPTIONS) needs no key; every other path does, except those that probes
and scrapers read, and the files of the status page. Whatever goes wrong below leaves as an
OpenAI-shaped error with all of these headers. HEAD is answered as GET is, without its body. Must
not know: endpoints. Entry point: `Edge`.
"""

import json
import logging
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import AuthenticationError, OctavoError
from octavo_router.auth import KeyRing
from octavo_router.requests import clean_request_id
from octavo_router.sse import SERVER_SEND

log = logging.getLogger(__name__)
# The scope's entry for a function: headers that tell a tenant what is left of its quota.
QUOTA_HEADERS = "octavo.quota_headers"
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
CORS_HEADERS = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", b"X-Request-Id, Retry-After"),
)
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
    (b"access-control-max-age", b"600"),
    (b"vary", b"Access-Control-Request-Headers"),
)
_MAX_ALLOW_HEADERS = 1024
# The next request is another router's.
_CLOSE = (b"connection", b"close")
# All that a client learns of a failure of ours.
FAILURE = "the router failed; see its log"
Headers = Sequence[tuple[bytes, bytes]]


def error_headers(error: OctavoError) -> dict[str, str]:
    """Headers that an error's status calls for."""
    headers: dict[str, str] = {}
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(max(1, -(-error.retry_after_ms // 1000)))
    return headers


def trace_of(error: BaseException) -> str:
    """Where an error of ours arose. Not what it says: that may quote a prompt, and prompts are
    never logged."""
    lines = traceback.format_tb(error.__traceback__)
    return f"{type(error).__name__} at\n{''.join(lines).rstrip()}"


class Edge:
    """Wraps the whole application; `on_refused` hears the path of what had no good key."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        on_refused: Callable[[str], None],
        open_paths: Set[str] = OPEN_PATHS,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.app = app
        self._keys = keys
        self._on_refused = on_refused
        self._open_paths = open_paths
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: Headers = scope["headers"]
        given = _first(headers, b"x-request-id")
        request_id = clean_request_id(given.decode("latin-1") if given is not None else None)
        scope["octavo.request_id"] = request_id
        if scope["method"] == "OPTIONS":
            extra = [*_extra_headers(request_id), *_PREFLIGHT, _allowed(headers)]
            await _send(send, 204, extra, b"")
            return
        is_started = False

        async def send_extra(message: Message) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                # A body may have brought an id of its own by now.
                extra = _extra_headers(scope["octavo.request_id"])
                quota = scope[QUOTA_HEADERS]() if QUOTA_HEADERS in scope else {}
                more = [(name.encode(), text.encode()) for name, text in quota.items()]
                if more:
                    more.append((b"access-control-expose-headers", ", ".join(quota).encode()))
                if self._is_draining():
                    more.append(_CLOSE)
                message["headers"] = [*message.get("headers", ()), *extra, *more]
            await send(message)

        try:
            if scope["path"] not in self._open_paths:
                tenant = self._keys.authenticate([v for k, v in headers if k == b"authorization"])
                scope["octavo.tenant"] = tenant
            scope[SERVER_SEND] = send
            if scope["method"] == "HEAD":
                # A copy: the server's own says that no body goes out.
                scope = {**scope, "method": "GET"}
            await self.app(scope, receive, send_extra)
        except OctavoError as error:
            self._on_refused(scope["path"])
            await _send_error(send_extra, error)
        except Exception as error:
            log.error("request %s failed: %s", request_id, trace_of(error))
            if not is_started:
                await _send_error(send_extra, OctavoError(FAILURE))


def _extra_headers(request_id: str) -> Headers:
    return *CORS_HEADERS, (b"x-request-id", request_id.encode())


def _first(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _allowed(headers: Headers) -> tuple[bytes, bytes]:
    """The headers that the browser asked for: none is dangerous here."""
    asked = _first(headers, b"access-control-request-headers") or b"authorization, content-type"
    if len(asked) > _MAX_ALLOW_HEADERS or not asked.isascii():
        asked = b"authorization, content-type"
    return b"access-control-allow-headers", asked


async def _send_error(send: Send, error: OctavoError) -> None:
    headers = [(k.lower().encode(), v.encode()) for k, v in error_headers(error).items()]
    headers.append((b"content-type", b"application/json"))
    body: Any = json.dumps(error.openai_body()).encode()
    await _send(send, error.kind.http_status, headers, body)


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    if status != 204:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
