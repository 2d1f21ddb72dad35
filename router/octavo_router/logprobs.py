"""Log-probabilities in the shapes of OpenAI's two endpoints.

A token's text is its bytes as UTF-8; bytes of an incomplete character show as U+FFFD in chat
(whose `bytes` are exact) and as `bytes:\\xf0\\x9f` in completions. Special tokens (EOS) show
their name and have no bytes, so that joined bytes are the text. -inf, which JSON can't say, is
-9999.0. Must not know: HTTP. Entry points: `chat_logprobs`, `CompletionLogprobs`.
"""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from octavo_router.flights import TokenLogprob
from octavo_router.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one entry per token."""
    content: list[dict[str, Any]] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        chosen = _chat_entry(tokenizer, token_id, entry.logprob)
        chosen["top_logprobs"] = [_chat_entry(tokenizer, i, value) for i, value in entry.top]
        content.append(chosen)
    return content


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    if tokenizer.is_special(token_id):
        name = tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token": name, "logprob": _finite(logprob), "bytes": []}
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of one completion: four lists of one entry per token.

    Keeps the place in the text between chunks: offsets count characters of the whole answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def render(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, list[Any]]:
        tokens: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            offsets.append(self._num_chars)
            if not self._tokenizer.is_special(token_id):
                data = self._tokenizer.token_bytes(token_id)
                self._num_chars += len(self._decoder.decode(data))
            name = self._name(token_id)
            tokens.append(name)
            values.append(_finite(entry.logprob))
            top = {self._name(i): _finite(value) for i, value in entry.top}
            # The chosen token always has its own value, outside the top too.
            top.setdefault(name, values[-1])
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return round(value, 6) if math.isfinite(value) else LEAST_LOGPROB
