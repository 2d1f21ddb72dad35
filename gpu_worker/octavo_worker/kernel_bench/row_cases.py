"""What works row by row: norms, SwiGLU, the sampler. Sizes are Llama 3.1 8B's.

Entry point: `row_cases`.
"""

from collections.abc import Callable, Iterator

import torch

from octavo_kernels.gated_mul import silu_mul
from octavo_kernels.rms_norm import add_rms_norm, rms_norm
from octavo_kernels.sample import sample
from octavo_worker.kernel_bench.case import Call, Case, num_sets

_HIDDEN, _INTERMEDIATE, _VOCABULARY = 4096, 14_336, 128_256
_ITEM = 2
_EPS = 1e-5


def row_cases() -> list[Case]:
    return [*_elementwise_cases(), *_sampler_cases()]


def _elementwise_cases() -> Iterator[Case]:
    for num_rows in (1, 128, 8192):
        size = num_rows * _HIDDEN * _ITEM
        norm_bytes = 2 * size + _HIDDEN * _ITEM
        yield _case(f"rms_norm {num_rows} x {_HIDDEN}", norm_bytes, 4 * size // _ITEM, _norm)
        sum_bytes = 4 * size + _HIDDEN * _ITEM
        yield _case(f"add_rms_norm {num_rows} x {_HIDDEN}", sum_bytes, 5 * size // _ITEM, _add_norm)
        num_products = num_rows * _INTERMEDIATE
        name = f"silu_mul {num_rows} x {_INTERMEDIATE}"
        yield _case(name, 3 * num_products * _ITEM, 5 * num_products, _silu)


def _case(name: str, num_bytes: int, flops: int, make_call: Callable[[int], Call]) -> Case:
    num_rows = int(name.split()[1])
    return Case(
        name,
        num_bytes,
        flops,
        lambda: [make_call(num_rows) for _ in range(num_sets(num_bytes))],
    )


def _norm(num_rows: int) -> Call:
    x, weight = _random(num_rows, _HIDDEN), _random(_HIDDEN)
    return lambda: rms_norm(x, weight, _EPS)


def _add_norm(num_rows: int) -> Call:
    x, residual, weight = _random(num_rows, _HIDDEN), _random(num_rows, _HIDDEN), _random(_HIDDEN)
    return lambda: add_rms_norm(x, residual, weight, _EPS)


def _silu(num_rows: int) -> Call:
    gate_up = _random(num_rows, 2 * _INTERMEDIATE)
    return lambda: silu_mul(gate_up)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _sampler_cases() -> Iterator[Case]:
    """Logits are read once at best: a filter that rejects a draw reads them again."""
    for num_rows in (1, 256):
        yield _sampler(num_rows, "greedy", temperature=0.0)
        yield _sampler(num_rows, "plain")
        yield _sampler(num_rows, "top_p 0.95", top_p=0.95)
        yield _sampler(num_rows, "top_k 50", top_k=50)


def _sampler(
    num_rows: int, setting: str, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> Case:
    num_bytes = num_rows * _VOCABULARY * 4

    def call() -> Call:
        logits = 2 * torch.randn(num_rows, _VOCABULARY, device="cuda")
        row = torch.arange(num_rows, device="cuda")

        def filled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device="cuda")

        filters = (filled(temperature), filled(top_p), filled(top_k, torch.int32), filled(0.0))
        return lambda: sample(logits, *filters, row, row, row.int())

    name = f"sample {num_rows} x {_VOCABULARY} {setting}"
    flops = 20 * num_rows * _VOCABULARY
    return Case(name, num_bytes, flops, lambda: [call() for _ in range(num_sets(num_bytes))])
