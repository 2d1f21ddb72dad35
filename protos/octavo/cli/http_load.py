"""Sends a workload's requests to `/v1/completions` at once and times the streamed answers.

Speaks HTTP/1.1 by itself: a general client takes longer to read a frame than the router to
write it. Entry points: `run_http`; `open_stream` for other loads.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from octavo.cli.measurement import RequestTiming, Run
from octavo.cli.workloads import BenchRequest
from octavo.errors import OctavoError

OnTokens = Callable[[int], None]
_READ_BYTES = 1 << 16
# More than the stream's last two events take.
_TAIL_BYTES = 1 << 12
_MAX_ERROR_BYTES = 500
_DATA, _DONE = b"data: ", b"data: [DONE]"
_ENDS = (b"}\n\n", b"}\r\n\r\n")
# What the usage comes in: an event without a token, in a read of its own or not.
_EMPTY = (b'"choices":[]', b'"choices": []')


async def run_http(
    url: str,
    model: str,
    requests: Sequence[BenchRequest],
    sampling: dict[str, Any],
    on_tokens: OnTokens,
    api_key: str | None = None,
) -> Run:
    """Send `requests` to the server at `url` (http://host:port), all at once."""
    timings: list[RequestTiming] = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            timing = RequestTiming(len(request.token_ids), time.perf_counter())
            timings.append(timing)
            body = {
                "model": model,
                "prompt": list(request.token_ids),
                "max_tokens": request.num_output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **sampling,
            }
            group.create_task(_complete(url, json.dumps(body), timing, on_tokens, api_key))
    return Run(tuple(timings))


class HttpStatusError(OctavoError):
    """The server answered with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Streaming(NamedTuple):
    """An answer whose head was read (in lower case), the body still to come."""

    sent_s: float
    head: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def open_stream(url: str, body: str, api_key: str | None) -> Streaming:
    """POST the JSON `body` to `url` on a connection of its own; the caller closes the writer.

    Raises OSError, EOFError (no whole answer), HttpStatusError.
    """
    parts = urlsplit(url)
    is_https = parts.scheme == "https"
    port = parts.port or (443 if is_https else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_https or None)
    try:
        # Before the write: after it the server may have begun already.
        sent_s = time.perf_counter()
        writer.write(_head(parts.path, parts.netloc, body, api_key) + body.encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode(errors="replace")
        words = status.split()
        code = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        if code != 200:
            answer = (await reader.read())[:_MAX_ERROR_BYTES].decode(errors="replace")
            raise HttpStatusError(f"{url} answered {status}: {answer}", code)
    except BaseException:
        writer.close()
        raise
    return Streaming(sent_s, head.lower(), reader, writer)


async def _complete(
    url: str, body: str, timing: RequestTiming, on_tokens: OnTokens, api_key: str | None
) -> None:
    sent_s, _, reader, writer = await open_stream(f"{url}/v1/completions", body, api_key)
    timing.submitted_s = sent_s
    try:
        await _read_frames(reader, timing, on_tokens)
    finally:
        writer.close()


async def _read_frames(
    reader: asyncio.StreamReader, timing: RequestTiming, on_tokens: OnTokens
) -> None:
    """Read to the end. A frame is one read: what arrived together was sent together."""
    tail = b""
    num_told = num_ended = num_empty = 0
    while data := await reader.read(_READ_BYTES):
        now = time.perf_counter()
        num_ended += sum(_count(mark, tail, data) for mark in _ENDS)
        num_empty += sum(_count(mark, tail, data) for mark in _EMPTY)
        tail = (tail + data)[-_TAIL_BYTES:]
        if (num_new := num_ended - num_empty - num_told) > 0:
            timing.frame(now)
            num_told += num_new
            on_tokens(num_new)
        usage = _usage(tail) if _DONE in tail else None
        if usage:
            timing.num_output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            timing.num_cached_tokens = details.get("cached_tokens", 0)
    if not timing.num_output_tokens:
        raise OctavoError(f"the stream ended without usage: {tail[-500:]!r}")
    on_tokens(timing.num_output_tokens - num_told)


def _count(mark: bytes, tail: bytes, data: bytes) -> int:
    """How often `mark` ends in `data`: the reads may have cut it in two."""
    return (tail[-len(mark) + 1 :] + data).count(mark)


def _usage(tail: bytes) -> dict[str, Any] | None:
    """The usage in the stream's last event."""
    for line in reversed(tail.split(b"\n")):
        line = line.strip()
        if line.startswith(_DATA) and line != _DONE:
            event = json.loads(line.removeprefix(_DATA))
            if "error" in event:
                raise OctavoError(f"the stream failed: {event['error']}")
            return event.get("usage")
    return None


def _head(path: str, host: str, body: str, api_key: str | None) -> bytes:
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body.encode())}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
