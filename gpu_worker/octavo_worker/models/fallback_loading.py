"""From a folder to a `FallbackModel`: transformers' classes, its loader, our strictness.

transformers loads the weights itself, since only it knows how each of its models renames and
merges stored tensors; whatever it reports as missing, unexpected or of another shape is an error
here. The files are checked first, as for native models. No code of the folder is ever run.
Must not know: steps, backends. Entry point: `load_fallback`.
"""

import copy
import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from octavo.errors import ConfigurationError
from octavo_worker.models.fallback import FallbackConfig, FallbackModel
from octavo_worker.models.folder import choose_dtype, eos_token_ids, read_json, stored_dtype
from octavo_worker.models.transformers_probe import Probed, probe
from octavo_worker.weights import Checkpoint, Progress, is_float, some

_LOG = logging.getLogger(__name__)
# What the attention kernels hold in registers; the CPU takes anything.
_MAX_HEAD_DIM, _MAX_GROUP_SIZE = 256, 128


def load_fallback(
    folder: Path,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    max_model_len: int,
    progress: Progress | None,
) -> FallbackModel:
    """See `models.load_model`. Raises ConfigurationError for what transformers' code can't do."""
    fields = read_json(folder / "config.json")
    stored = stored_dtype(fields)
    with _quiet():
        config = _read_config(folder, fields)
        model_class = _model_class(folder, config)
        max_model_len = _max_model_len(config, max_model_len)
        _LOG.info(
            "%s runs in transformers' code (%s) with paged attention: nothing is fused",
            model_class.__name__,
            transformers.__version__,
        )
        probed, _ = _probe_shapes(model_class, config, max_model_len)
        if load_format == "random":
            chosen = choose_dtype(dtype, stored, device)
            model = _draw(model_class, config, chosen, device, seed)
        else:
            with Checkpoint(folder) as checkpoint:
                chosen = choose_dtype(dtype, stored or checkpoint.dtype(), device)
                _check_dtypes(checkpoint, model_class)
            model = _load(model_class, config, folder, chosen, device)
        is_capturable = probed is not None
        probed = probed or _probe_values(model, max_model_len)
    if device.type == "cuda":
        _check_kernels(model_class, probed)
    if progress is not None:
        progress(1.0)
    shape = _config(folder, model, probed, max_model_len, chosen)
    return FallbackModel(model, probed, shape, is_capturable=is_capturable)


class FallbackShape(NamedTuple):
    """A model without values, on the meta device; `model` is of bfloat16, `config` as asked."""

    config: FallbackConfig
    model: PreTrainedModel


def fallback_shape(
    folder: Path, *, dtype: str | torch.dtype, device: torch.device, max_model_len: int
) -> FallbackShape:
    """What `load_fallback` would load to `device`, from config.json alone."""
    fields = read_json(folder / "config.json")
    with _quiet():
        config = _read_config(folder, fields)
        model_class = _model_class(folder, config)
        max_model_len = _max_model_len(config, max_model_len)
        probed, model = _probe_shapes(model_class, config, max_model_len)
    if probed is None or model is None:
        raise ConfigurationError(
            f"{model_class.__name__}: its shape can't be told without its weights: the code in "
            "transformers needs values"
        )
    if device.type == "cuda":
        _check_kernels(model_class, probed)
    chosen = choose_dtype(dtype, stored_dtype(fields), device)
    return FallbackShape(_config(folder, model, probed, max_model_len, chosen), model)


