"""Text to token ids and back, with Hugging Face's semantics and without transformers.

`encode(text)` gives the ids of transformers' `AutoTokenizer(text)`, `encode_chat` those of
`apply_chat_template`, `decode` its text. A folder without tokenizer.json is read from its older
files (original_tokenizer.py), and by transformers only where those aren't known either (a slow,
lazy import). Encoding releases the GIL, but takes long for long texts: call it in a thread.
Must not know: HTTP, sessions.
Entry points: `Tokenizer`, `load_tokenizer`.
"""

import array
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from octavo.errors import ConfigurationError, InvalidRequestError
from octavo_router.chat_formats import ChatFormat
from octavo_router.chat_template import ChatTemplate, find_chat_template
from octavo_router.original_tokenizer import OriginalTokenizer, read_original
from octavo_router.token_decoder import TokenDecoder, WholeDecoder, decoder_of
from octavo_router.token_text import TextDecoder
from octavo_router.tokenizer_files import TokenizerFiles, read_tokenizer_files

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the router needs from a model's tokenizer. Ids are in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id with a text; the model's own vocabulary may be larger."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.uint32]:
        """Ids [T] of a text. InvalidRequestError if it holds a lone surrogate."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        check: Callable[[str], None] | None = None,
    ) -> NDArray[np.uint32]:
        """Ids [T] of rendered messages. InvalidRequestError for what the template refuses.

        `template` None = the model's own; `variables`: extra ones that it may name. `check` gets
        the rendered text before it is tokenized, and raises to refuse it.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids; unknown ids have none."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes that an id stands for, special or not; b"" for an unknown id."""
        ...

    def is_special(self, token_id: int) -> bool:
        """True for ids that `decode` skips."""
        ...

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        """A fresh incremental decoder for one answer."""
        ...


class HuggingFaceTokenizer:
    """A `Tokenizer` over a model folder's files. Safe to share by threads.

    `chat`: the format of chats where the folder has no template.
    """

    def __init__(
        self, files: TokenizerFiles, chat_template: str | None, chat: ChatFormat | None = None
    ) -> None:
        self._backend = files.backend
        self.eos_token_ids = files.eos_token_ids
        self.vocab_size = max(files.backend.get_vocab().values(), default=-1) + 1
        added = files.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id in added if added[token_id].special)
        self._whole = WholeDecoder(files.backend, files.config)
        self._decoder: TokenDecoder = decoder_of(self._whole, self._special_ids)
        self._special_tokens = files.special_tokens
        # A folder's template writes its special tokens itself: adding them doubles the first.
        self._adds_to_chats = chat_template is None and chat is not None
        source = chat.template if chat_template is None and chat is not None else chat_template
        self._template = None if source is None else ChatTemplate(source, files.special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.uint32]:
        try:
            # The batch call is the one that computes no offsets.
            encodings = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise _not_unicode(text) from error
        # An `array` takes a list of ints four times faster than numpy does.
        return np.frombuffer(array.array("I", encodings[0].ids), dtype=np.uint32)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        check: Callable[[str], None] | None = None,
    ) -> NDArray[np.uint32]:
        text = self._template_of(template).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        if check is not None:
            check(text)
        if template is None:
            add_special_tokens |= self._adds_to_chats
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _template_of(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate.of_request(source, self._special_tokens)
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a complete prompt",
                param="messages",
            )
        return self._template

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._whole.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._decoder.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        return self._decoder.start(skip_special_tokens=skip_special_tokens)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder. ConfigurationError if it can't be read."""
    if (folder / "tokenizer.json").is_file():
        files = read_tokenizer_files(folder)
        return HuggingFaceTokenizer(files, find_chat_template(folder, files.config))
    original = read_original(folder)
    if original is None:
        original = OriginalTokenizer(_convert(folder, trust_remote_code))
    files = read_tokenizer_files(
        folder, original.backend, defaults=original.config, end_tokens=original.end_tokens
    )
    template = find_chat_template(folder, files.config)
    if template is None and original.chat is not None:
        logger.info("%s has no chat template: using %s", folder, original.chat.name)
    return HuggingFaceTokenizer(files, template, original.chat)


def _convert(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """Let transformers build the tokenizer from older files (vocab.json and merges.txt)."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"{folder} has no tokenizer.json; converting its older files needs transformers"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a foreign loader raises
        raise ConfigurationError(
            f"transformers can't read {folder}'s tokenizer: {error}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ConfigurationError(
            f"{folder} has no tokenizer.json and a {type(converted).__name__} can't be converted;"
            " save a fast tokenizer into the folder"
        )
    return backend


def _not_unicode(text: str) -> InvalidRequestError:
    index = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    assert index is not None, "tokenizers refused a well-formed text"
    return InvalidRequestError(
        f"the text holds a lone surrogate at character {index}, which has no UTF-8 form"
    )
