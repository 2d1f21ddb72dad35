"""8-bit floats (e4m3): how checkpoints store layers in them, and how layers compute with them.

Stored: `weight` float8_e4m3fn [N, K] with W = weight * `weight_scale`, a scale a layer or an
output (a scale a block: `block_scales`). Formats: compressed-tensors "float-quantized"
(llm-compressor's), "fp8" (AutoFP8's). Activations are rounded to e4m3 with a scale a token, from
its largest value: static `input_scale`s are read past, since a token's own scale is never coarser.
Or rounded here: any layer's weights, a scale an output. Must not know: layers, files. Entry points:
`Fp8Format`, `quantize_rows`, `choose_product`.
"""

from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from octavo_worker.quant.block_scales import BLOCK, BlockScales
from octavo_worker.quant.compressed_tensors import only_group, rules_of
from octavo_worker.quant.fields import FieldReader
from octavo_worker.quant.modules import ModuleRules, contains

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
_LEAST_MAX = 1e-12  # a row of zeros is zeros times any scale
FLOAT_QUANTIZED = "float-quantized"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Which layers are in 8 bits. `is_stored`: in the checkpoint; else they are rounded at load."""

    rules: ModuleRules = field(default_factory=ModuleRules)
    is_stored: bool = False

    @classmethod
    def from_fields(cls, fields: FieldReader) -> Self | BlockScales:
        """AutoFP8's, or DeepSeek's. Raises ConfigurationError naming the field."""
        if fields.get("weight_block_size") is not None:
            return BlockScales.from_fields(fields)
        fields.word("activation_scheme", ("dynamic", "static"), "dynamic")
        fields.refuse("kv_cache_scheme")
        names = (*fields.names("ignored_layers"), *fields.names("modules_to_not_convert"))
        return cls(ModuleRules(tuple(map(contains, names))), is_stored=True)

    @classmethod
    def from_compressed(cls, fields: FieldReader) -> Self | BlockScales:
        """compressed-tensors' "float-quantized". Raises ConfigurationError naming the field."""
        group = only_group(fields)
        weights = group.inner("weights")
        strategy = check_floats(weights, ("tensor", "channel", BLOCK))
        weights.refuse("dynamic")
        inputs = group.inner("input_activations")
        if strategy == BLOCK:
            check_floats(inputs, ("group",))
            return BlockScales.from_compressed(weights)
        check_floats(inputs, ("tensor", "token"))
        return cls(rules_of(fields, group), is_stored=True)

    def covers(self, module: str) -> bool:
        """Whether the linear layer of this name is in 8 bits."""
        return self.rules.cover(module)

    def __str__(self) -> str:
        return "8-bit floats (e4m3)" + ("" if self.is_stored else ", rounded at load")


def check_floats(fields: FieldReader, strategies: tuple[str, ...]) -> str:
    """The strategy of what compressed-tensors calls floats of 8 bits."""
    fields.number("num_bits", (8,))
    fields.word("type", ("float",), "float")
    if not fields.flag("symmetric", default=True):
        raise fields.error("symmetric", "must be true: floats have no zero point")
    return fields.word("strategy", strategies, "tensor")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale rounded to e4m3 [M, K], scale float32 [M]); x / scale ends at 448 in each row."""
    values = x.float()
    scales = values.abs().amax(dim=1).clamp(min=_LEAST_MAX) / E4M3_MAX
    return (values / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scales


class ScaledProduct(Protocol):
    """x Wᵀ [T, N] in x's dtype, of x [T, K] rounded to e4m3 and W = weight * scales[:, None]."""

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """weight: e4m3 [N, K], as `arrange` gave it; scales: float32 [N]."""
        ...

    def arrange(self, weight: Tensor) -> Tensor | None:
        """The weight [N, K] with its inputs in another order; None = it is taken as it is."""
        ...


class ExactProduct:
    """What e4m3 means, in float32, anywhere."""

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return exact_product(x, weight, scales)

    def arrange(self, weight: Tensor) -> None:  # noqa: ARG002 - one signature
        return None


def exact_product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x Wᵀ [T, N] in x's dtype, computed in float32."""
    rounded, x_scales = quantize_rows(x)
    product = rounded.float() @ weight.float().t()
    return (product * x_scales[:, None] * scales).to(x.dtype)


def choose_product(device: torch.device) -> ScaledProduct:
    """For layers on `device`."""
    if device.type != "cuda":
        return ExactProduct()
    # Only here: a CPU worker never imports triton.
    from octavo_worker.quant.fp8_cuda import CudaProduct

    return CudaProduct()
