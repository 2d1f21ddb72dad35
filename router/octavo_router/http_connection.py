"""One client's HTTP connection: uvicorn's protocol with the bounds that a public port needs.

    head      at most `max_header_bytes`                              431, 414
    request   all of it within `read_timeout_s`, longer for large     408
    answer    read on by the client within `write_stall_s`            the connection is dropped
    accepts   up to `max_connections` at once                         503

A refusal has the API's error shape; then the connection ends, slowly enough for the client to
read why. Beyond bounds: answers to HTTP/1.0 end with the connection (uvicorn would send chunks,
which HTTP/1.0 doesn't know), an upgrade is declined by ignoring it (the request's body would be
lost), and a client that leaves cancels what runs although it had sent its next request already.
Must not know: routes, what a request means. Entry point: `HttpConnection`.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from octavo.errors import (
    HeadersTooLargeError,
    InvalidRequestError,
    MethodNotAllowedError,
    OctavoError,
    RequestTimeoutError,
    UnavailableError,
    UrlTooLongError,
)
from octavo_router.edge import CORS_HEADERS, error_headers

log = logging.getLogger(__name__)
# A body may take a second longer for each of these.
MIN_BYTES_PER_S = 16 << 10
# For a client that was answered to stop sending.
LINGER_S = 5.0
# The same when there is no room for it.
BUSY_LINGER_S = 0.5
# Requests sent ahead of answers; beyond these the socket is not read until one is answered.
MAX_PIPELINED = 16
_BUSY_RETRY_MS = 1000
# Of the hop before this one: none of the application's business.
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one client may take. Bytes and seconds; see the module."""

    max_header_bytes: int
    read_timeout_s: float
    write_stall_s: float
    max_connections: int


