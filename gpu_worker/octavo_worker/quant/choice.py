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

_Found = Quantization | Fp8Format | BlockScales


def _compressed_tensors(fields: FieldReader) -> _Found:
    if fields.get("format") == FLOAT_QUANTIZED:
        return Fp8Format.from_compressed(fields)
    return CompressedTensors.from_fields(fields)


_FORMATS: Mapping[str, Callable[[FieldReader], _Found]] = {
    "awq": Awq.from_fields,
    "compressed-tensors": _compressed_tensors,
    "fp8": Fp8Format.from_fields,
    "gptq": Gptq.from_fields,
}
_PLACES = ("quantization_config", "compression_config")
_SAME = ("bits", "group_size", "desc_act", "sym", "checkpoint_format")


def quantization_of(config: Mapping[str, Any], gptq: Mapping[str, Any] | None) -> _Found | None:
    """The format that `config` (config.json) names; None: weights as they are.

    `gptq`: quantize_config.json, if the folder has one: AutoGPTQ's, which used to be the only
    place that said so. Raises ConfigurationError naming file and field.
    """
    for name in _PLACES:
        fields = config.get(name)
        if fields:
            return _read(fields, gptq, f"config.json: {name}")
    if gptq is None:
        return None
    reader = FieldReader(gptq, "quantize_config.json")
    if gptq.get("quant_method", "gptq") != "gptq":
        raise reader.error("quant_method", "contradicts config.json, which has none")
    return Gptq.from_fields(reader)


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has two scales a layer, of keys and of values, for a cache in 8 bits.

    Formats other than compressed-tensors refuse the field. Raises ConfigurationError naming it.
    """
    for name in _PLACES:
        fields = config.get(name)
        if isinstance(fields, dict) and fields.get("kv_cache_scheme"):
            scheme = FieldReader(fields, f"config.json: {name}").inner("kv_cache_scheme")
            check_floats(scheme, ("tensor",))
            if scheme.get("dynamic"):
                raise scheme.error("dynamic", "isn't supported")
            return True
    return False


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
