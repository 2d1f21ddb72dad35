"""`octavo bench kernels` on a card: cases run, and none beats the ceilings by much."""

import pytest

from octavo_worker.kernel_bench import Measured, measure_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "words", [["gqa", "16", "2048"], ["fresh 8"], ["rope"], ["sample 1 "], ["moe qwen3", "a3b 1"]]
)
def test_cases_run(words: list[str]) -> None:
    results = [item for item in measure_kernels(words) if isinstance(item, Measured)]
    assert results
    assert all(0 < item.fraction < 1.1 for item in results), results


def test_layers_run() -> None:
    results = [item for item in measure_kernels([" o "]) if isinstance(item, Measured)]
    assert {item.case.name.split()[0] for item in results} == {"w4a16", "fp8", "dense"}
