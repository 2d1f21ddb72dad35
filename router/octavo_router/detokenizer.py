"""One choice's ids into the text a client sees: incremental, well-formed, cut at a stop string.

The law: over all pushes and `finish`, the joined text is the tokenizer's decode of all ids, cut
at the first complete stop string. U+FFFD stands only where that decode has it; a stop can match
text only when it is settled, never bytes still held back. The work per id is bounded, whatever
came before. Must not know: sessions, finish reasons. Entry point: `Detokenizer`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from octavo_router.stop_strings import StopMatcher, StopStrings
from octavo_router.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """Text that became certain.

    `num_tokens`: ids accounted to the answer so far (all pushes together); it ends with the id
    that completed the stop. `matched_stop`: the stop string, None = none yet.
    """

    text: str
    num_tokens: int
    matched_stop: str | None


class Detokenizer:
    """Push ids until a stop matches or the sequence ends, then `finish`.

    The ending id (EOS or a stop id) isn't text: the caller leaves it out. `stop`: strings, or
    the compiled set where several choices share one; they are not looked for in the text of the
    first `min_tokens` ids. After a match everything is ignored.
    """

    __slots__ = ("_decoder", "_matched", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] | StopStrings = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = tokenizer.text_decoder(skip_special_tokens=skip_special_tokens)
        self._matcher: StopMatcher | None = None
        if stop:
            stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
            self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._matched: str | None = None
        self._num_tokens = 0
        self._min_tokens = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that these ids settle; the rest of an unfinished character is held back."""
        if self._matcher is None:
            self._num_tokens += len(token_ids)
            return TextDelta(self._decoder.push(token_ids), self._num_tokens, None)
        text = ""
        for token_id in token_ids:
            if self._matched is not None:
                break
            self._num_tokens += 1
            piece = self._decoder.push((token_id,))
            if self._num_tokens > self._min_tokens:
                piece = self._match(self._matcher, piece)
            text += piece
        return TextDelta(text, self._num_tokens, self._matched)

    def finish(self) -> TextDelta:
        """Release what was held back. A stop may still match in text that only now is settled."""
        text = ""
        if self._matched is None:
            text = self._decoder.finish()
            if self._matcher is not None:
                if self._num_tokens > self._min_tokens:
                    text = self._match(self._matcher, text)
                if self._matched is None:
                    text += self._matcher.finish()
        return TextDelta(text, self._num_tokens, self._matched)

    def _match(self, matcher: StopMatcher, text: str) -> str:
        if not text:
            return ""
        scan = matcher.push(text)
        self._matched = scan.matched
        return scan.text
