"""Reading quantization_config: each field checked, each mistake named.

Must not know: formats. Entry point: `FieldReader`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import ConfigurationError


class FieldReader:
    """Checked access to the fields of `<where>`; null is as good as absent."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false; `default` None = it must be there."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def number(self, name: str, allowed: Collection[int]) -> int:
        """One of `allowed`, and it must be there."""
        value = self._present(name, None)
        if isinstance(value, bool) or value not in allowed:
            raise self.error(name, f"isn't supported; supported: {_listed(allowed)}")
        return value

    def word(self, name: str, allowed: Collection[str], default: str) -> str:
        """One of `allowed`, whatever its case."""
        value = self._present(name, default)
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.error(name, f"isn't supported; supported: {_listed(allowed)}")
        return value.lower()

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings; () if absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a list of names")
        return tuple(value)

    def inner(self, name: str) -> "FieldReader":
        """The object in a field; empty if absent."""
        value = self._present(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return FieldReader(value, f"{self._where}.{name}")

    def items(self) -> list[tuple[str, Any]]:
        return list(self._fields.items())

    def refuse(self, *names: str) -> None:
        """These fields would change what is computed, in ways that aren't known here."""
        for name in names:
            if self._fields.get(name):
                raise self.error(name, "isn't supported")

    def error(self, name: str, why: str) -> ConfigurationError:
        value = self._fields.get(name)
        shown = "absent" if value is None else f"{value!r:.200}"
        return ConfigurationError(f"{self._where}.{name}={shown} {why}")

    def _present(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "must be given")
        return default


def _listed(allowed: Collection[Any]) -> str:
    return ", ".join(map(str, allowed))
