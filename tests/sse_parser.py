"""A strict parser of completion streams: it accepts what the API promises and nothing else."""

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

# Bytes that some clients take for a line's end: they must never stand raw in a frame.
_FORBIDDEN = ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\u0085", "\u2028", "\u2029")


@dataclass
class Stream:
    """A whole stream: its chunks in order, what they add up to, and its comments."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def text(self, index: int = 0) -> str:
        return "".join(_text_of(c) for c in self.choices if c["index"] == index)

    def finish(self, index: int = 0) -> str | None:
        reasons = [c["finish_reason"] for c in self.choices if c["index"] == index]
        return reasons[-1] if reasons else None

    def logprobs(self, index: int = 0) -> list[dict[str, Any]]:
        """Chat: the joined content lists."""
        parts = [c["logprobs"] for c in self.choices if c["index"] == index and c["logprobs"]]
        return [entry for part in parts for entry in part["content"]]

    def text_logprobs(self, index: int = 0) -> dict[str, list[Any]]:
        """Completions: the joined four lists."""
        joined: dict[str, list[Any]] = {}
        for choice in self.choices:
            if choice["index"] == index and choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    joined.setdefault(name, []).extend(values)
        return joined


def parse(data: bytes, *, num_choices: int | None = 1) -> Stream:
    """Check framing and order of a complete stream. `num_choices` None = it may break off."""
    text = data.decode("utf-8")
    for char in _FORBIDDEN:
        assert char not in text, f"raw {char!r} in the stream"
    assert text.endswith("\n\n"), "the stream doesn't end with an event's end"
    stream = Stream()
    is_done = False
    for event in text[:-2].split("\n\n"):
        assert not is_done, f"after [DONE]: {event!r}"
        assert "\n" not in event, f"more than one line: {event!r}"
        if event.startswith(":"):
            stream.comments.append(event[1:].strip())
            continue
        assert event.startswith("data: "), event
        payload = event.removeprefix("data: ")
        if payload == "[DONE]":
            is_done = True
            continue
        assert stream.error is None, f"after an error: {payload!r}"
        chunk = json.loads(payload, parse_constant=_refuse)
        if "error" in chunk:
            stream.error = chunk["error"]
            assert set(stream.error or {}) == {"message", "type", "param", "code"}
            continue
        assert stream.usage is None, f"after the usage: {payload!r}"
        if not chunk["choices"]:
            stream.usage = chunk["usage"]
            assert stream.usage is not None
        stream.chunks.append(chunk)
    assert is_done, "no [DONE]"
    _check(stream, num_choices)
    return stream


def _check(stream: Stream, num_choices: int | None) -> None:
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in stream.chunks}) <= 1, f"several {name}"
    if stream.usage is not None:
        assert all(chunk["usage"] is None for chunk in stream.chunks[:-1])
    else:
        assert all("usage" not in chunk or stream.error for chunk in stream.chunks)
    seen: dict[int, list[dict[str, Any]]] = {}
    for choice in stream.choices:
        seen.setdefault(choice["index"], []).append(choice)
    if num_choices is not None and stream.error is None:
        assert sorted(seen) == list(range(num_choices))
    for index, parts in seen.items():
        reasons = [part["finish_reason"] for part in parts]
        assert all(reason is None for reason in reasons[:-1]), f"choice {index} went on"
        if stream.error is None:
            assert reasons[-1] is not None, f"choice {index} has no finish"
        if "delta" in parts[0]:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert not any("role" in part["delta"] for part in parts[1:])


def _text_of(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} in the stream")
