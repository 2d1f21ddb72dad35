"""What a model will take on a card, from config.json and headers: nothing is loaded.

The model is built on the meta device, where a tensor is a shape, by the code that builds it in
earnest: the numbers are the worker's own. Must not know: cards, services. Entry points:
`footprint`; `keeps_copies`, the worker's choice.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigurationError
from octavo_worker.dequantized_copies import KVWish, are_affordable, bytes_of_copies
from octavo_worker.kv_cache import KVShape, kv_bytes_per_token, scratch_bytes
from octavo_worker.models import find_family, meta_model, read_config
from octavo_worker.models.config import read_fields
from octavo_worker.models.folder import choose_dtype, read_json
from octavo_worker.models.folder import stored_dtype as dtype_in
from octavo_worker.models.quant_linear import MOST_ROWS_OF_CODES
from octavo_worker.quant import Fp8Format
from octavo_worker.weights import INDEX_NAME, SINGLE_NAME, Checkpoint

_META, _CARD = torch.device("meta"), torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes. `read_bytes`: weights that a step of many tokens reads, all experts' too;
    `read_bytes_of_one`: that a step of one token reads; `params_per_token`: how many a token is
    multiplied with; `stored_bytes`: the checkpoint's tensors, 0 = not there; `copies_bytes`: of
    16-bit copies of 4-bit layers, if they're kept; they aren't among the weights. Where they are,
    a step of more than `most_rows_of_codes` rows reads `read_bytes_with_copies`."""

    architecture: str
    implementation: str
    weight_format: str
    weight_bytes: int
    stored_bytes: int
    copies_bytes: int
    read_bytes: int
    read_bytes_of_one: int
    read_bytes_with_copies: int
    most_rows_of_codes: int
    params_per_token: int
    num_heads: int
    num_kv_heads: int
    kv_bytes_per_token: int
    kv_dtype: str
    max_model_len: int
    shape: KVShape

    def scratch_bytes(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """What a step needs beside weights and cache, at most."""
        return scratch_bytes(self.shape, max_num_seqs, max_num_batched_tokens)


def keeps_copies(copies_bytes: int, room_bytes: int, most_kv_bytes: int) -> bool:
    """Whether a card keeps copies of so many bytes by default, which has the room for them and
    for KV blocks together."""
    return are_affordable(copies_bytes, room_bytes, KVWish(most_kv_bytes, 0))


def footprint(
    folder: Path,
    *,
    impl: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 0,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Footprint:
    """Of the model in `folder` on a card; arguments and errors as in `models.load_any_model`."""
    is_known = find_family(read_json(folder / "config.json")) is not None
    if impl == "native" or (impl == "auto" and is_known):
        planned = _native(folder, dtype, max_model_len, quantization)
        return planned if kv_cache_dtype == "auto" else _with_fp8_cache(planned)
    for name, value in (("quantization", quantization), ("kv-cache-dtype", kv_cache_dtype)):
        if value != "auto":
            raise ConfigurationError(
                f"--{name} {value}: models in transformers' code have none",
                param=name.replace("-", "_"),
            )
    return _fallback(folder, dtype, max_model_len)


def _native(folder: Path, dtype: str, max_model_len: int, quantized: str) -> Footprint:
    chosen = choose_dtype(dtype, dtype_in(read_fields(folder)), _CARD)
    config = read_config(folder, chosen, max_model_len, quantized)
    dense = meta_model(config, is_packed=False)
    quantization, weight_format = config.quantization, _name(chosen)
    weight_bytes, copies_bytes = dense.num_bytes(), 0
    if isinstance(quantization, Fp8Format):
        weight_bytes = meta_model(config, is_packed=True).num_bytes()
        weight_format = str(quantization)
    elif quantization is not None and quantization.bits == 4:
        # Codes stay packed on a card, and their scales are kept in the model's dtype.
        packed = meta_model(config, is_packed=True)
        weight_bytes = sum(_kept_bytes(slot.target, chosen) for slot in packed.slots().values())
        num_copied = sum(layer.num_quantized for layer in packed.quantized)
        copies_bytes = bytes_of_copies(num_copied, chosen)
        weight_format = str(quantization)
    elif quantization is not None:
        weight_format = f"{quantization}, as {_name(chosen)}"
    elif config.block_scales is not None:
        weight_format = f"{config.block_scales}, as {_name(chosen)}"
    # The embedding is looked up, not multiplied, unless it is the head too.
    idle_params = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    read_bytes = weight_bytes - idle_params * chosen.itemsize
    dense_read_bytes = dense.num_bytes() - idle_params * chosen.itemsize
    if config.moe is not None:
        moe = config.moe
        expert_params = 3 * config.hidden_size * moe.expert_size
        idle_params += sum(moe.sparse_layers) * (moe.num_experts - moe.top_k) * expert_params
    return Footprint(
        architecture=config.architecture,
        implementation="native",
        weight_format=weight_format,
        weight_bytes=weight_bytes,
        stored_bytes=_stored_bytes(folder),
        copies_bytes=copies_bytes,
        read_bytes=read_bytes,
        read_bytes_of_one=weight_bytes - idle_params * chosen.itemsize,
        read_bytes_with_copies=dense_read_bytes if copies_bytes else read_bytes,
        most_rows_of_codes=MOST_ROWS_OF_CODES,
        params_per_token=dense.num_bytes() // chosen.itemsize - idle_params,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        kv_bytes_per_token=kv_bytes_per_token(config),
        kv_dtype=_name(chosen),
        max_model_len=config.max_model_len,
        shape=config,
    )


def _with_fp8_cache(planned: Footprint) -> Footprint:
    dtype = torch.float8_e4m3fn
    per_token = kv_bytes_per_token(planned.shape, dtype)
    return replace(planned, kv_bytes_per_token=per_token, kv_dtype=_name(dtype))


def _fallback(folder: Path, dtype: str, max_model_len: int) -> Footprint:
    # Imports transformers, which takes seconds.
    from octavo_worker.models.fallback_loading import fallback_shape

    config, model = fallback_shape(folder, dtype=dtype, device=_CARD, max_model_len=max_model_len)
    params = sum(parameter.numel() for parameter in model.parameters())  # a tied head once
    embed: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    idle_params = 0 if head.weight is embed.weight else embed.weight.numel()
    itemsize = config.dtype.itemsize
    return Footprint(
        architecture=config.architecture,
        implementation="transformers",
        weight_format=_name(config.dtype),
        weight_bytes=params * itemsize,
        stored_bytes=_stored_bytes(folder),
        copies_bytes=0,
        read_bytes=(params - idle_params) * itemsize,
        read_bytes_of_one=(params - idle_params) * itemsize,
        read_bytes_with_copies=(params - idle_params) * itemsize,
        most_rows_of_codes=MOST_ROWS_OF_CODES,
        params_per_token=params - idle_params,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        kv_bytes_per_token=kv_bytes_per_token(config),
        kv_dtype=_name(config.dtype),
        max_model_len=config.max_model_len,
        shape=config,
    )


def _stored_bytes(folder: Path) -> int:
    """By the headers; 0 where only the configuration is there. Broken files are refused."""
    if not any((folder / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
        return 0
    with Checkpoint(folder) as checkpoint:
        return sum(tensor.num_bytes for tensor in checkpoint.tensors.values())


def _kept_bytes(target: torch.Tensor, dtype: torch.dtype) -> int:
    return target.numel() * dtype.itemsize if target.is_floating_point() else target.nbytes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
