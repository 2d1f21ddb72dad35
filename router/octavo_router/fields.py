"""Reading a request's fields: strict types, bounded values, errors that name field and limit.

true is no number, "1" is no number, 1.0 is no integer, NaN and Infinity are nothing.
Must not know: which fields there are. Entry points: `Fields`, `refuse`, `show`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError

MAX_INT32 = 2**31 - 1
_MAX_SHOWN_CHARS = 80


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
            refuse(name, f"at most {max_chars} characters long", len(value))
        return value

    def strings(
        self, name: str, max_count: int, max_chars: int, *, or_one: bool = False
    ) -> tuple[str, ...]:
        """A list of non-empty strings; with `or_one` a single one will do."""
        value = self.raw.get(name)
        if value is None:
            return ()
        is_one = or_one and isinstance(value, str)
        if not is_one and not isinstance(value, list | tuple):
            refuse(name, f"a {'string or a ' if or_one else ''}list of strings", value)
        strings: list[Any] = [value] if is_one else list(value)
        if len(strings) > max_count:
            refuse(name, f"at most {max_count} strings", len(strings))
        for position, string in enumerate(strings):
            where = name if is_one else f"{name}[{position}]"
            if not isinstance(string, str):
                refuse(where, "a string", string)
            if not 1 <= len(string) <= max_chars:
                rule = f"between 1 and {max_chars} characters long"
                refuse(where, rule, len(string))
        return tuple(strings)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            refuse(name, "an object", value)
        return value

    def token_ids(self, name: str, max_count: int, vocab_size: int) -> tuple[int, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            refuse(name, "a list of token ids", value)
        if len(value) > max_count:
            refuse(name, f"at most {max_count} token ids", len(value))
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
