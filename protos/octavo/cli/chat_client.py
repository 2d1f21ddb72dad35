"""Streams answers from `/v1/chat/completions` of any OpenAI-compatible server.

Must not know: terminals. Entry points: `ChatClient`, `AnswerStream`.
"""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from octavo.errors import OctavoError

# To the first byte a long prompt on a slow machine may take minutes.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_MAX_ERROR_CHARACTERS = 500


class AnswerStream:
    """One answer as it comes: iterate over its text; then the counts are there.

    Times in seconds. `num_tokens` is the server's count, or that of text events if it sent none.
    """

    def __init__(self, response: httpx.Response, started_s: float) -> None:
        self._response = response
        self._started_s = started_s
        self._first_s = self._last_s = 0.0
        self.num_tokens = 0
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None

    @property
    def ttft_s(self) -> float:
        """From the request to the first text; 0 if none came."""
        return self._first_s - self._started_s if self._first_s else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token; None if there is no telling."""
        elapsed_s = self._last_s - self._first_s
        return (self.num_tokens - 1) / elapsed_s if self.num_tokens > 1 and elapsed_s else None

    def __iter__(self) -> Iterator[str]:
        """Pieces of text. Raises OctavoError if the stream fails or breaks off."""
        is_done = False
        for line in self._response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                # Read on to the end, so that the next question finds the connection open.
                is_done = True
            elif text := self._take(_parsed(data)):
                yield text
        if not (is_done or self.finish_reason):
            raise OctavoError("the server broke the answer off")

    def _take(self, event: dict[str, Any]) -> str:
        if error := event.get("error"):
            raise OctavoError(f"the answer failed: {_message_of(error)}")
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]
            self.num_prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.num_cached_tokens = details.get("cached_tokens") or 0
        if not event.get("choices"):
            return ""
        choice = event["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text = (choice.get("delta") or {}).get("content") or ""
        if text:
            self._last_s = time.perf_counter()
            self._first_s = self._first_s or self._last_s
            # Until the usage comes, which a stopped answer never sees.
            self.num_tokens += 1
        return text


class ChatClient:
    """One server. Every method raises OctavoError with a sentence for the user."""

    def __init__(self, base: str, api_key: str | None) -> None:
        """`base`: what `api_base` returns."""
        self.base = base
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(timeout=_TIMEOUT, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names that the server serves, its default first."""
        with self._translated():
            response = self._http.get(f"{self.base}/models")
        _check(response)
        try:
            return [item["id"] for item in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise OctavoError(f"{self.base} is no OpenAI-compatible API") from error

    @contextmanager
    def answer(self, body: dict[str, Any]) -> Generator[AnswerStream]:
        """POST `body`, streaming. Leaving the block early hangs up, which cancels the answer."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started_s = time.perf_counter()
        url = f"{self.base}/chat/completions"
        with self._translated(), self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                response.read()
                _check(response)
            yield AnswerStream(response, started_s)

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise OctavoError(
                f"no server answers at {self.base} ({error}): start one with `octavo serve`, "
                "or say with --url where it is"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise OctavoError(f"lost the server at {self.base}: {reason}") from error


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if status == 200:
        return
    try:
        reason = _message_of(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        reason = response.text[:_MAX_ERROR_CHARACTERS].strip() or response.reason_phrase
    hint = " (give --api-key, or set OCTAVO_API_KEY)" if status == 401 else ""
    raise OctavoError(f"the server answers {status}: {reason}{hint}")


def _message_of(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise OctavoError(f"the server sent what is no JSON: {data[:200]!r}") from error
    if not isinstance(event, dict):
        raise OctavoError(f"the server sent no JSON object: {data[:200]!r}")
    return event
