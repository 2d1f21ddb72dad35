"""Linear layers of Llama 3.1 8B: as decode steps compute them ("skinny"), and by the other ways:
4-bit weights by three, 8-bit floats by two, bf16 by one.

Where two ways of 4-bit weights cross is what `octavo_kernels.w4a16` has in its table and, with a
bf16 copy beside the codes, `models.quant_linear`. Entry points: `linear_cases`, `fastest_ways`.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from octavo_kernels.e4m3_weight import E4m3Weight
from octavo_kernels.fp8_gemm import E4M3, fp8_gemm, new_arrivals, quantize_rows
from octavo_kernels.skinny_gemm import Scratch, skinny_gemm
from octavo_kernels.skinny_tiles import choose_config
from octavo_kernels.skinny_weight import Weight
from octavo_kernels.w4_dequantize import dequantize
from octavo_kernels.w4_weight import MAX_ROW_TILES, MIN_TILE_N, TILE_K, W4Weight
from octavo_kernels.w4a16 import Way, matmul
from octavo_worker.kernel_bench.case import Call, Case, Measured, num_sets
from octavo_worker.quant.fp8_cuda import library_product

LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
}
_FEW_ROWS = (1, 2, 3, 8, 32)
# Where plain matrices overtake codes.
_MANY_ROWS = (64, 96, 128, 192, 256)
# Beside `Way`: by a bf16 copy of the weight.
_COPY = "copy"
_GROUP = 128
_ITEM = 2


def linear_cases() -> list[Case]:
    return [*_skinny_cases(), *_w4_cases(), *_fp8_cases(), *_dense_cases()]


def w4_bytes(out_size: int, in_size: int) -> int:
    """Codes, and a scale with its zero a group."""
    return out_size * in_size // 2 + out_size * (in_size // _GROUP) * 4


def _skinny_cases() -> Iterator[Case]:
    for form, make_weight in _FORMS.items():
        for layer in LAYERS:
            for num_rows in (1, 8, 32, 64, 128):
                if (case := _skinny(form, make_weight, layer, num_rows)) is not None:
                    yield case


def _skinny(
    form: str, make_weight: Callable[[int, int], Weight], layer: str, num_rows: int
) -> Case | None:
    """None where decode steps take another product. gate_up with silu(gate) * up."""
    out_size, in_size = LAYERS[layer]
    gated = layer == "gate_up"
    width = out_size // 2 if gated else out_size
    with torch.device("meta"):
        config = choose_config(num_rows, make_weight(out_size, in_size), gated=gated)
    if config is None:
        return None
    num_bytes = weight_bytes(form, out_size, in_size) + num_rows * (in_size + width) * _ITEM

    def make() -> list[Call]:
        scratch = Scratch(torch.device("cuda"))
        return [call(scratch) for _ in range(num_sets(num_bytes))]

    def call(scratch: Scratch) -> Call:
        with torch.device("cuda"):
            weight = make_weight(out_size, in_size)
        x = _random(num_rows, in_size)
        return lambda: skinny_gemm(x, weight, scratch, config, gated=gated)

    name = f"skinny {form} {layer} {num_rows}"
    return Case(name, num_bytes, 2 * num_rows * out_size * in_size, make)


def weight_bytes(form: str, out_size: int, in_size: int) -> int:
    """With its scales."""
    if form == "w4":
        return w4_bytes(out_size, in_size)
    return out_size * (in_size + 4) if form == "e4m3" else out_size * in_size * _ITEM


def _bf16_weight(out_size: int, in_size: int) -> Weight:
    return torch.randn(out_size, in_size, dtype=torch.bfloat16)


def _e4m3_weight(out_size: int, in_size: int) -> Weight:
    values = torch.randn(out_size, in_size).clamp_(-4, 4).to(E4M3)
    return E4m3Weight.of(values, torch.rand(out_size))


def _w4_weight(out_size: int, in_size: int) -> W4Weight:
    return W4Weight(
        words=torch.randint(
            -(2**31), 2**31 - 1, (in_size // TILE_K, out_size, 16), dtype=torch.int32
        ),
        # Scales of 0.0078 in float16, zeros of 8.
        groups=torch.full((in_size // _GROUP, out_size), 8 << 16 | 0x2000, dtype=torch.int32),
        arrivals=torch.zeros(MAX_ROW_TILES * out_size // MIN_TILE_N, dtype=torch.int32),
        out_size=out_size,
        in_size=in_size,
        group_size=_GROUP,
        scale_dtype=torch.float16,
    )


_FORMS = {"bf16": _bf16_weight, "e4m3": _e4m3_weight, "w4": _w4_weight}


def _w4_cases() -> Iterator[Case]:
    for layer, (out_size, in_size) in LAYERS.items():
        for num_rows in _FEW_ROWS:
            yield _w4(layer, out_size, in_size, num_rows, Way.GEMM)
        for num_rows in _MANY_ROWS:
            for way in Way:
                yield _w4(layer, out_size, in_size, num_rows, way)
            yield _plain(f"w4a16 {layer} {num_rows} {_COPY}", out_size, in_size, num_rows)
        num_bytes = w4_bytes(out_size, in_size) + out_size * in_size * _ITEM
        yield _dequantize(layer, out_size, in_size, num_bytes)


def _w4(layer: str, out_size: int, in_size: int, num_rows: int, way: Way) -> Case:
    num_bytes = w4_bytes(out_size, in_size) + num_rows * (in_size + out_size) * _ITEM

    def make() -> list[Call]:
        return [call(weight) for weight in _weights(out_size, in_size, num_sets(num_bytes))]

    def call(weight: W4Weight) -> Call:
        x = _random(num_rows, in_size)
        return lambda: matmul(x, weight, way=way)

    name = f"w4a16 {layer} {num_rows} {way.value}"
    return Case(name, num_bytes, 2 * num_rows * out_size * in_size, make)


def _dequantize(layer: str, out_size: int, in_size: int, num_bytes: int) -> Case:
    def make() -> list[Call]:
        weights = _weights(out_size, in_size, num_sets(num_bytes))
        return [lambda w=weight: dequantize(w, torch.bfloat16) for weight in weights]

    return Case(f"w4a16 {layer} to bf16", num_bytes, 2 * out_size * in_size, make)


def _fp8_cases() -> Iterator[Case]:
    """With x in bf16, rounded on the way."""
    for layer, (out_size, in_size) in LAYERS.items():
        for num_rows in (1, 8, 32, 64, 128, 256):
            for way in ("kernel", "library"):
                yield _fp8(layer, out_size, in_size, num_rows, way)


def _fp8(layer: str, out_size: int, in_size: int, num_rows: int, way: str) -> Case:
    num_bytes = out_size * (in_size + 4) + num_rows * (in_size + out_size) * _ITEM

    def make() -> list[Call]:
        return [call() for _ in range(num_sets(num_bytes))]

    def call() -> Call:
        weight, scales = quantize_rows(_random(out_size, in_size))
        x, arrivals = _random(num_rows, in_size), new_arrivals(out_size, weight.device)
        if way == "library":
            return lambda: library_product(*quantize_rows(x), weight, scales)
        return lambda: fp8_gemm(*quantize_rows(x), weight, scales, arrivals, x.dtype)

    # In bf16's operations, of which the ceiling is: e4m3's go twice as fast.
    flops = num_rows * out_size * in_size
    return Case(f"fp8 {layer} {num_rows} {way}", num_bytes, flops, make)


def _dense_cases() -> Iterator[Case]:
    for layer, (out_size, in_size) in LAYERS.items():
        for num_rows in (1, 8, 32, 128, 256):
            yield _plain(f"dense {layer} {num_rows}", out_size, in_size, num_rows)


def _plain(name: str, out_size: int, in_size: int, num_rows: int) -> Case:
    """The library's product of a bf16 matrix."""
    num_bytes = (out_size * in_size + num_rows * (in_size + out_size)) * _ITEM

    def make() -> list[Call]:
        return [_dense(num_rows, out_size, in_size) for _ in range(num_sets(num_bytes))]

    return Case(name, num_bytes, 2 * num_rows * out_size * in_size, make)


