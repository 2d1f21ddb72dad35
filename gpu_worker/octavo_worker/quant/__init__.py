"""Quantised checkpoints: what a folder says of its format, and from stored tensors to codes.

`choice` finds the format, `gptq`, `awq` and `compressed_tensors` know one each, `stored` is how
they describe tensors, `codes` what all of them become. `fp8` and `block_scales` stand apart: no
integers. Must not know: layers. Entry point: `quantization_of`.
"""

from octavo_worker.quant.block_scales import BlockScales
from octavo_worker.quant.choice import has_kv_scales, quantization_of
from octavo_worker.quant.codes import Codes
from octavo_worker.quant.fp8 import Fp8Format
from octavo_worker.quant.stored import Quantization, Region, StoredForm

__all__ = [
    "BlockScales",
    "Codes",
    "Fp8Format",
    "Quantization",
    "Region",
    "StoredForm",
    "has_kv_scales",
    "quantization_of",
]
