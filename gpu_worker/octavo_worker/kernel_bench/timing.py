"""Times on the card: calls captured into one CUDA graph, its replays timed by events.

A graph leaves out what launches cost the host; taking turns on several inputs keeps the card's
cache cold. Entry points: `time_us`, `measure_ceilings`.
"""

from collections.abc import Sequence

import torch

from octavo_kernels.read_probe import TILE, read_probe
from octavo_worker.kernel_bench.case import Call, Ceilings

_NUM_REPLAYS = 50
_WARM_UP_MS = 50.0
_LEAST_CALLS = 20  # in a graph, so that starting it doesn't count
_PROBE_BYTES = 4 << 30
_PROBE_SIZE = 8192


def time_us(calls: Sequence[Call]) -> tuple[float, float]:
    """(median, 99th percentile) of one call, in microseconds."""
    calls = list(calls) * -(-_LEAST_CALLS // len(calls))
    for call in calls[:2]:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    first = _replay_ms(graph)
    for _ in range(int(_WARM_UP_MS / max(first, 1e-3))):
        graph.replay()
    times = sorted(_replay_ms(graph) for _ in range(_NUM_REPLAYS))
    us = [1e3 * ms / len(calls) for ms in times]
    return us[len(us) // 2], us[int(0.99 * len(us))]


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_ceilings() -> Ceilings:
    """Reading 4 GiB, and a product of two square bf16 matrices of random numbers."""
    data = torch.randint(1 << 30, (_PROBE_BYTES // 4 // TILE * TILE,), device="cuda").int()
    read_us, _ = time_us([lambda: read_probe(data)])
    shape = (_PROBE_SIZE, _PROBE_SIZE)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_us, _ = time_us([lambda: a @ b])
    return Ceilings(
        bytes_s=1e6 * data.nbytes / read_us, flops_s=1e6 * 2 * _PROBE_SIZE**3 / product_us
    )
