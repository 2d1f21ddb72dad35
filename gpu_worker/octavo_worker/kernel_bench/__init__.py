"""What each kernel takes on this card, against what memory and tensor cores can do.

Read first: `case`. Cases say how many bytes and operations they must move and do; `timing` runs
them in CUDA graphs, after two probes that measure the card's own ceilings. Must not know: how
results are shown. Entry point: `measure_kernels`.
"""

from collections.abc import Iterator, Sequence

import torch

from octavo.errors import ConfigurationError
from octavo_worker.kernel_bench.attention_cases import attention_cases
from octavo_worker.kernel_bench.case import Case, Ceilings, Measured
from octavo_worker.kernel_bench.linear_cases import linear_cases
from octavo_worker.kernel_bench.moe_cases import moe_cases
from octavo_worker.kernel_bench.row_cases import row_cases
from octavo_worker.kernel_bench.timing import measure_ceilings, time_us

__all__ = ["Ceilings", "Measured", "all_cases", "measure_kernels"]


def all_cases() -> list[Case]:
    """Every case, nothing allocated."""
    return [*attention_cases(), *row_cases(), *linear_cases(), *moe_cases()]


def measure_kernels(words: Sequence[str]) -> Iterator[Ceilings | Measured]:
    """The card's ceilings, then each case whose name has all of `words` in it.

    Raises ConfigurationError without a card, or if no case is left.
    """
    cases = [case for case in all_cases() if all(word in case.name for word in words)]
    if not cases:
        raise ConfigurationError(f"no kernel case has {' and '.join(words)} in its name")
    if not torch.cuda.is_available():
        raise ConfigurationError("torch finds no CUDA device to measure")
    ceilings = measure_ceilings()
    yield ceilings
    for case in cases:
        yield Measured(case, *time_us(case.make()), ceilings)
        torch.cuda.empty_cache()
