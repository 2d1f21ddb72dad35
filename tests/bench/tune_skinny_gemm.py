"""Find the fastest tiles of the skinny product for the shapes that models have, on this card.

    python -m tests.bench.tune_skinny_gemm [--shapes llama8b,...] [--rows 1,8,...] \\
        [--forms dense,e4m3,w4] [--out FILE]

For each shape, form of weight and number of rows: the product that a step of many rows takes (a
matrix: the library's), and the best tiles with their time, the bytes read a second and the gain.
Weights rotate through copies larger than the cache.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, TextIO

import torch
import triton

from octavo_kernels.e4m3_weight import E4m3Weight, arrange
from octavo_kernels.fp8_gemm import quantize_rows
from octavo_kernels.gated_mul import silu_mul
from octavo_kernels.launch import Launch
from octavo_kernels.skinny_gemm import Scratch, skinny_gemm_launch, skinny_gemm_reference
from octavo_kernels.skinny_tiles import Config, tile_rows
from octavo_kernels.skinny_weight import Weight
from octavo_kernels.w4_dequantize import dequantize
from octavo_kernels.w4_weight import W4Weight, pack
from octavo_kernels.w4a16 import matmul
from octavo_worker.quant.fp8_cuda import CudaProduct

SHAPES = {
    "llama8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "llama2-7b": {"qkv": (12288, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)},
    "qwen3-0.6b": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
}
ROTATE_BYTES = 400 << 20
GROUP = 128
# 4-bit codes lie in tiles of 128 inputs.
TILE_KS = {"dense": (64, 128, 256), "e4m3": (128, 256), "w4": (128,)}
MAX_SHARED = 220 << 10


class Case(NamedTuple):
    model: str
    name: str
    num_n: int
    num_k: int
    rows: int
    form: str = "dense"

    @property
    def gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def width(self) -> int:
        """Of the output."""
        return self.num_n // 2 if self.gated else self.num_n

    @property
    def bits(self) -> float:
        """Of a weight, its part of the scales counted in."""
        return {"dense": 16, "e4m3": 8, "w4": 4 + 32 / GROUP}[self.form]

    @property
    def weight_bytes(self) -> int:
        return int(self.num_n * self.num_k * self.bits / 8)


def configs(case: Case) -> Iterator[Config]:
    tile_m = tile_rows(case.rows)
    num_sms = 132
    for tile_n, tile_k, split_k in product((64, 128), TILE_KS[case.form], (1, 2, 3, 4, 6, 8)):
        if case.num_k % tile_k or case.width % tile_n:
            continue
        tiles = case.width // tile_n * -(-case.rows // tile_m)
        programs = tiles * split_k
        parts = programs * tile_n * tile_m * (2 if case.gated else 1)
        if split_k > 1 and (
            programs > 6 * num_sms
            or case.num_k // tile_k < 4 * split_k
            or parts > 1 << 24
            or tiles > 4096
        ):
            continue
        for num_warps, num_stages, joint in product((4, 8), (4, 6), (False, True)):
            if (num_warps == 8 and tile_n == 64) or (joint and not case.gated):
                continue
            weight_bytes = tile_n * int(case.bits) // 8 * (2 if joint else 1)
            shared = num_stages * tile_k * (weight_bytes + tile_m * 2)
            if (48 << 10 if case.form == "dense" else 0) <= shared <= MAX_SHARED:
                yield Config(tile_n, tile_k, split_k, num_warps, num_stages, joint)


def launch_of(case: Case, config: Config, scratch: Scratch, weight: Weight) -> Launch:
    x = torch.randn(case.rows, case.num_k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(case.rows, case.width, dtype=torch.bfloat16, device="cuda")
    return skinny_gemm_launch(out, x, weight, scratch, config, gated=case.gated)


def compile_some(arguments: tuple[list[Case], int, int]) -> None:
    """Fill Triton's cache with every n-th configuration."""
    cases, start, step = arguments
    scratch = Scratch(torch.device("cuda"), num_parts=1 << 24)
    work = [(case, config) for case in cases for config in configs(case)][start::step]
    weights: dict[object, Weight] = {}
    for case, config in work:
        key = (case.num_n, case.num_k, case.form)
        if key not in weights:
            weights = {key: random_weight(case)}
        launch = launch_of(case, config, scratch, weights[key])
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            launch.kernel.warmup(
                *launch.args, **launch.constants, **launch.options, grid=launch.grid
            )


