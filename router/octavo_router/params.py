"""Sampling parameters: one validation for the HTTP and the gRPC door.

Both doors hand in a plain mapping and get a frozen dataclass back. The rules, one per field:

    absent or null     the default (of the model's generation_config, then Octavo's)
    temperature        0 .. 2; below 1e-5 it counts as 0 = greedy
    top_p              0 .. 1; below 1e-6 only the likeliest token is left: greedy
    top_k              -1 and 0 = off; at or above the vocabulary's size = off
    min_p              0 .. 1
    seed               -2^63 .. 2^63-1; absent = derived from the Idempotency-Key, else random
    max_tokens         >= 1; may not exceed the context less the prompt (no clamping)
    stop               a string or up to 16, each of 1 .. 1,024 characters
    stop_token_ids     up to 128 ids of the vocabulary
    n                  1 .. 128
    logprobs           0 .. 20 alternatives per token

Types are strict: true is no number, "1" is no number, 1.0 is no integer, NaN and Infinity are
nothing. Every error names field, value and limit. Must not know: HTTP, protos.
Entry points: `Fields`, `parse_sampling`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError
from octavo_router.generation_defaults import GenerationDefaults

MAX_TEMPERATURE = 2.0
GREEDY_TEMPERATURE = 1e-5
GREEDY_TOP_P = 1e-6
MAX_INT32 = 2**31 - 1
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """A validated request's options. None: `max_tokens` = the door's default, `seed` = derived,
    `logprobs` = none."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None


def show(value: Any) -> str:
    """A value as an error may repeat it: bounded, ASCII."""
    if isinstance(value, str | list | dict):
        text = json.dumps(value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, int) and abs(value) > 10**40:
        text = "an integer of more than 40 digits"
    else:
        text = "null" if value is None else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def refuse(field: str, rule: str, value: Any) -> NoReturn:
    """Raise the error that names field, rule and value."""
    raise InvalidRequestError(f"{field} must be {rule}, got {show(value)}", param=field)


@dataclass(frozen=True, slots=True)
class Fields:
    """A request's fields, read one by one. A missing or null field reads as None."""

    raw: Mapping[str, Any]

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(name, "a number", value)
        # Also refuses NaN, for which every comparison is false.
        if not low <= value <= high or not math.isfinite(value):
            refuse(name, f"between {low:g} and {high:g}", value)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw.get(name)
        if value is None:
            return None
        return as_integer(name, value, low, high)

    def boolean(self, name: str) -> bool | None:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, "true or false", value)
        return value

    def string(self, name: str, max_chars: int) -> str | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            refuse(name, "a string", value)
        if len(value) > max_chars:
            refuse(name, f"at most {max_chars} characters long", f"{len(value)} characters")
        return value

    def token_ids(self, name: str, max_count: int, vocab_size: int) -> tuple[int, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            refuse(name, "a list of token ids", value)
        if len(value) > max_count:
            refuse(name, f"at most {max_count} token ids", f"{len(value)} ids")
        return as_token_ids(name, value, vocab_size)


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, "an integer", value)
    if not low <= value <= high:
        refuse(name, f"between {low} and {high}", value)
    return value


def as_token_ids(name: str, values: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    """`values` as ids of the vocabulary."""
    # bool is a subclass of int, so types themselves are compared. Prompts may be long: C speed.
    if set(map(type, values)) <= {int} and (
        not values or (min(values) >= 0 and max(values) < vocab_size)
    ):
        return tuple(values)
    for position, value in enumerate(values):
        if type(value) is not int:
            refuse(f"{name}[{position}]", "an integer token id", value)
        if not 0 <= value < vocab_size:
            refuse(f"{name}[{position}]", f"a token id between 0 and {vocab_size - 1}", value)
    raise AssertionError("a bad id was there")


def parse_sampling(
    raw: Mapping[str, Any], defaults: GenerationDefaults, vocab_size: int
) -> SamplingOptions:
    """The sampling options in `raw`; `logprobs` is a number of alternatives here.

    Raises InvalidRequestError.
    """
    fields = Fields(raw)
    temperature = fields.number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = fields.number("top_p", 0.0, 1.0)
    top_k = fields.integer("top_k", -1, MAX_INT32)
    min_p = fields.number("min_p", 0.0, 1.0)
    temperature = defaults.temperature if temperature is None else temperature
    top_p = defaults.top_p if top_p is None else top_p
    top_k = defaults.top_k if top_k is None else top_k
    if temperature < GREEDY_TEMPERATURE or top_p < GREEDY_TOP_P:
        temperature, top_p = 0.0, 1.0
    if top_k < 0 or top_k >= vocab_size:
        top_k = 0
    max_tokens = fields.integer("max_tokens", 1, MAX_INT32)
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=defaults.min_p if min_p is None else min_p,
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=_stop_strings(raw.get("stop")),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size),
        ignore_eos=bool(fields.boolean("ignore_eos")),
        n=fields.integer("n", 1, MAX_N) or 1,
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
    )


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | list | tuple):
        refuse("stop", "a string or a list of strings", value)
    strings: Sequence[Any] = [value] if isinstance(value, str) else value
    if len(strings) > MAX_STOPS:
        refuse("stop", f"at most {MAX_STOPS} strings", f"{len(strings)} strings")
    for position, string in enumerate(strings):
        name = "stop" if isinstance(value, str) else f"stop[{position}]"
        if not isinstance(string, str):
            refuse(name, "a string", string)
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            rule = f"between 1 and {MAX_STOP_CHARS} characters long"
            refuse(name, rule, f"{len(string)} characters")
    return tuple(strings)
