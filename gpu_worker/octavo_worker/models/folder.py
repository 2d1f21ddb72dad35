"""A model's folder: its JSON files, and what they say beside the model's shape.

The dtype and the ending ids. Every mistake in the files is a ConfigurationError that names file
and field. Must not know: families, weights.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigurationError
from octavo_worker.models.fields import Fields

_LOG = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ConfigurationError: absent, not JSON, not an object."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file; is this a model's folder?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: can't be read: {error}") from None
    if text.startswith("version https://git-lfs"):
        raise ConfigurationError(
            f"{path}: is a Git-LFS pointer; fetch the file with `git lfs pull`"
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: must hold an object, not {type(value).__name__}")
    return value


def read_gptq_fields(folder: Path) -> dict[str, Any] | None:
    """quantize_config.json, AutoGPTQ's own file; None if there is none."""
    path = folder / "quantize_config.json"
    return read_json(path) if path.exists() else None


def stored_dtype(fields: Fields) -> torch.dtype | None:
    """The dtype that config.json names (`dtype`, in older files `torch_dtype`)."""
    name = fields.get("dtype") or fields.get("torch_dtype")
    if name is None:
        return None
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        allowed = ", ".join(DTYPES)
        raise ConfigurationError(f"config.json: dtype={name!r} isn't supported; one of {allowed}")
    return dtype


def choose_dtype(
    requested: str | torch.dtype, stored: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """The dtype to compute in: as requested, or "auto" = the stored one on cuda, else float32.

    Warns of float16 for bfloat16 weights: values beyond 65,504 become infinite.
    """
    if isinstance(requested, torch.dtype):
        dtype = requested
    elif requested == "auto":
        dtype = (stored or torch.bfloat16) if device.type == "cuda" else torch.float32
    elif requested in DTYPES:
        dtype = DTYPES[requested]
    else:
        allowed = ", ".join(DTYPES)
        raise ConfigurationError(f"OCTAVO_DTYPE={requested!r}: must be auto or one of {allowed}")
    if dtype == torch.float16 and stored == torch.bfloat16:
        _LOG.warning("float16 for bfloat16 weights: large values overflow; prefer bfloat16")
    return dtype


def eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """The ending ids: generation_config.json's if it names any, else config.json's."""
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = fields["eos_token_id"]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ConfigurationError(f"{folder}: eos_token_id={value!r} must be ids")
    return tuple(dict.fromkeys(ids))