def time_us(functions: Sequence[Callable[[], None]], repeats: int = 10) -> float:
    """Median microseconds of one call, each function once in a captured graph."""
    torch.cuda.synchronize()  # the inputs are made
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for function in functions[:2]:
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(functions))
    return sorted(times)[len(times) // 2]


def tune(case: Case, scratch: Scratch, out: TextIO) -> None:
    """Time the library and every configuration that gives the right result; the best to `out`."""
    copies = max(4, min(24, ROTATE_BYTES // case.weight_bytes))
    weights = [random_weight(case) for _ in range(copies)]
    x = torch.randn(case.rows, case.num_k, dtype=torch.bfloat16, device="cuda")
    results = [
        torch.empty(case.rows, case.width, dtype=torch.bfloat16, device="cuda") for _ in weights
    ]
    library = _time_library(case, x, weights)
    reference = skinny_gemm_reference(x, matrix_of(weights[0]), gated=case.gated).double()
    found: list[tuple[float, Config]] = []
    for config in configs(case):
        launches = [
            skinny_gemm_launch(result, x, weight, scratch, config, gated=case.gated)
            for weight, result in zip(weights, results, strict=True)
        ]
        results[0].fill_(torch.nan)
        try:
            launches[0].run()
        except triton.runtime.errors.OutOfResources:
            continue
        error = float((results[0].double() - reference).norm() / reference.norm())
        if not error < 1e-2:
            raise SystemExit(f"{case} {config}: wrong by {error:.2g}")
        found.append((time_us([launch.run for launch in launches]), config))
    found.sort()
    _report(case, library, found, out)


def random_weight(case: Case) -> Weight:
    if case.form == "w4":
        groups = (case.num_n, case.num_k // GROUP)
        codes = torch.randint(16, (case.num_n, case.num_k), device="cuda").byte()
        scales = torch.full(groups, 0.2 * case.num_k**-0.5, device="cuda").half()
        return pack(codes, scales, torch.full(groups, 8, device="cuda"), GROUP)
    weight = torch.randn(case.num_n, case.num_k, dtype=torch.bfloat16, device="cuda")
    weight *= case.num_k**-0.5
    if case.form == "dense":
        return weight
    values, scales = quantize_rows(weight)
    return E4m3Weight.of(arrange(values), scales)


def matrix_of(weight: Weight) -> torch.Tensor:
    """The weight as a matrix, and of 8-bit floats in the order of its inputs."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, W4Weight):
        return dequantize(weight, torch.bfloat16)
    values = weight.words.view(torch.float8_e4m3fn)
    num_n, num_k = values.shape
    places = arrange(torch.arange(16)[None])[0].tolist()
    matrix = torch.empty(num_n, num_k // 16, 16, device="cuda")
    matrix[:, :, places] = values.float().view(num_n, -1, 16)
    return matrix.view(num_n, num_k) * weight.scales[:, None]


def _time_library(case: Case, x: torch.Tensor, weights: Sequence[Weight]) -> float:
    wide = torch.empty(case.rows, case.num_n, dtype=torch.bfloat16, device="cuda")
    own = CudaProduct()
    if case.form == "e4m3":
        own.arrange(torch.empty(16, 16, device="cuda"))

    def run(weight: Weight) -> None:
        out = wide
        if isinstance(weight, torch.Tensor):
            torch.mm(x, weight.T, out=wide)
        elif isinstance(weight, W4Weight):
            out = matmul(x, weight)
        else:
            out = own(x, weight.words.view(torch.float8_e4m3fn), weight.scales)
        if case.gated:
            silu_mul(out)

    return time_us([partial(run, weight) for weight in weights])


def _report(case: Case, library: float, found: list[tuple[float, Config]], out: TextIO) -> None:
    best_us, best = found[0]
    num_bytes = case.weight_bytes + 2 * case.rows * (case.num_n + case.num_k)
    print(
        f"{case.model:11} {case.name:8} {case.form:5} M={case.rows:<4}"
        f" library {library:7.1f} us {num_bytes / library / 1e6:5.2f} TB/s"
        f"  skinny {best_us:7.1f} us {num_bytes / best_us / 1e6:5.2f} TB/s"
        f"  x{library / best_us:4.2f}  {tuple(best)}",
        flush=True,
    )
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **case._asdict(),
        "library_us": round(library, 2),
        "num_bytes": num_bytes,
        "best": [[round(us, 2), *config] for us, config in found[:8]],
    }
    out.write(json.dumps(record) + "\n")
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="llama8b,qwen3-0.6b,llama2-7b")
    parser.add_argument("--rows", default="1,8,16,32,64,128,256")
    parser.add_argument("--forms", default="dense,e4m3,w4")
    parser.add_argument("--out", default="/dev/null")
    arguments = parser.parse_args()
    rows = [int(item) for item in arguments.rows.split(",")]
    cases = [
        Case(model, name, *shape, count, form)
        for model in arguments.shapes.split(",")
        for form in arguments.forms.split(",")
        for name, shape in SHAPES[model].items()
        if form == "dense" or name != "head"
        for count in rows
    ]
    jobs = min(28, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        pool.map(compile_some, [(cases, index, jobs) for index in range(jobs)])
    scratch = Scratch(torch.device("cuda"), num_parts=1 << 24)
    with open(arguments.out, "w") as out:
        for case in cases:
            tune(case, scratch, out)


if __name__ == "__main__":
    sys.exit(main())
