"""Which format a folder is in, from what its configuration says.

Entry points: `quantization_of`, `has_kv_scales`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigurationError
from octavo_worker.quant.awq import Awq
from octavo_worker.quant.block_scales import BlockScales
from octavo_worker.quant.compressed_tensors import CompressedTensors
from octavo_worker.quant.fields import FieldReader
from octavo_worker.quant.fp8 import FLOAT_QUANTIZED, Fp8Format, check_floats
from octavo_worker.quant.gptq import Gptq
from octavo_worker.quant.stored import Quantization

_COMPRESSED_TENSORS = "compressed-tensors"
_Found = Quantization | Fp8Format | BlockScales


def _compressed_tensors(fields: FieldReader) -> _Found:
    if fields.get("format") == FLOAT_QUANTIZED:
        return Fp8Format.from_compressed(fields)
    return CompressedTensors.from_fields(fields)


_FORMATS: Mapping[str, Callable[[FieldReader], _Found]] = {
    "awq": Awq.from_fields,
    _COMPRESSED_TENSORS: _compressed_tensors,
    "fp8": Fp8Format.from_fields,
    "gptq": Gptq.from_fields,
}
_SAME = ("bits", "group_size", "desc_act", "sym", "checkpoint_format")


def quantization_of(config: Mapping[str, Any], gptq: Mapping[str, Any] | None) -> _Found | None:
    """The format that `config` (config.json) names; None: weights as they are.

    `gptq`: quantize_config.json, if the folder has one: AutoGPTQ's, which used to be the only
    place that said so. Raises ConfigurationError naming file and field.
    """
    if (stated := _stated(config)) is not None:
        return _read(stated[0], gptq, stated[1])
    if gptq is None:
        return None
    reader = FieldReader(gptq, "quantize_config.json")
    if gptq.get("quant_method", "gptq") != "gptq":
        raise reader.error("quant_method", "contradicts config.json, which has none")
    return Gptq.from_fields(reader)


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has two scales a layer, of keys and of values, for a cache in 8 bits.

    Only compressed-tensors has them. Raises ConfigurationError naming the field.
    """
    stated = _stated(config)
    if stated is None:
        return False
    reader = FieldReader(*stated)
    if reader.get("quant_method") != _COMPRESSED_TENSORS or not reader.get("kv_cache_scheme"):
        return False
    scheme = reader.inner("kv_cache_scheme")
    check_floats(scheme, ("tensor",))
    scheme.refuse("dynamic")
    return True


def _stated(config: Mapping[str, Any]) -> tuple[Any, str] | None:
    """What config.json says of a format, and where."""
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            return config[name], f"config.json: {name}"
    return None


def _read(fields: Any, gptq: Mapping[str, Any] | None, where: str) -> _Found:
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{where}={fields!r:.200} must be an object")
    reader = FieldReader(fields, where)
    method = fields.get("quant_method")
    read = _FORMATS.get(str(method))
    if read is None:
        raise reader.error("quant_method", f"isn't supported; supported: {', '.join(_FORMATS)}")
    if gptq is not None and method == "gptq":
        reader = FieldReader(_merged(fields, gptq, reader), where)
    return read(reader)


def _merged(
    fields: Mapping[str, Any], gptq: Mapping[str, Any], reader: FieldReader
) -> Mapping[str, Any]:
    """What config.json leaves out, such as who wrote the checkpoint, from the other file."""
    named = {name: value for name, value in fields.items() if value is not None}
    for name in _SAME:
        other = gptq.get(name)
        if other is not None and name in named and named[name] != other:
            raise reader.error(name, f"contradicts quantize_config.json, where it is {other!r}")
    return {**gptq, **named}
