"""Octavo's Triton kernels: tensors in, tensors out.

One file per kernel: formula and paper, the kernel, a launcher with shape checks, and
`<name>_reference` in plain torch, which the tests and the benchmarks compare with. Import each
from its module (`from octavo_kernels.rms_norm import rms_norm`). Read first: `launch`, then
`gated_mul` (the smallest), `paged_kv` and `paged_decode`.

Shape legend of the whole package: T tokens of a step, S rows that decode or are sampled,
C prefill chunks, H query heads, K kv heads, G = H / K, D head dim, R rotated dims, N blocks,
B block size (tokens), M block table width, V vocabulary.

Must not know: anything but torch and triton.
"""
