"""Log-probabilities in the shapes of OpenAI's two endpoints, and of the prompt.

A token's text is its bytes as UTF-8; bytes of an incomplete character show as U+FFFD in chat
(whose `bytes` are exact) and as `bytes:\\xf0\\x9f` in completions. A token that the text doesn't
show (special ones that are skipped, the ending id) has its name and no bytes, so that joined
bytes are the text. -inf, which JSON can't say, is -9999.0. Must not know: HTTP.
Entry points: `TokenTexts`, `chat_logprobs`, `CompletionLogprobs`, `prompt_logprobs`.
"""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from octavo_router.flights import TokenLogprob
from octavo_router.generation import PromptPart
from octavo_router.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0


class TokenTexts:
    """How ids are named, and which of them the text shows. `hidden_ids`: those that end it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        hidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden_ids = hidden_ids

    def shown_bytes(self, token_id: int) -> bytes:
        """What an id adds to the text."""
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        if is_skipped or token_id in self._hidden_ids:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def chat_name(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def completion_name(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of_prompt(self, *, shows_special: bool) -> "TokenTexts":
        """The same for an echoed prompt, which nothing ends."""
        return TokenTexts(self._tokenizer, skip_special_tokens=not shows_special)


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one entry per token."""
    content: list[dict[str, Any]] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        chosen = _chat_entry(texts, token_id, entry.logprob)
        chosen["top_logprobs"] = [_chat_entry(texts, i, value) for i, value in entry.top]
        content.append(chosen)
    return content


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.chat_name(token_id),
        "logprob": _finite(logprob),
        "bytes": list(texts.shown_bytes(token_id)),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of one completion: four lists of one entry per token.

    Keeps the place in the text between chunks: offsets count characters of the whole answer,
    an echoed prompt included.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def render(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, list[Any]]:
        return self._render(self._texts, token_ids, logprobs, None)

    def render_prompt(self, prompt: PromptPart, num_top: int) -> dict[str, list[Any]]:
        """The lists' beginning, for an echo: nothing is known of the first token."""
        assert prompt.echo is not None
        texts = self._texts.of_prompt(shows_special=prompt.echo.shows_special)
        rendered = self._render(texts, prompt.token_ids, prompt.logprobs, num_top)
        self._num_chars = len(prompt.echo.text)
        self._decoder.reset()
        return rendered

    def _render(
        self,
        texts: TokenTexts,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        num_top: int | None,
    ) -> dict[str, list[Any]]:
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            name = texts.completion_name(token_id)
            tokens.append(name)
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(texts.shown_bytes(token_id)))
            if entry is None:
                values.append(None)
                tops.append(None)
                continue
            value = _finite(entry.logprob)
            values.append(value)
            top = {texts.completion_name(i): _finite(v) for i, v in entry.top[:num_top]}
            # The chosen token always has its own value, outside the top too.
            top.setdefault(name, value)
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def prompt_logprobs(
    texts: TokenTexts, prompt: PromptPart, num_top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: per prompt token, id -> value of the token and of the likeliest ones.

    Ranks count from 1. None for the first token.
    """
    return [
        None if entry is None else _prompt_entry(texts, token_id, entry, num_top)
        for token_id, entry in zip(prompt.token_ids, prompt.logprobs, strict=True)
    ]


def _prompt_entry(
    texts: TokenTexts, token_id: int, entry: TokenLogprob, num_top: int
) -> dict[str, Any]:
    ranked = [(token_id, entry.logprob, entry.rank)]
    ranked += [(i, value, rank) for rank, (i, value) in enumerate(entry.top[:num_top])]
    return {
        str(i): {
            "logprob": _finite(value),
            "rank": rank + 1,
            "decoded_token": texts.chat_name(i),
        }
        for i, value, rank in ranked
    }


def _finite(value: float) -> float:
    return round(value, 6) if math.isfinite(value) else LEAST_LOGPROB
