"""Request fields that would change the answer and that Octavo doesn't serve (yet).

The rule for fields: a served one is validated; one in these tables is accepted only with a value
that changes nothing (null, or one of those listed) and refused by name otherwise, for silence
would be a wrong answer; so are fields that only the other endpoint serves. Every other field
(metadata, store, service_tier, ...) is harmless and ignored. Must not know: HTTP.
Entry point: `refuse_unsupported`.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError
from octavo_router.fields import show

Neutral = Mapping[str, tuple[Any, ...]]

# Field -> values beside null that mean "as if absent".
NEUTRAL_VALUES: Neutral = {
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
    "length_penalty": (1,),
    "use_beam_search": (False,),
    # Shape of prompt and answer.
    "suffix": ("",),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    # Service.
    "kv_transfer_params": (),
}
# The same for fields that only one endpoint serves, where they would be silently lost.
CHAT_ONLY: Neutral = {
    "messages": ([],),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
COMPLETIONS_ONLY: Neutral = {
    "prompt": ("", []),
    "echo": (False,),
}


def refuse_unsupported(body: Mapping[str, Any], elsewhere: Neutral) -> None:
    """Raise InvalidRequestError for the first field that asks for what isn't there.

    `elsewhere`: fields that only the other endpoint serves. `best_of` equal to n asks for nothing.
    """
    for name, value in body.items():
        if value is None:
            continue
        if name == "best_of" and not _equals(value, body.get("n") or 1):
            _refuse(name, value, "isn't supported yet")
        if name in NEUTRAL_VALUES and not _is_neutral(value, NEUTRAL_VALUES[name]):
            _refuse(name, value, "isn't supported yet")
        if name in elsewhere and not _is_neutral(value, elsewhere[name]):
            _refuse(name, value, "isn't for this endpoint")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(_equals(value, item) for item in neutral)


def _equals(value: Any, neutral: Any) -> bool:
    """Equal, without 0 == False."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise InvalidRequestError(f"{name} {why} (got {show(value)}): leave it out", param=name)
