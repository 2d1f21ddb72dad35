"""Where an OpenAI-compatible server answers, and with which key. Entry points: `api_base`,
`api_key`, `split_label`."""

import os
from typing import NamedTuple
from urllib.parse import urlsplit

from octavo.errors import ConfigurationError

DEFAULT_URL = "http://localhost:8000"
_KEY_VARIABLES = ("OCTAVO_API_KEY", "OPENAI_API_KEY")


class Labelled(NamedTuple):
    """A server's URL and the name that tables give it."""

    label: str
    url: str


def api_base(url: str) -> str:
    """The URL that paths like `/chat/completions` follow: `host:port` alone gets a scheme and
    `/v1`, a URL with a path is taken as it is. Raises ConfigurationError."""
    given = url
    if "://" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    try:
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or no port number
        is_whole = False
    if not is_whole:
        raise ConfigurationError(f"--url {given!r}: must be like http://host:port")
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def api_key(given: str | None) -> str | None:
    """The key given, or else the environment's."""
    found = (os.environ.get(name) for name in _KEY_VARIABLES)
    return given or next((key for key in found if key), None)


def split_label(text: str) -> Labelled:
    """`name=url`, or a URL that is its own name."""
    label, separator, url = text.partition("=")
    is_named = bool(separator) and "/" not in label and ":" not in label
    return Labelled(label, url) if is_named else Labelled(text, text)
