"""Request bodies: bounded, UTF-8, strict JSON, an object.

Must not know: fields. Entry point: `read_object`.
"""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from octavo.errors import CancelledError, InvalidRequestError, RequestTooLargeError

_JSON = "application/json"
_MAX_PARAM_CHARS = 80
# Far more than any request needs, and far less than what walks a value later can recurse.
MAX_DEPTH = 100
# Longer bodies may take tens of milliseconds, which streams on the event loop would feel.
_LONG_BYTES = 256 << 10


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body.

    NaN and Infinity, lone surrogates, another encoding, a key twice in one object, and more than
    `MAX_DEPTH` levels of nesting are refused. Raises InvalidRequestError, RequestTooLargeError.
    """
    _check_headers(request, max_bytes)
    data = await _read(request, max_bytes)
    if len(data) > _LONG_BYTES:
        return await asyncio.to_thread(parse_object, data)
    return parse_object(data)


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind != _JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidRequestError(
            f"Content-Type must be {_JSON}, got {kind[:80]!a}", param="Content-Type"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequestError(
            f"Content-Encoding {encoding[:80]!a} isn't supported: send the body as it is",
            param="Content-Encoding",
        )
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        _too_large(length, max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the client left before its request was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            _too_large(f"more than {max_bytes}", max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(size: str, max_bytes: int) -> NoReturn:
    raise RequestTooLargeError(f"the body has {size} bytes, the limit is {max_bytes}")


def parse_object(data: bytes) -> dict[str, Any]:
    """Strict JSON to a dict. Raises InvalidRequestError."""
    if not data:
        raise InvalidRequestError("the body is empty: send a JSON object")
    try:
        text = data.decode()
        value = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles
        )
        _check_depth(text, value)
        if "\\u" in text:
            # An escape may spell half of a surrogate pair, which no encoder takes later.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the body isn't UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
        ) from None
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "the body has a string with a lone surrogate (half of a \\ud83d\\ude00 pair)"
        ) from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the body isn't JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        _too_deep()
    except ValueError as error:
        # An integer of thousands of digits.
        raise InvalidRequestError(f"the body isn't JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _check_depth(text: str, value: Any) -> None:
    """Refuse what parses, but exhausts the stack of whoever shows, compares or renders it."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    containers = [value]
    for _ in range(MAX_DEPTH):
        containers = [
            child
            for item in containers
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, list | dict)
        ]
        if not containers:
            return
    _too_deep()


def _too_deep() -> NoReturn:
    raise InvalidRequestError(f"the body is nested too deeply: at most {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body isn't JSON: {name} is no JSON number")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of two equal keys one reader would take the first and another the last."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        doubled = next(name for name, _ in pairs if name in seen or seen.add(name))
        doubled = doubled[:_MAX_PARAM_CHARS]
        raise InvalidRequestError(
            f"the body has the key {doubled!a} twice in one object: send it once", param=doubled
        )
    return value
