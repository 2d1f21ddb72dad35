"""A tokenizer whose ids are bytes: 0 .. 255, and 256 = the special `<eos>`.

Every text has an obvious list of ids and any id sequence an obvious text, so tests of the router
can say exactly what must arrive.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo_router.chat_template import ChatTemplate
from octavo_router.token_text import ByteLevelText, Piece, PieceTable, TextDecoder

EOS = 256
VOCAB_SIZE = 257
TEMPLATE = ChatTemplate(
    "{% if messages[0].role == 'tool' %}{{ raise_exception('begins with a tool') }}{% endif %}"
    "{{ preamble }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    {},
)


class ByteTokenizer:
    """Implements octavo_router.tokenizer.Tokenizer."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.uint32]:
        del add_special_tokens  # there are none to add
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

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
        chat = TEMPLATE if template is None else ChatTemplate.of_request(template, {})
        text = chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        if check is not None:
            check(text)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = self.text_decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        def piece_of(token_id: int) -> Piece:
            if self.is_special(token_id):
                return None if skip_special_tokens else "<eos>"
            return chr(token_id) if token_id < 128 else bytes([token_id])

        return ByteLevelText(PieceTable(piece_of))
