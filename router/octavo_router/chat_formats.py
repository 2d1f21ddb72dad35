"""Chat formats of models that publish theirs as Python code, not as a template in the folder.

Each is written down as a template with the ids that the authors' code builds, and the special
tokens that end a turn in it. A template in the folder itself comes first; the ends hold for it,
too. Must not know: files, tokenizers. Entry points: `ChatFormat`, the formats.

A text that begins with a newline may be cut into other tokens than in the authors' code, which
tokenizes each text by itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`template`: Jinja, as chat_template.py runs it; what begins every text of the model is
    added to the prompt, too. `end_tokens`: special tokens that end an answer beside those that
    the folder names."""

    name: str
    template: str
    end_tokens: tuple[str, ...]


# huggingface.co/THUDM/chatglm2-6b: modeling_chatglm.py, `build_prompt`. It knows no system
# message: one stands before the first round, as in FastChat's conversation "chatglm2"
# (github.com/lm-sys/FastChat: fastchat/conversation.py).
CHATGLM2 = ChatFormat(
    "ChatGLM2",
    """\
{%- set rounds = namespace(count=0, is_open=false) -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{{ message.content + '\n\n' }}
{%- elif message.role == 'user' and not rounds.is_open -%}
{%- set rounds.count = rounds.count + 1 -%}
{%- set rounds.is_open = true -%}
{{ '[Round ' ~ rounds.count ~ ']\n\n问：' + message.content + '\n\n' }}
{%- elif message.role == 'assistant' and rounds.is_open -%}
{%- set rounds.is_open = false -%}
{{ '答：' + message.content + '\n\n' }}
{%- else -%}
{{ raise_exception('ChatGLM2 reads questions and answers in turn, and one system message first') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '答：' }}{%- endif -%}
""",
    (),
)

# huggingface.co/THUDM/chatglm3-6b: tokenization_chatglm.py, `build_chat_input` (what follows a
# role is a line for metadata, empty here) and modeling_chatglm.py, `chat` (the ends).
CHATGLM3 = ChatFormat(
    "ChatGLM3",
    """\
{%- for message in messages -%}
{%- set role = 'observation' if message.role == 'tool' else message.role -%}
{{ '<|' + role + '|>\n' }}{{ ' ' + message.content if message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
""",
    ("<|user|>", "<|observation|>"),
)

# huggingface.co/THUDM/glm-4-9b-chat: tokenization_chatglm.py, `build_single_message`.
GLM4 = ChatFormat(
    "GLM-4",
    """\
{%- for message in messages -%}
{%- set role = 'observation' if message.role == 'tool' else message.role -%}
{{ '<|' + role + '|>\n' + message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
""",
    ("<|user|>", "<|observation|>"),
)

# huggingface.co/Qwen/Qwen-7B-Chat: qwen_generation_utils.py, `make_context` for ChatML with
# `chat`'s default system message, and `get_stop_words_ids` (the ends).
QWEN = ChatFormat(
    "Qwen's ChatML",
    """\
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
""",
    ("<|im_end|>", "<|im_start|>"),
)
