"""Frames: strict JSON, one event, nothing raw that a client could take for a line's end."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import OverloadedError
from octavo_router import sse
from octavo_router.sse import FrameTemplate, error_frame
from tests.fakes.router_process import byte_scheduler, running_router, until
from tests.sse_parser import parse

HEAD = {"id": "x-1", "object": "o", "created": 5, "model": 'we"ird\u2028name'}


def template(has_usage: bool = False) -> FrameTemplate:
    return FrameTemplate(
        HEAD,
        before_text='"delta":{"content":',
        after_text="}",
        empty='"delta":{}',
        num_choices=3,
        has_usage=has_usage,
    )


def event(frame: bytes) -> dict[str, Any]:
    assert frame.isascii()
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    assert not any(byte < 0x20 for byte in frame[:-2])
    return json.loads(frame[6:])


@given(st.text(), st.integers(0, 2), st.booleans())
def test_any_text_is_one_event(text: str, index: int, has_usage: bool) -> None:
    frames = template(has_usage)
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    usage = {"usage": None} if has_usage else {}
    assert event(frames.text(index, text)) == {**HEAD, **usage, "choices": [choice]}
    assert frames.text(index, text) == frames.chunk(index, text)
    choice["finish_reason"] = "stop"
    assert event(frames.chunk(index, text, finish="stop"))["choices"] == [choice]


def test_the_other_frames() -> None:
    frames = template(has_usage=True)
    assert event(frames.chunk(1, None, '{"content":[]}', "length"))["choices"] == [
        {"index": 1, "delta": {}, "logprobs": {"content": []}, "finish_reason": "length"}
    ]
    assert event(frames.usage({"total_tokens": 3})) == {
        **HEAD,
        "choices": [],
        "usage": {"total_tokens": 3},
    }
    error = OverloadedError("full\n\nnow\u2028", retry_after_ms=5)
    assert event(error_frame(error)) == error.openai_body()


def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.03)

    async def main() -> None:
        fake = byte_scheduler()
        async with running_router(fake) as router:
            fake.is_paused = True
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            async with router.http.stream("POST", "/v1/completions", json=body) as answer:
                # Headers come before the first token, comments while there is none.
                assert answer.status_code == 200
                data = b""
                async for part in answer.aiter_raw():
                    data += part
                    if data.count(b": keep-alive\n\n") >= 2:
                        fake.is_paused = False
            stream = parse(data)
            assert len(stream.comments) >= 2
            assert set(stream.comments) == {"keep-alive"}
            assert len(stream.text()) == 3

    asyncio.run(main())


def test_a_reader_that_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(sse, "MAX_STALL_S", 0.05)

    async def main() -> None:
        fake = byte_scheduler(tokens_per_step=50, max_model_len=1 << 20, interval_s=0.001)
        async with running_router(fake) as router:
            writer = await router.open_stalled({"prompt": "x", "n": 64, "max_tokens": 10**5})
            await until(lambda: bool(fake.cancels))
            assert router.outcomes() == {("completions", "cancelled"): 1}
            writer.transport.abort()

    asyncio.run(main())
