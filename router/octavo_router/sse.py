"""Server-sent events: frames from pre-rendered templates, one event per write.

A frame is prefix + escaped text + suffix, rendered once per stream; no dictionary and no
json.dumps per token. Text is escaped to ASCII, so neither U+2028, U+0085 nor any control
character can split an event; line ends are LF only. A comment goes out after 15 s of silence.
A client that doesn't read stops only its own task; after `MAX_STALL_S` its work is cancelled.
Must not know: what the tokens mean, schedulers. Entry points: `FrameTemplate`, `EventStream`.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.errors import OctavoError
from octavo_router.generation import Delta, Generation, Usage

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 15.0
MAX_STALL_S = 60.0
LARGE_FRAME_BYTES = 64 << 10
# Key of the ASGI scope under which the outermost layer keeps the server's own `send`.
SERVER_SEND = "octavo.server_send"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold the stream back otherwise.
    (b"x-accel-buffering", b"no"),
)

# How a chunk of a stream with usage says that the counts come later.
NO_USAGE = b'"usage":null'

escape = encode_basestring_ascii


def dumps(value: Any) -> str:
    """Compact ASCII JSON; refuses NaN and Infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def members(values: Mapping[str, Any]) -> str:
    """JSON members to put behind others: `,"name":value` each."""
    return "".join(f",{dumps(name)}:{dumps(value)}" for name, value in values.items())


def error_frame(error: OctavoError) -> bytes:
    """An error after the headers are out."""
    return f"data: {dumps(error.openai_body())}\n\n".encode()


class FrameTemplate:
    """Frames of one stream.

    `head`: fields that all chunks share. `before_text` and `after_text` enclose the escaped text
    in a choice ('"delta":{"content":' and '}'); `empty`: the choice's part without text
    ('"delta":{}'). With `has_usage` every chunk says `"usage":null` and the last one the counts.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        before_text: str,
        after_text: str,
        empty: str,
        num_choices: int,
        has_usage: bool,
    ) -> None:
        self._head = f"data: {dumps(head)[:-1]}," + ('"usage":null,' if has_usage else "")
        self._usage_head = f"data: {dumps(head)[:-1]},"
        self._starts = [f'{self._head}"choices":[{{"index":{i},' for i in range(num_choices)]
        self._texts = [start + before_text for start in self._starts]
        self._after_text = after_text
        self._plain_end = f'{after_text},"logprobs":null,"finish_reason":null}}]}}\n\n'
        self._empty = empty

    def text(self, index: int, text: str) -> bytes:
        """The hot frame: text and nothing else."""
        return f"{self._texts[index]}{escape(text)}{self._plain_end}".encode("ascii")

    def chunk(
        self,
        index: int,
        text: str | None,
        logprobs: str = "null",
        finish: str | None = None,
        more: str = "",
    ) -> bytes:
        """Any frame. `logprobs`: JSON; `more`: the choice's other members, each after a comma."""
        if text is None:
            body = self._starts[index] + self._empty
        else:
            body = f"{self._texts[index]}{escape(text)}{self._after_text}"
        reason = "null" if finish is None else f'"{finish}"'
        end = f',"logprobs":{logprobs},"finish_reason":{reason}{more}}}]}}\n\n'
        return f"{body}{end}".encode("ascii")

    def raw(self, index: int, part: str, more: str = "") -> bytes:
        """A frame whose choice holds `part` (JSON members) and no logprobs or finish.

        `more`: other members of the chunk, each after a comma.
        """
        end = f',"logprobs":null,"finish_reason":null}}]{more}}}\n\n'
        return f"{self._starts[index]}{part}{end}".encode("ascii")

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices."""
        return f'{self._usage_head}"choices":[],"usage":{dumps(usage)}}}\n\n'.encode("ascii")


class Frames(Protocol):
    """How an endpoint writes a stream."""

    def delta(self, delta: Delta) -> Sequence[bytes]: ...
    def end(self, usage: Usage) -> Sequence[bytes]: ...


class EventStream(Response):
    """The ASGI response that drives a generation to its end."""

    def __init__(self, generation: Generation, frames: Frames) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._generation = generation
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        watcher = asyncio.create_task(cancel_on_disconnect(receive, generation))
        pulse = _Pulse(generation)
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            # The layers between here and the server do nothing to a body but cost: frames skip
            # their `send`s, and in a task of its own a wake-up skips their stacked coroutines.
            direct: Send = scope.get(SERVER_SEND, send)
            await asyncio.create_task(self._write_all(direct, pulse))
        finally:
            pulse.stop()
            watcher.cancel()
            generation.close()

    async def _write_all(self, send: Send, pulse: "_Pulse") -> None:
        generation, frames = self._generation, self._frames
        try:
            while not generation.is_finished:
                deltas = await generation.news()
                for delta in deltas:
                    for frame in frames.delta(delta):
                        await _write(send, frame, pulse)
                        if len(frame) > LARGE_FRAME_BYTES:
                            # It took long to make, and the next may too: others come first.
                            await asyncio.sleep(0)
                if not deltas and pulse.is_due():
                    await _write(send, KEEP_ALIVE, pulse)
            for frame in frames.end(generation.usage()):
                await _write(send, frame, pulse)
        except OctavoError as error:
            await _write(send, error_frame(error), pulse)
        await _write(send, DONE, pulse)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, frame: bytes, pulse: "_Pulse") -> None:
    """One event, one write. `send` waits while the client's buffer is over its high mark."""
    message: Message = {"type": "http.response.body", "body": frame, "more_body": True}
    pulse.begin_write()
    await send(message)
    pulse.end_write()


async def cancel_on_disconnect(receive: Receive, generation: Generation) -> None:
    """Cancel the generation when the client leaves. Runs as a task beside the answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


class _Pulse:
    """A stream's clock: comments after silence, an end to work for clients that don't read."""

    def __init__(self, generation: Generation) -> None:
        self._loop = asyncio.get_running_loop()
        self._generation = generation
        self._written_at = self._loop.time()
        self._is_writing = False
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._beat)

    def begin_write(self) -> None:
        self._is_writing = True

    def end_write(self) -> None:
        self._is_writing = False
        self._written_at = self._loop.time()

    def is_due(self) -> bool:
        return self._loop.time() - self._written_at >= KEEP_ALIVE_S

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        silence_s = self._loop.time() - self._written_at
        if self._is_writing and silence_s >= MAX_STALL_S:
            # Its socket is the kernel's to close (TCP_USER_TIMEOUT, see __main__).
            log.info("a client has not read for %d s: cancelled", int(silence_s))
            self._generation.cancel()
            return
        wait_s = KEEP_ALIVE_S - silence_s
        if wait_s <= 0:
            self._generation.nudge()
            wait_s = KEEP_ALIVE_S
        self._timer = self._loop.call_later(wait_s, self._beat)
