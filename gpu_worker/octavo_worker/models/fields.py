"""Reading config.json's fields: a value of the right kind, or an error that names the field.

`Fields` is config.json over its family's defaults. Must not know: what the fields mean.
"""

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigurationError

Fields = Mapping[str, Any]


def count(fields: Fields, name: str) -> int:
    """A whole number >= 1."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"config.json: {name}={value!r} must be a whole number >= 1")
    return value


def positive(fields: Fields, name: str) -> float:
    """A number > 0."""
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"config.json: {name}={value!r} must be a number > 0")
    return float(value)


def optional(fields: Fields, name: str) -> float | None:
    """A number > 0, or null."""
    return None if fields[name] is None else positive(fields, name)


def flag(fields: Fields, name: str, fixed: bool | None = None) -> bool:
    """true or false; `fixed`, unless None, whatever stands there."""
    value = fields[name] if fixed is None else fixed
    if not isinstance(value, bool):
        raise ConfigurationError(f"config.json: {name}={value!r} must be true or false")
    return value


def require(fields: Fields, computed: Fields) -> None:
    """Refuse fields with another value than the one that is computed; absent ones may be."""
    for name, value in computed.items():
        if fields.get(name, value) != value:
            raise ConfigurationError(
                f"config.json: {name}={fields[name]!r} isn't supported; supported: {value!r}"
            )
