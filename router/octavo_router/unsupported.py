"""Request fields that would change the answer and that Octavo doesn't serve (yet).

The rule for fields: a served one is validated; one in this table is accepted only with a value
that changes nothing (null, or one of those listed) and refused by name otherwise, for silence
would be a wrong answer; every other field (metadata, store, service_tier, ...) is harmless and
ignored. Must not know: HTTP. Entry point: `refuse_unsupported`.
"""

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidRequestError
from octavo_router.params import show

# Field -> values beside null that mean "as if absent".
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # Tools and formats.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "mm_processor_kwargs": ({},),
    # Sampling.
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    # Shape of prompt and answer.
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    # Service.
    "cache_salt": (),
    "priority": (0,),
    "kv_transfer_params": (),
}


def refuse_unsupported(body: Mapping[str, Any], *, served: frozenset[str] = frozenset()) -> None:
    """Raise InvalidRequestError for the first field that asks for what isn't there.

    `served`: names that this endpoint does serve. `best_of` equal to n asks for nothing.
    """
    for name, value in body.items():
        if name == "best_of" and value is not None and not _equals(value, body.get("n") or 1):
            _refuse(name, value)
        if value is None or name in served or name not in NEUTRAL_VALUES:
            continue
        if not any(_equals(value, neutral) for neutral in NEUTRAL_VALUES[name]):
            _refuse(name, value)


def _equals(value: Any, neutral: Any) -> bool:
    """Equal, without 0 == False."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse(name: str, value: Any) -> None:
    raise InvalidRequestError(
        f"{name} isn't supported yet (got {show(value)}): leave it out", param=name
    )