def _config(
    folder: Path, model: PreTrainedModel, probed: Probed, max_model_len: int, dtype: torch.dtype
) -> FallbackConfig:
    text = model.config.get_text_config()
    first = probed.layers[0]
    return FallbackConfig(
        architecture=type(model).__name__,
        vocab_size=probed.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_widest(model),
        num_layers=len(probed.layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(folder, {"eos_token_id": text.eos_token_id}),
        dtype=dtype,
    )


@contextmanager
def _quiet() -> Generator[None]:
    """What transformers would tell of a load is either an error here or noise."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _read_config(folder: Path, fields: dict[str, Any]) -> PretrainedConfig:
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            raise ConfigurationError(
                f"config.json: {name} isn't supported in transformers' code: {fields[name]!r:.200}"
            )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validators raise what they like
        named = fields.get("architectures") or f"model_type {fields.get('model_type')!r}"
        raise ConfigurationError(
            f"config.json: {named} isn't supported: the native decoder doesn't know it, and "
            f"transformers {transformers.__version__} says: {error}"
        ) from None


def _model_class(folder: Path, config: PretrainedConfig) -> type[PreTrainedModel]:
    names = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")]
    if names[0] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ConfigurationError(
            f"{folder}/config.json: architecture {names[0]!r} isn't supported: neither the native "
            "decoder nor transformers' causal language models have it"
        )
    if config.get_text_config() is not config:
        raise ConfigurationError(
            f"{folder}/config.json: architecture {names[0]!r} isn't supported: it is more than a "
            "text model"
        )
    return getattr(transformers, names[0])


def _max_model_len(config: PretrainedConfig, requested: int) -> int:
    """As requested or the most there is; never where positions depend on a batch's lengths."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = rope.get("original_max_position_embeddings") or limit
        if not requested:
            _LOG.warning("max_model_len is %d: beyond it, longrope depends on the batch", limit)
    if limit is None:
        if not requested:
            raise ConfigurationError(
                "config.json names no max_position_embeddings; set OCTAVO_MAX_MODEL_LEN",
                param="max_model_len",
            )
        return requested
    if requested > limit:
        raise ConfigurationError(
            f"OCTAVO_MAX_MODEL_LEN={requested}: this model allows at most {limit} tokens",
            param="max_model_len",
        )
    return requested or limit


def _probe_shapes(
    model_class: type[PreTrainedModel], config: PretrainedConfig, max_model_len: int
) -> tuple[Probed | None, PreTrainedModel | None]:
    """What the model asks for, and the model without any values; None if its code needs some.

    In bfloat16: grouped products of experts exist in no other dtype without values.
    """
    try:
        with torch.device("meta"):
            model = _instantiate(model_class, config, torch.bfloat16)
        return probe(model, max_model_len), model
    except ConfigurationError:
        raise
    except Exception as error:  # whatever a model's code may raise without values
        _LOG.info("%s needs values to run: %s", model_class.__name__, error)
        return None, None


def _probe_values(model: PreTrainedModel, max_model_len: int) -> Probed:
    try:
        return probe(model, max_model_len)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__}: transformers' code of this model can't run: {error}"
        ) from error


def _instantiate(
    model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    # A copy: models write into their configurations.
    config = copy.deepcopy(config)
    return model_class._from_config(config, dtype=dtype, attn_implementation="eager")


def _draw(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> PreTrainedModel:
    """A model whose parameters transformers initialises, from `seed`."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        try:
            return _instantiate(model_class, config, dtype)
        except Exception as error:  # whatever a configuration leads its code to
            raise ConfigurationError(
                f"config.json: transformers can't make a {model_class.__name__} of it: {error}"
            ) from error


def _check_dtypes(checkpoint: Checkpoint, model_class: type[PreTrainedModel]) -> None:
    """Integers would be cast to floats without a word."""
    ignored = model_class._keys_to_ignore_on_load_unexpected or []
    for name, tensor in checkpoint.tensors.items():
        if not is_float(tensor.dtype) and not any(re.search(rule, name) for rule in ignored):
            raise ConfigurationError(
                f"{tensor.path}: tensor {name} has the dtype {tensor.dtype}; is it quantized, "
                "and config.json says nothing of it?"
            )


def _load(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    try:
        loaded: Any = model_class.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # for the report to name them all
            output_loading_info=True,
        )
    except Exception as error:  # it raises what it likes for what a file may hold
        raise ConfigurationError(f"{folder}: transformers can't load it: {error}") from error
    model, report = loaded
    _check_report(folder, report)
    return model.to(device)


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    if missing := report["missing_keys"]:
        raise ConfigurationError(f"{folder}: the model needs {some(missing)}, which no file holds")
    if unexpected := report["unexpected_keys"]:
        raise ConfigurationError(
            f"{folder}: the model has no place for {some(unexpected)}; is config.json of another "
            "model?"
        )
    if mismatched := report["mismatched_keys"]:
        name, stored, wanted = sorted(mismatched)[0]
        raise ConfigurationError(
            f"{folder}: tensor {name} has the shape {list(stored)}, config.json asks for "
            f"{list(wanted)}"
        )
    if errors := report.get("error_msgs"):
        raise ConfigurationError(f"{folder}: transformers can't load it: {errors}")


def _check_kernels(model_class: type[PreTrainedModel], probed: Probed) -> None:
    layer = probed.layers[0]
    group_size = layer.num_heads // layer.num_kv_heads
    for name, value, most in (
        ("a head dim", layer.head_dim, _MAX_HEAD_DIM),
        ("query heads for each kv head:", group_size, _MAX_GROUP_SIZE),
    ):
        if value > most:
            raise ConfigurationError(
                f"{model_class.__name__} has {name} {value}; the attention kernels take {most}"
            )


def _widest(model: PreTrainedModel) -> int:
    """The largest side of a matrix that is neither head nor embedding: bounds what a step holds."""
    head = model.get_output_embeddings()
    matrices = (
        parameter
        for module in model.modules()
        if module is not head and not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1
    )
    return max(max(matrix.shape[-2:]) for matrix in matrices)
