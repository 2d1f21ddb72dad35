"""`octavo bench kernels` on a card: cases run and are measured. How fast is the records' matter."""

import math
from dataclasses import astuple

import pytest

from octavo_worker.kernel_bench import Ceilings, Measured, all_cases, measure_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "words", [["gqa", "16", "2048"], ["fresh 8"], ["rope"], ["sample 1 "], ["moe qwen3", "a3b 1"]]
)
def test_cases_run(words: list[str]) -> None:
    ceilings, *results = measure_kernels(words)
    assert isinstance(ceilings, Ceilings)
    assert all(0 < value < math.inf for value in astuple(ceilings)), ceilings
    wanted = [case for case in all_cases() if all(word in case.name for word in words)]
    assert wanted
    for result, case in zip(results, wanted, strict=True):
        assert isinstance(result, Measured)
        assert (result.case.name, result.case.num_bytes) == (case.name, case.num_bytes)
        assert 0 < result.us <= result.us_p99 < math.inf, result
        assert 0 < result.fraction < math.inf, result


def test_layers_run() -> None:
    results = [item for item in measure_kernels([" o "]) if isinstance(item, Measured)]
    assert {item.case.name.split()[0] for item in results} == {"skinny", "w4a16", "fp8", "dense"}