class HttpConnection(HttpToolsProtocol):
    """See the module."""

    def __init__(self, *args: Any, bounds: Bounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        # The request that the application works on; `cycle` is the last one that arrived.
        self._running: RequestResponseCycle | None = None
        self._is_head = True
        self._is_arriving = False
        self._is_refused = False
        self._refusal: OctavoError | None = None
        self._num_received = 0
        self._arriving_since = 0.0
        self._read_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_reading(self._bounds.read_timeout_s)
        if len(self.connections) > self._bounds.max_connections:
            error = UnavailableError(
                "too many connections; try again", retry_after_ms=_BUSY_RETRY_MS
            )
            self._refuse(error, BUSY_LINGER_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching_reading()
        self._stop_watching_writing()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells only the last request that arrived.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    # Bytes from the client.

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._num_received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._decline_upgrade(data[error.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("the bytes aren't an HTTP request")
            return
        if self._is_arriving:
            if self._is_head and self._num_received > self._bounds.max_header_bytes:
                self._refuse(self._too_large())
        elif self._read_timer is None and not self._is_answering:
            # Line ends between requests are no request: they buy no time.
            self._watch_reading(self._bounds.read_timeout_s)

    def _too_large(self) -> OctavoError:
        limit = self._bounds.max_header_bytes
        kind = UrlTooLongError if len(self.url) > limit // 2 else HeadersTooLargeError
        return kind(f"URL and headers have more than {limit} bytes")

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on as if the client had not offered another protocol, as the standard wants it.

        The parser takes what follows such a head for the other protocol's bytes; so the head is
        fed again without the offer.
        """
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in _UPGRADE_HEADERS:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._num_received = 0
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_head = self._is_arriving = True
        self._arriving_since = self.loop.time()
        self._watch_reading(self._bounds.read_timeout_s)

    def on_headers_complete(self) -> None:
        self._is_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._bounds.max_header_bytes:
            self._give_up(self._too_large())
        if self.parser.should_upgrade():
            method: bytes = self.parser.get_method()
            if method == b"CONNECT":
                self._give_up(MethodNotAllowedError("this is no proxy: it doesn't take CONNECT"))
            self.scope["method"] = method.decode("ascii")
            return
        super().on_headers_complete()
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            # An end of the connection is only seen while it is read.
            self.flow.resume_reading()

    def _give_up(self, error: OctavoError) -> NoReturn:
        """Leave the parser; `data_received` refuses."""
        self._refusal = error
        raise error

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_arriving = False
        self._num_received = 0
        self._stop_watching_reading()
        super().on_message_complete()

    # Answers.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            # Such a client takes an interim answer for the answer (RFC 9110, 10.1.1).
            cycle.waiting_for_100_continue = False
            cycle.send = _until_close(cycle)  # type: ignore[method-assign]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_arriving and self._running is self.cycle:
            # Refused before it was all here: the rest is read and dropped, for a while.
            self._watch_reading(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        """The request can't be parsed, or `_refusal` says what else is wrong."""
        self._refuse(self._refusal or InvalidRequestError(msg))

    def _refuse(self, error: OctavoError, linger_s: float = LINGER_S) -> None:
        """Answer without the application, then end the connection."""
        self._is_refused = True
        self._unset_keepalive_if_required()
        running = self._running
        if running is not None and not running.response_complete:
            if running.response_started or running is not self.cycle:
                # In the middle of an answer there is no room for another one.
                self.transport.close()
                return
            running.disconnected = True
            running.message_event.set()
        body = json.dumps(error.openai_body()).encode()
        lines = [
            *CORS_HEADERS,
            *(
                (name.lower().encode(), text.encode())
                for name, text in error_headers(error).items()
            ),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%s: %s\r\n" % line for line in lines)
        self.transport.write(STATUS_LINE[error.kind.http_status] + head + b"\r\n" + body)
        # Closed with bytes unread, the kernel would reset the connection and the client might
        # lose the answer: say that it is all, and wait a little for the client to leave.
        self.transport.write_eof()
        self._watch_reading(linger_s)

    # Time to send.

    def _watch_reading(self, timeout_s: float) -> None:
        self._stop_watching_reading()
        self._read_timer = self.loop.call_later(timeout_s, self._check_reading)

    def _stop_watching_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_reading(self) -> None:
        """The time is over: for a whole request, a first byte, or an answered client's rest."""
        self._read_timer = None
        is_answering = self._is_answering
        if self._is_refused or not self._is_arriving or (not is_answering and not self._is_head):
            self.transport.close()
            return
        timeout_s = self._bounds.read_timeout_s
        is_next = self._is_head or self._running is not self.cycle
        if self.flow.read_paused or (is_answering and is_next):
            # It waits for us: for its bytes to be taken, or for its turn.
            self._arriving_since = self.loop.time()
            self._watch_reading(timeout_s)
            return
        allowed_s = timeout_s + self._num_received / MIN_BYTES_PER_S
        left_s = self._arriving_since + allowed_s - self.loop.time()
        if left_s > 0 and not self._is_head:
            self._watch_reading(left_s)
            return
        self._refuse(
            RequestTimeoutError(
                f"the request didn't arrive within {allowed_s:.3g} s: send it faster"
            )
        )

    # Time to read.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_writing()

    def _watch_writing(self) -> None:
        self._stop_watching_writing()
        stall_s = self._bounds.write_stall_s
        self._stall_timer = self.loop.call_later(stall_s, self._check_writing)

    def _stop_watching_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_writing(self) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent < self._num_unsent:
            self._num_unsent = num_unsent
            self._watch_writing()
            return
        log.info("a client has not read for %g s: disconnected", self._bounds.write_stall_s)
        self.transport.abort()


def _until_close(cycle: RequestResponseCycle) -> Send:
    """`cycle.send` for HTTP/1.0: a body of unknown length ends with the connection."""
    send = cycle.send
    is_unsized = False

    async def send_plain(message: Message) -> None:
        nonlocal is_unsized
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_unsized = b"content-length" not in names
            if is_unsized:
                cycle.chunked_encoding = False
        elif is_unsized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return send_plain
