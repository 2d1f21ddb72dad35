"""The limits that the settings' documentation names are those of the code."""

import inspect

import pytest

from octavo.request_limits import MAX_ALTERNATIVES, MAX_SEQUENCES
from octavo.settings import RouterSettings
from octavo_router import app, params, pipeline, prompts, requests, service, token_rules

SAID = " ".join((inspect.getdoc(RouterSettings) or "").split())


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ("{:,} messages", [requests.MAX_MESSAGES]),
        ("{:,} prompts", [requests.MAX_PROMPTS]),
        ("{:,} choices (n times prompts)", [pipeline.MAX_CHOICES]),
        ("n at most {}", [MAX_SEQUENCES]),
        ("{} stop strings of {:,} characters", [params.MAX_STOPS, params.MAX_STOP_CHARS]),
        ("{} stop ids", [params.MAX_STOP_TOKEN_IDS]),
        ("{:,} biased ids", [token_rules.MAX_BIASED_IDS]),
        (
            "{} bad words of {} characters",
            [token_rules.MAX_BAD_WORDS, token_rules.MAX_BAD_WORD_CHARS],
        ),
        ("{} alternatives per token", [MAX_ALTERNATIVES]),
        ("a model's name of {}", [service.MAX_MODEL_NAME_CHARS]),
        ("an Idempotency-Key of {}", [requests.MAX_IDEMPOTENCY_KEY_CHARS]),
        ("an X-Request-Id of {} characters", [requests.MAX_REQUEST_ID_CHARS]),
        (
            "{:,} characters and {:,} ids to tokenize or detokenize",
            [prompts.MAX_TEXT_CHARS, app.MAX_DETOKENIZE_IDS],
        ),
    ],
)
def test_limits_are_what_is_said(said: str, limits: list[int]) -> None:
    assert said.format(*limits) in SAID
