"""Codes: a quantised matrix before it is packed for a kernel, whatever format it came from.

N outputs, K inputs, G groups of inputs. Must not know: formats, kernels. Entry points: `Codes`,
`unpack`, `repeated`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Codes:
    """W[n, k] = scales[n, g] * (values[n, k] - zeros[n, g]) with g = groups[k].

    `values` uint8 [N, K] and `zeros` uint8 [N, G], both below 2^bits; `scales` float32 [N, G];
    `groups` int64 [K], in any order: act-order leaves neighbours in different groups.
    """

    bits: int
    values: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K], computed in float32."""
        centred = self.values.float() - self.zeros.float()[:, self.groups]
        return centred.mul_(self.scales[:, self.groups]).to(dtype)

    def in_order(self, outputs: Tensor) -> "Codes":
        """Output `outputs[n]` of this matrix becomes output n; int64 [N]."""
        rows = outputs.to(self.values.device)
        values, scales, zeros = self.values[rows], self.scales[rows], self.zeros[rows]
        return Codes(self.bits, values, scales, zeros, self.groups)


def join(parts: Sequence[Codes]) -> Codes:
    """One matrix of several with the same groups, outputs after outputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Codes(
        first.bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.zeros for part in parts]),
        first.groups,
    )


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 [R, 32 / bits * W] of int32 words [R, W]; the lowest bits of a word come first."""
    # Machines that torch runs on are little-endian: the lowest byte lies first, too.
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)


def repeated(value: int, bits: int) -> int:
    """The int32 word that holds `value` in each of its places."""
    word = sum(value << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >> 31 else word
