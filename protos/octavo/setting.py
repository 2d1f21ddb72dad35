"""One setting: its field with documentation and limits, its variable's name, its value read.

A value comes as text, or from a file if it is a secret. Must not know: which settings there are.
Entry points: `setting`, `environment_name`, `help_of`, `metavar_of`, `FileSecret`, `parse_value`,
`check_value`.
"""

import math
from dataclasses import Field, field
from typing import Any, get_args, get_origin

from octavo.errors import ConfigurationError
from octavo.file_stamp import FileStamp, stamp_of

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_KINDS = {bool: "neither true nor false", int: "no whole number", float: "no number"}


def setting(
    default: Any,
    help: str,  # noqa: A002 - argparse's word
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with its documentation and limits (inclusive)."""
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "secret": secret,
    }
    return field(default=default, metadata=metadata, repr=not secret)


def environment_name(name: str) -> str:
    """`max_num_seqs` -> `OCTAVO_MAX_NUM_SEQS`."""
    return f"OCTAVO_{name.upper()}"


def help_of(item: Field[Any]) -> str:
    """The line of `--help` about the setting `item`: what it is, and its default if it has one."""
    text: str = item.metadata["help"]
    if isinstance(item.default, bool):
        return f"{text} [{str(item.default).lower()}]"
    return text if item.default in ("", (), None) else f"{text} [{item.default}]"


def metavar_of(item: Field[Any]) -> str:
    """What `--help` shows for the value: the words that are allowed, or one for all."""
    if isinstance(item.default, bool):
        return "{true,false}"
    if item.metadata["choices"]:
        return f"{{{','.join(map(str, item.metadata['choices']))}}}"
    return item.name.rsplit("_", 1)[-1].upper()


class FileSecret(str):
    """A secret that was read from the file `path`, as it was at `stamp`."""

    __slots__ = ("path", "stamp")
    path: str
    stamp: FileStamp

    def __new__(cls, name: str, path: str) -> "FileSecret":
        """Read `path` for the setting `name`, without line ends at its end.

        Raises ConfigurationError, which doesn't say what is in the file.
        """
        variable = f"{environment_name(name)}_FILE"
        stamp = stamp_of(path)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read().rstrip("\r\n")
        except OSError as error:
            message = f"{variable}={path}: can't be read: {error.strerror}"
            raise ConfigurationError(message, param=name) from None
        except ValueError:
            raise ConfigurationError(f"{variable}={path}: is no UTF-8", param=name) from None
        if not text.strip():
            # No secret would mean no protection.
            raise ConfigurationError(f"{variable}={path}: the file is empty", param=name)
        secret = super().__new__(cls, text)
        secret.path, secret.stamp = path, stamp
        return secret


def parse_value(name: str, hint: Any, text: str) -> Any:
    """`text` as the type `hint`: str, int, float, bool, tuple[str, ...], or one of these | None.

    Raises ConfigurationError naming the variable.
    """
    options = [arg for arg in get_args(hint) if arg is not type(None)]
    if get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if type(None) in get_args(hint):
        if text == "":
            return None
        hint = options[0]
    try:
        if hint is bool:
            lowered = text.lower()
            if lowered not in _TRUE | _FALSE:
                raise ValueError
            return lowered in _TRUE
        return hint(text)
    except ValueError:
        raise ConfigurationError(
            f"{environment_name(name)}={text!r} is {_KINDS[hint]}", param=name
        ) from None


def check_value(item: Field[Any], value: Any) -> None:
    """Raises ConfigurationError if `value` is outside the limits of the setting `item`."""
    limits = item.metadata
    variable = environment_name(item.name)
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{variable}={value}: must be finite", param=item.name)
    if limits["choices"] and value not in limits["choices"]:
        allowed = ", ".join(map(str, limits["choices"]))
        raise ConfigurationError(f"{variable}={value!r}: must be one of {allowed}", param=item.name)
    low, high = limits["minimum"], limits["maximum"]
    if low is not None and value < low:
        raise ConfigurationError(f"{variable}={value}: must be at least {low}", param=item.name)
    if high is not None and value > high:
        raise ConfigurationError(f"{variable}={value}: must be at most {high}", param=item.name)