def _dense(num_rows: int, out_size: int, in_size: int) -> Call:
    x, weight = _random(num_rows, in_size), _random(out_size, in_size)
    return lambda: torch.nn.functional.linear(x, weight)


def _weights(out_size: int, in_size: int, count: int) -> list[W4Weight]:
    """Different random codes, each with its own memory."""
    with torch.device("cuda"):
        return [_w4_weight(out_size, in_size) for _ in range(count)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def fastest_ways(
    results: Iterable[Measured], *, with_copies: bool = False
) -> dict[str, dict[int, str]]:
    """Layer -> rows -> the way that was fastest, of the 4-bit cases among `results`.

    `with_copies`: bf16 copies lie beside the codes.
    """
    best: dict[str, dict[int, Measured]] = {}
    for result in results:
        kernel, layer, *rest = result.case.name.split()
        if kernel != "w4a16" or not rest[0].isdigit() or (rest[1] == _COPY and not with_copies):
            continue
        by_rows = best.setdefault(layer, {})
        num_rows = int(rest[0])
        if num_rows not in by_rows or result.us < by_rows[num_rows].us:
            by_rows[num_rows] = result
    return {
        layer: {num_rows: item.case.name.split()[-1] for num_rows, item in by_rows.items()}
        for layer, by_rows in best.items()
    }
