"""One request to a server, timed: what came of it, and when.

Must not know: arrivals, statistics. Entry points: `Server`, `send`, `fill`.
"""

import asyncio
import errno
import json
import time
from dataclasses import dataclass, field
from typing import Any, Self

from octavo.cli.http_load import HttpStatusError, open_stream
from octavo.cli.measurement import RequestTiming
from octavo.cli.sse_reader import EventReader

_READ_BYTES = 1 << 16
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go and what all of them say."""

    label: str
    base: str
    model: str
    is_chat: bool
    api_key: str | None = None
    timeout_s: float = 600.0
    # Fields of every request: sampling, ignore_eos, whatever a server wants.
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def endpoint(self) -> str:
        return f"{self.base}/{'chat/completions' if self.is_chat else 'completions'}"

    def body(self, prompt: list[int] | str, max_tokens: int, seed: int | None) -> str:
        content: dict[str, Any] = {"prompt": prompt}
        if self.is_chat:
            content = {"messages": [{"role": "user", "content": prompt}]}
        if seed is not None:
            content["seed"] = seed
        whole = {
            "model": self.model,
            **content,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        return json.dumps(whole)


@dataclass(slots=True)
class Outcome:
    """What came of a request. `timing.submitted_s` is when it was due, if it had a time."""

    timing: RequestTiming
    # Sent this much later than due: the measuring client's own fault.
    lag_s: float = 0.0
    error: str | None = None
    detail: str = ""

    @classmethod
    def begun(cls, num_prompt_tokens: int, due_s: float | None) -> Self:
        """Of a request that is sent now."""
        now_s = time.perf_counter()
        timing = RequestTiming(num_prompt_tokens, now_s if due_s is None else due_s)
        return cls(timing, 0.0 if due_s is None else now_s - due_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one."""
        timing = self.timing
        if timing.num_output_tokens < 2:
            return None
        return (timing.last_s - timing.first_s) / (timing.num_output_tokens - 1)

    @property
    def ttft_s(self) -> float:
        return self.timing.first_s - self.timing.submitted_s

    @property
    def e2e_s(self) -> float:
        return self.timing.last_s - self.timing.submitted_s


class BadAnswerError(Exception):
    """The stream holds what it must not, or lacks what it must have; `args[0]` is the kind."""


async def send(server: Server, body: str, num_prompt_tokens: int, due_s: float | None) -> Outcome:
    """Send `body` now and read the answer to its end; failures are outcomes too."""
    outcome = Outcome.begun(num_prompt_tokens, due_s)
    await fill(outcome, server, body)
    return outcome


async def fill(outcome: Outcome, server: Server, body: str) -> None:
    """Send `body` now; the outcome grows with each frame, until the answer's end."""
    try:
        async with asyncio.timeout(server.timeout_s):
            await _stream(server, body, outcome.timing)
    except TimeoutError:
        outcome.error = "timeout"
    except HttpStatusError as error:
        outcome.error, outcome.detail = f"http {error.status}", error.message
    except BadAnswerError as error:
        outcome.error, outcome.detail = error.args
    except (ConnectionResetError, BrokenPipeError, EOFError) as error:
        outcome.error, outcome.detail = "broken off", str(error)
    except OSError as error:
        is_own = error.errno in _OWN_LIMITS
        outcome.error, outcome.detail = "client's limits" if is_own else "connect", str(error)


async def _stream(server: Server, body: str, timing: RequestTiming) -> None:
    _, head, reader, writer = await open_stream(server.endpoint, body, server.api_key)
    events = EventReader(head)
    num_text_events = 0
    is_done = has_usage = False
    try:
        while not is_done and (data := await reader.read(_READ_BYTES)):
            now_s = time.perf_counter()
            num_new = 0
            for payload in _payloads(events, data):
                if payload == b"[DONE]":
                    is_done = True
                    break
                event = _parsed(payload)
                num_new += _has_text(event, is_chat=server.is_chat)
                has_usage |= _take_usage(event, timing)
            # What arrived together is one frame.
            if num_new:
                timing.frame(now_s)
                num_text_events += num_new
    finally:
        writer.close()
    if not (is_done or has_usage):
        raise BadAnswerError("broken off", "the stream ended without [DONE]")
    if not num_text_events:
        raise BadAnswerError("empty answer", "a stream without text")
    timing.num_output_tokens = timing.num_output_tokens or num_text_events


def _payloads(events: EventReader, data: bytes) -> list[bytes]:
    try:
        return events.feed(data)
    except ValueError as error:
        raise BadAnswerError("bad answer", f"broken chunks: {error}") from error


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError as error:
        raise BadAnswerError("bad answer", payload[:200].decode(errors="replace")) from error
    if not isinstance(event, dict):
        raise BadAnswerError("bad answer", payload[:200].decode(errors="replace"))
    if "error" in event:
        raise BadAnswerError("failed in mid-stream", str(event["error"]))
    return event


def _has_text(event: dict[str, Any], *, is_chat: bool) -> bool:
    """Roles, reasons and usage are events without a token."""
    for choice in event.get("choices") or ():
        if not is_chat:
            return bool(choice.get("text"))
        delta = choice.get("delta") or {}
        return bool(delta.get("content") or delta.get("reasoning_content"))
    return False


def _take_usage(event: dict[str, Any], timing: RequestTiming) -> bool:
    usage = event.get("usage")
    if not usage:
        return False
    timing.num_output_tokens = usage["completion_tokens"]
    timing.num_prompt_tokens = usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    timing.num_cached_tokens = details.get("cached_tokens") or 0
    return True
