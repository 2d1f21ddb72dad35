"""Models: from a folder to a decoder on a device. Entry points: `load_any_model`, `load_model`.

`families` says what an architecture's name means, `layout` how its checkpoints name and store
what, `config` reads the folder, `rope` makes the position table, `decoder` computes, `quantized`
makes the linear layers of quantised checkpoints; `fallback` is transformers' code for what they
don't know. Must not know: requests, rows, sampling.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.errors import ConfigurationError
from octavo_worker.models.config import ModelConfig, read_fields
from octavo_worker.models.decoder import EMBED_NAME, HEAD_NAME, Model
from octavo_worker.models.families import FAMILIES, Family, find_family
from octavo_worker.models.folder import (
    choose_dtype,
    read_gptq_fields,
    read_json,
    stored_dtype,
)
from octavo_worker.models.fp8_linear import Fp8Maker
from octavo_worker.models.linear import CuttingMaker, DenseMaker
from octavo_worker.models.moe import with_stored_experts
from octavo_worker.models.quant_linear import W4Kernels
from octavo_worker.models.quantized import QuantMaker
from octavo_worker.models.text_part import has_other_parts, text_name
from octavo_worker.quant import Fp8Format
from octavo_worker.weights import (
    Checkpoint,
    Progress,
    StoredTensor,
    choose_head,
    fill_random,
    load_weights,
)

if TYPE_CHECKING:
    from octavo_worker.models.fallback import FallbackModel
    from octavo_worker.parallel.sharded import Exchange

_LOG = logging.getLogger(__name__)
# On a card, reading a file and copying to the card overlap, and each takes more than one core.
_LOAD_THREADS = {"cpu": 1, "cuda": 8}

__all__ = [
    "FAMILIES",
    "Family",
    "Model",
    "ModelConfig",
    "find_family",
    "load_any_model",
    "load_model",
    "meta_model",
    "read_config",
]


def load_any_model(
    folder: Path,
    *,
    impl: str = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    max_model_len: int = 0,
    quantization: str = "auto",
    progress: Progress | None = None,
    exchange: "Exchange | None" = None,
) -> "Model | FallbackModel":
    """The model of `folder`, native or in transformers' code.

    `impl`: "native", "transformers", or "auto" = native if the architecture is known. The other
    arguments and errors are `load_model`'s.
    """
    is_known = find_family(read_json(folder / "config.json")) is not None
    if impl == "native" or (impl == "auto" and is_known):
        return load_model(
            folder,
            dtype=dtype,
            device=device,
            load_format=load_format,
            seed=seed,
            max_model_len=max_model_len,
            quantization=quantization,
            progress=progress,
            exchange=exchange,
        )
    if quantization != "auto":
        raise ConfigurationError(
            f"OCTAVO_QUANTIZATION={quantization}: models in transformers' code stay as they are",
            param="quantization",
        )
    if exchange is not None:
        raise ConfigurationError(
            "OCTAVO_TENSOR_PARALLEL: models in transformers' code can't be shared out",
            param="tensor_parallel",
        )
    # Imports transformers, which takes seconds.
    from octavo_worker.models.fallback_loading import load_fallback

    return load_fallback(
        folder,
        dtype=dtype,
        device=torch.device(device),
        load_format=load_format,
        seed=seed,
        max_model_len=max_model_len,
        progress=progress,
    )


def load_model(
    folder: Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    max_model_len: int = 0,
    quantization: str = "auto",
    progress: Progress | None = None,
    exchange: "Exchange | None" = None,
) -> Model:
    """The model of `folder` on `device`.

    `dtype`: "auto" (the checkpoint's on cuda, float32 on the CPU), a name or a torch dtype.
    `load_format`: "auto" = safetensors; "random" = weights drawn from `seed`, for folders that
    hold a config.json only. `max_model_len` 0 = the longest that the model allows.
    `quantization`: "auto" = as the checkpoint is; "fp8" = linear layers rounded to 8-bit floats
    while they are loaded. `progress` is called with the fraction loaded, up to 1.0. `exchange`: of
    the ranks that share the model; this one's part is loaded (None = there is one rank). Raises
    ConfigurationError for whatever is wrong with the folder, naming file and tensor or field.
    """
    device = torch.device(device)
    stored = stored_dtype(read_fields(folder))
    if load_format == "random":
        chosen = choose_dtype(dtype, stored, device)
        config = read_config(folder, chosen, max_model_len, quantization)
        model = _make_model(config, device, config.tie_word_embeddings, exchange, None)
        fill_random(model.slots(), seed=seed, std=config.initializer_range)
        _finish(model)
        if progress is not None:
            progress(1.0)
        return model
    base_name = (read_gptq_fields(folder) or {}).get("model_file_base_name")
    with Checkpoint(folder, base_name=base_name) as checkpoint:
        chosen = choose_dtype(dtype, stored or checkpoint.dtype(), device)
        config = read_config(folder, chosen, max_model_len, quantization)
        if has_other_parts(read_json(folder / "config.json")):
            checkpoint.rename(text_name)
            _LOG.info("the text part of %s alone: images aren't read", folder.name)
        if config.block_scales is not None:
            checkpoint.widen(config.block_scales)
            _LOG.info("stored in %s; computed in %s", config.block_scales, chosen)
        layout = config.layout
        embed_name, head_name = layout.name_of(EMBED_NAME), layout.name_of(HEAD_NAME)
        config = with_stored_experts(config, checkpoint.tensors)
        head = choose_head(
            checkpoint,
            tie=config.tie_word_embeddings,
            embed_name=embed_name,
            head_name=head_name,
        )
        model = _make_model(config, device, head.tied, exchange, checkpoint.tensors)
        slots = layout.stored(model.slots(), config.heads)
        slots[head.embed_name] = slots.pop(embed_name)
        ignored = (head_name,) if head.tied else ()
        load_weights(
            checkpoint,
            slots,
            ignored=ignored,
            progress=progress,
            num_threads=_LOAD_THREADS[device.type],
        )
        del slots  # they hold what finishing lets go
    _finish(model)
    return model


def _finish(model: Model) -> None:
    model.finish()
    if model.device.type == "cuda":
        # What was let go counts as used until the card has it back.
        torch.cuda.empty_cache()


def read_config(
    folder: Path, dtype: torch.dtype, max_model_len: int, quantization: str
) -> ModelConfig:
    """The configuration that `load_model` would load by; arguments and errors are its own."""
    config = ModelConfig.from_folder(folder, dtype=dtype, max_model_len=max_model_len)
    if quantization != "fp8" or isinstance(config.quantization, Fp8Format):
        return config
    if config.quantization is not None:
        raise ConfigurationError(
            f"OCTAVO_QUANTIZATION=fp8: the checkpoint is quantised already: {config.quantization}",
            param="quantization",
        )
    if config.moe is not None:
        raise ConfigurationError(
            f"OCTAVO_QUANTIZATION=fp8: the experts of {config.architecture} are computed as they "
            "are stored; leave it at auto",
            param="quantization",
        )
    return replace(config, quantization=Fp8Format())


def _make_model(
    config: ModelConfig,
    device: torch.device,
    tied: bool,
    exchange: "Exchange | None",
    stored: Mapping[str, StoredTensor] | None,
) -> Model:
    """`stored`: the checkpoint's tensors by name; None = values will be drawn."""
    make: CuttingMaker = DenseMaker(config.dtype, device)
    if isinstance(config.quantization, Fp8Format):
        make = Fp8Maker(config, config.quantization, device, stored)
        _LOG.info("quantised: %s", config.quantization)
    elif config.quantization is not None:
        make = QuantMaker(config, config.quantization, device, stored, _kernels_for(device))
        _LOG.info("quantised: %s; computed with %s", config.quantization, make.form)
    if exchange is None:
        return Model(config, device, tied=tied, make=make)
    # Only here: a worker that has its model to itself imports none of it.
    from octavo_worker.parallel.sharded import make_share

    return make_share(config, device, exchange, tied=tied, make=make)


def meta_model(config: ModelConfig, *, is_packed: bool) -> Model:
    """A model without values, on the meta device; `is_packed`: quantised layers as they're kept,
    4-bit codes in the slots; else as if there were no quantisation."""
    meta = torch.device("meta")
    make: CuttingMaker = DenseMaker(config.dtype, meta)
    quantization = config.quantization if is_packed else None
    if isinstance(quantization, Fp8Format):
        make = Fp8Maker(config, quantization, meta, None)
    elif quantization is not None:
        make = QuantMaker(config, quantization, meta, None, None)
    return Model(config, meta, tied=config.tie_word_embeddings, make=make)


def _kernels_for(device: torch.device) -> W4Kernels | None:
    if device.type != "cuda":
        return None
    # Only here: a CPU worker never imports triton.
    from octavo_kernels.w4_dequantize import dequantize
    from octavo_kernels.w4_weight import pack
    from octavo_kernels.w4a16 import matmul

    return W4Kernels(pack, matmul, dequantize)
