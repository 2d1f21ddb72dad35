"""octavo_worker.kernel_bench and `octavo bench kernels`: what is counted, what is shown."""

import pytest
from rich.console import Console

from octavo.cli import main as run_cli
from octavo.cli.bench_kernels import kernel_record, kernel_table
from octavo.errors import ConfigurationError
from octavo_worker.kernel_bench import all_cases, measure_kernels
from octavo_worker.kernel_bench.case import Case, Ceilings, Measured, num_sets
from octavo_worker.kernel_bench.linear_cases import fastest_ways

CASES = {case.name: case for case in all_cases()}
H200 = Ceilings(bytes_s=4.2e12, flops_s=750e12)


def _measured(case: Case, us: float) -> Measured:
    return Measured(case, us, 1.5 * us, H200)


def test_bytes_and_operations_are_those_of_the_shapes() -> None:
    """Against numbers worked out by hand."""
    assert len(CASES) == len(all_cases())
    decode = CASES["paged_decode gqa 64 x 2048"]
    # 64 rows of 2,048 tokens of 4 KiB, and a query and an answer of 8 KiB a row.
    assert decode.num_bytes == 64 * 2048 * 4096 + 64 * 2 * 8192
    assert decode.flops == 64 * 2048 * 32 * 128 * 4
    mha = CASES["paged_decode mha 64 x 2048"]
    assert mha.num_bytes == 64 * 2048 * 16_384 + 64 * 2 * 8192
    fp8 = CASES["paged_decode mha 64 x 2048 fp8"]
    assert fp8.num_bytes == 64 * 2048 * 8192 + 64 * 2 * 8192
    prefill = CASES["paged_prefill fresh 4096"]
    assert prefill.flops == 4 * 32 * 128 * (4096 * 4097 // 2)
    assert prefill.num_bytes == 4096 * (4096 + 2 * 8192)
    after = CASES["paged_prefill 512 after 7680"]
    assert after.flops == 4 * 32 * 128 * (7680 * 512 + 512 * 513 // 2)
    norm = CASES["rms_norm 8192 x 4096"]
    assert norm.num_bytes == 2 * 8192 * 4096 * 2 + 8192
    assert CASES["silu_mul 128 x 14336"].num_bytes == 3 * 128 * 14_336 * 2
    assert CASES["sample 256 x 128256 plain"].num_bytes == 256 * 128_256 * 4
    assert CASES["rope_and_cache 128"].num_bytes == 128 * (104 * 256 + 512 + 16)
    w4 = CASES["w4a16 down 8 gemm"]
    # Half a byte a weight, 4 bytes a group of 128; x and y in bf16.
    assert w4.num_bytes == 4096 * 14_336 // 2 + 4096 * 112 * 4 + 8 * (4096 + 14_336) * 2
    assert w4.flops == 2 * 8 * 4096 * 14_336
    fp8 = CASES["fp8 down 8 kernel"]
    assert fp8.num_bytes == 4096 * 14_336 + 4096 * 4 + 8 * (4096 + 14_336) * 2
    dense = CASES["dense qkv 1"]
    assert dense.num_bytes == (6144 * 4096 + 6144 + 4096) * 2


def test_experts_are_read_once_if_they_are_hit() -> None:
    expert = 3 * 2048 * 768
    one, many = CASES["moe qwen3-30b-a3b 1"], CASES["moe qwen3-30b-a3b 32"]
    assert one.num_bytes == (8 * expert + 2 * 2048) * 2
    assert one.flops == 2 * 8 * expert
    # 256 pairs hit all of the 128 experts.
    assert many.num_bytes == (128 * expert + 32 * 2 * 2048) * 2
    assert many.flops == 32 * one.flops
    assert CASES["moe mixtral-8x7b 256"].num_bytes > 8 * 3 * 4096 * 14_336 * 2


def test_every_way_of_4_bit_layers_is_measured() -> None:
    """Where they cross; few rows only read codes."""
    for layer in ("qkv", "o", "gate_up", "down"):
        for num_rows in (1, 32, 64, 96, 128, 192, 256):
            start = f"w4a16 {layer} {num_rows} "
            ways = {name.split()[-1] for name in CASES if name.startswith(start)}
            assert ways == ({"gemm"} if num_rows < 64 else {"gemm", "dequantize", "copy"})
    copy, dense = CASES["w4a16 down 128 copy"], CASES["dense down 128"]
    assert (copy.num_bytes, copy.flops) == (dense.num_bytes, dense.flops)


def test_decode_steps_products_are_measured() -> None:
    """Where they are taken: 8-bit floats of many rows go to the library's product."""
    for form, most in (("bf16", 128), ("e4m3", 64), ("w4", 128)):
        case = CASES[f"skinny {form} down 8"]
        assert case.flops == 2 * 8 * 4096 * 14_336
        assert f"skinny {form} o {most}" in CASES
        assert (f"skinny {form} o 128" in CASES) == (most == 128)
    sizes = [CASES[f"skinny {form} o 1"].num_bytes for form in ("bf16", "e4m3", "w4")]
    assert sizes == sorted(sizes, reverse=True)


def test_enough_sets_keep_the_cache_cold() -> None:
    assert num_sets(1 << 40) == 1
    assert num_sets(100 << 20) == 2
    assert num_sets(1) == 32


def test_the_binding_ceiling_counts() -> None:
    memory = _measured(Case("sample", 4_200_000, 1000, list), us=2.0)
    assert memory.is_memory_bound
    assert memory.floor_us == pytest.approx(1.0)
    assert memory.fraction == pytest.approx(0.5)
    assert memory.gb_s == pytest.approx(2100)
    compute = _measured(Case("prefill", 1000, 750_000_000, list), us=4.0)
    assert not compute.is_memory_bound
    assert compute.fraction == pytest.approx(0.25)
    assert compute.tflop_s == pytest.approx(187.5)


def test_table_and_record() -> None:
    results = [_measured(CASES["paged_decode gqa 64 x 2048"], us=150.0)]
    results += [_measured(CASES["paged_prefill fresh 8192"], us=1500.0)]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(kernel_table(results))
    rows = [line for line in capture.get().splitlines() if "paged" in line]
    assert ["GB/s" in row for row in rows] == [True, False]
    assert "85.4 %" in rows[0]
    assert "TFLOP/s" in rows[1]
    record = kernel_record(results[0])
    assert record["us"] == {"p50": 150.0, "p99": 225.0}
    assert record["limit_fraction"] == pytest.approx(0.854, abs=1e-3)
    assert record["bytes"] == results[0].case.num_bytes


def test_the_fastest_way_a_number_of_rows() -> None:
    times = {"o 64 gemm": 4.0, "o 64 dequantize": 50.0, "o 64 copy": 5.0, "down 8 gemm": 9.0}
    times |= {"o 256 gemm": 60.0, "o 256 dequantize": 55.0, "o 256 copy": 15.0}
    results = [_measured(CASES[f"w4a16 {name}"], us) for name, us in times.items()]
    results.append(_measured(CASES["w4a16 o to bf16"], 1.0))
    results.append(_measured(CASES["dense o 1"], 1.0))
    assert fastest_ways(results) == {
        "o": {64: "gemm", 256: "dequantize"},
        "down": {8: "gemm"},
    }
    assert fastest_ways(results, with_copies=True)["o"] == {64: "gemm", 256: "copy"}


def test_without_a_card_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_cli(["bench", "kernels"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_words_that_no_case_has() -> None:
    with pytest.raises(ConfigurationError, match="no kernel case has sample and gqa"):
        next(measure_kernels(["sample", "gqa"]))
