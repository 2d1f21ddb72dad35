"""Model names to folders: a local folder, the demo model, or a Hugging Face id.

Must not know: tensors, tokenizers, services. What isn't there yet is fetched or converted
here, at start, never later. Entry points: `resolve_model`, `revision_of`, `model_name_of`.
"""

import json
import os
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from octavo.errors import ConfigurationError

DEMO_MODEL = "demo"
# What a model needs beside its weights: configuration, tokenizer, template.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHT_FILES = ("*.safetensors",)
# Files that match the patterns above but are of no use (other frameworks, original layouts).
_IGNORED_FILES = ("original/*", "onnx/*", "openvino/*", "coreml/*", "gguf/*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def cache_folder() -> Path:
    """Where Octavo keeps what it can make again: `$OCTAVO_CACHE`, or `~/.cache/octavo`."""
    given = os.environ.get("OCTAVO_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "octavo"


def resolve_model(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of model `name`: a folder as it is, `demo`, or a Hugging Face id.

    `weights=False` leaves the weight files of a Hugging Face id where they are (the router
    needs the tokenizer only). HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are respected. Raises
    ConfigurationError for a name that stands for nothing.
    """
    if not name:
        raise ConfigurationError("no model: give a folder, a Hugging Face id or 'demo' (--model)")
    if name == DEMO_MODEL:
        from octavo.demo_model import ensure_demo_model

        return ensure_demo_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigurationError(f"model folder {folder} has no config.json", param="model")
        return folder.resolve()
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ConfigurationError(f"model {name!r}: no such folder", param="model")
    return _download(name, revision, weights=weights)


def revision_of(folder: Path) -> str:
    """What distinguishes these weights from others of the same name; enters the block hashes.

    The commit if `folder` is a snapshot of the hub's cache, else a digest of config.json and
    of the weight files' names and sizes (their contents would take minutes to read).
    """
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return folder.name
    files = sorted(folder.glob("*.safetensors"))
    sizes = [[file.name, file.stat().st_size] for file in files]
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    digest.update(json.dumps(sizes).encode())
    return digest.hexdigest()


def model_name_of(name: str) -> str:
    """The name under which model `name` is served unless the operator says otherwise."""
    if name == DEMO_MODEL:
        from octavo.demo_model import DEMO_MODEL_NAME

        return DEMO_MODEL_NAME
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def _download(name: str, revision: str | None, *, weights: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigurationError(
            f"model {name!r} is no folder, and huggingface-hub isn't installed to look it up: "
            "pip install 'octavo[serve]'",
            param="model",
        ) from None
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    where = f"model {name!r}" + (f" at revision {revision!r}" if revision else "")
    hub: Any = huggingface_hub  # its overloads are only partly typed
    try:
        path = hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_IGNORED_FILES)
        )
    except LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"{where}: not in the local cache, and the Hugging Face hub can't be reached "
            f"(offline mode, or no network). Give a folder, or fetch it first. {error}",
            param="model",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigurationError(
            f"{where}: the Hugging Face hub refused it. Is the id right, and is HF_TOKEN set if "
            f"the model is gated? {error}",
            param="model",
        ) from error
    return Path(path)
