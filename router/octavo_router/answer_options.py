"""Fields that change what of an answer is shown, not what is generated.

    echo                            the prompt comes before the text; with logprobs, scored
    prompt_logprobs                 0 .. 20 alternatives per prompt token
    include_stop_str_in_output      the stop, string or ending id, is part of the text
    skip_special_tokens             false: special tokens stand in the text by their names
    spaces_between_special_tokens   read and without effect: there never is one, but the decoder's
    return_token_ids                ids of prompt and answer beside the text

Must not know: HTTP, protos. Entry points: `AnswerOptions`, `parse_answer_options`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.request_limits import MAX_ALTERNATIVES
from octavo_router.fields import Fields


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """`prompt_logprobs`: alternatives per prompt token, None = none at all."""

    echo: bool = False
    prompt_logprobs: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False


DEFAULT_OPTIONS = AnswerOptions()


def parse_answer_options(raw: Mapping[str, Any]) -> AnswerOptions:
    """Raises InvalidRequestError."""
    fields = Fields(raw)
    fields.boolean("spaces_between_special_tokens")
    return AnswerOptions(
        echo=bool(fields.boolean("echo")),
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_ALTERNATIVES),
        include_stop=bool(fields.boolean("include_stop_str_in_output")),
        skip_special_tokens=fields.boolean("skip_special_tokens") is not False,
        return_token_ids=bool(fields.boolean("return_token_ids")),
    )
