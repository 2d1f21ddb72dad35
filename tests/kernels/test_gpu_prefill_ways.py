"""The ways to attend to prompts that the backend can be told to take, on a card.

cuDNN's are checked where NVIDIA's front end is installed.
"""

from importlib.util import find_spec

import pytest

from octavo_worker.attention_inputs import AttentionOptions
from octavo_worker.backends.cuda import CudaBackend, PrefillWay
from tests.bench import prefill_attention as bench

pytestmark = pytest.mark.gpu

WAYS = list(PrefillWay) if find_spec("cudnn") else [PrefillWay.KERNEL]
TILES = {"x".join(map(str, tiles)): tiles for tiles in bench.TILES}


def _backend(prefill_way: PrefillWay) -> bench.Way:
    backend = CudaBackend(prefill_way)
    options = AttentionOptions(bench.SCALE)

    def way(batch: bench.Batch) -> bench.Call:
        caches, own_kv = (batch.k_cache, batch.v_cache), (batch.k, batch.v)
        return lambda: backend.prefill_attention(batch.q, *caches, batch.inputs, options, own_kv)

    return way


@pytest.mark.parametrize("chunks", [bench.RAGGED, bench.CACHED], ids=["fresh", "cached"])
@pytest.mark.parametrize("prefill_way", WAYS)
def test_backend(prefill_way: PrefillWay, chunks: list[tuple[int, int]]) -> None:
    difference, is_contained = bench.check(_backend(prefill_way), chunks)
    assert difference < bench.WORST_ERROR
    assert is_contained, "a NaN spreads to other prompts"


@pytest.mark.parametrize("chunks", [bench.RAGGED, bench.CACHED], ids=["fresh", "cached"])
@pytest.mark.parametrize("tiles", TILES)
def test_tilings(tiles: str, chunks: list[tuple[int, int]]) -> None:
    difference, is_contained = bench.check(bench.triton(TILES[tiles]), chunks)
    assert difference < bench.WORST_ERROR
    assert is_contained
