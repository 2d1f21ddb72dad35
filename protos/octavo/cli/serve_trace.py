"""Arrivals recorded elsewhere: Mooncake's JSON lines, Azure's CSV, as requests in time.

Must not know: servers. Entry point: `load_trace`.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.errors import ConfigurationError

# What an id of Mooncake's `hash_ids` stands for.
TRACE_BLOCK_TOKENS = 512
_NAMES = {
    "arrival": ("timestamp", "arrival_time"),
    "input": ("input_length", "contexttokens", "num_prefill_tokens"),
    "output": ("output_length", "generatedtokens", "num_decode_tokens"),
}


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One recorded request: seconds after the first one's arrival, lengths in tokens.

    `block_ids`: names of the prompt's blocks of 512 tokens; equal ids are equal text.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


def load_trace(path: Path, *, speed: float = 1.0) -> list[TraceEntry]:
    """Read a trace, arrivals in order and `speed` times as fast.

    JSON lines (`timestamp` in ms, `input_length`, `output_length`, perhaps `hash_ids`), or CSV
    with a header (those names, or Azure's TIMESTAMP, ContextTokens, GeneratedTokens; times in
    seconds, or as dates); a name that ends in .gz is decompressed. Raises ConfigurationError
    naming file and line.
    """
    if not speed > 0:
        raise ConfigurationError(f"--trace-speed {speed}: must be above 0")
    try:
        text = _read(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace {path}: {error}") from error
    is_json = text.lstrip().startswith("{")
    rows = _json_rows(path, text) if is_json else _csv_rows(path, text)
    seconds = _from_ms if is_json else _from_csv_time
    entries = [_entry(path, number, row, seconds) for number, row in rows]
    if not entries:
        raise ConfigurationError(f"--trace {path}: no requests in it")
    start = min(entry.arrival_s for entry in entries)
    return [
        TraceEntry(
            (e.arrival_s - start) / speed, *(e.num_prompt_tokens, e.num_output_tokens), e.block_ids
        )
        for e in sorted(entries, key=lambda entry: entry.arrival_s)
    ]


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"--trace {path}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"--trace {path}, line {number}: no JSON object")
        yield number, row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    del path
    for row in reader:
        yield reader.line_num, {str(name).strip().lower(): value for name, value in row.items()}


def _entry(
    path: Path, number: int, row: Mapping[str, Any], seconds: Callable[[Any], float]
) -> TraceEntry:
    try:
        entry = TraceEntry(
            seconds(_field(row, "arrival")),
            int(_field(row, "input")),
            int(_field(row, "output")),
            tuple(int(item) for item in row.get("hash_ids") or ()),
        )
    except KeyError as error:
        names = " or ".join(_NAMES[error.args[0]])
        raise ConfigurationError(f"--trace {path}, line {number}: no {names}") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"--trace {path}, line {number}: {error}") from error
    if entry.num_prompt_tokens < 1 or entry.num_output_tokens < 0:
        raise ConfigurationError(f"--trace {path}, line {number}: lengths must be at least 1")
    # Some traces hold answers of no token; a server is asked for at least one.
    return TraceEntry(
        entry.arrival_s, entry.num_prompt_tokens, max(1, entry.num_output_tokens), entry.block_ids
    )


def _field(row: Mapping[str, Any], what: str) -> Any:
    for name in _NAMES[what]:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(what)


def _from_ms(value: Any) -> float:
    return float(value) / 1e3


def _from_csv_time(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return datetime.fromisoformat(value).timestamp()
