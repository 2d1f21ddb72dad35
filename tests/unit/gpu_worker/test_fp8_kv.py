"""KV caches of 8-bit floats: what is stored, and what attention makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigurationError
from octavo.metrics import WorkerMetrics
from octavo.settings import WorkerSettings
from octavo_worker.attention_inputs import KvScales
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.kv_cache import allocate_kv_caches, kv_dtype_of, size_kv_cache
from octavo_worker.loading import load, load_runner
from octavo_worker.models import load_model
from octavo_worker.quant import has_kv_scales
from octavo_worker.spec import kv_scheme_of
from octavo_worker.weights import SINGLE_NAME
from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_model
from tests.unit.gpu_worker.dense_backend import PagedRun
from tests.unit.gpu_worker.test_fp8_models import compressed, edit

E4M3 = torch.float8_e4m3fn


def _store(k: torch.Tensor, v: torch.Tensor, scales: KvScales) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches of two blocks of 16, tokens from slot 16 on."""
    num_tokens, num_heads, head_dim = k.shape
    caches = [torch.zeros(2, num_heads, 16, head_dim).to(E4M3) for _ in range(2)]
    unmoved = torch.empty(1, 2, 0)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    slots = torch.arange(16, 16 + num_tokens)
    CpuBackend().rope_and_cache(k, k, v, unmoved, positions, slots, caches[0], caches[1], scales)
    return caches[0], caches[1]


def test_values_are_divided_and_never_overflow() -> None:
    scales = KvScales(torch.tensor([1.0, 4.0]), torch.tensor([0.5, 1.0]))
    k = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    v = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    k[0, 1, 0], k[1, 0, 1], v[2, 0, 3], v[2, 1, 0] = 1e9, -torch.inf, 300.0, torch.nan
    k_cache, v_cache = _store(k, v, scales)
    stored_k, stored_v = (cache[1, :, :3].transpose(0, 1) for cache in (k_cache, v_cache))
    for stored, x, scale in ((stored_k, k, scales.k), (stored_v, v, scales.v)):
        expected = (x / scale[:, None]).nan_to_num(0.0).clamp(-448, 448)
        assert torch.equal(stored.float(), expected.to(E4M3).float())
        assert not bool(stored.float().isnan().any())
    assert float(stored_k[0, 1, 0].float()) == 448.0
    assert float(stored_k[1, 0, 1].float()) == -448.0
    assert float(stored_v[2, 0, 3].float()) == 448.0


class RoundingBackend(CpuBackend):
    """Keeps a float32 cache, but of values that 8 bits can hold."""

    def __init__(self, scales: KvScales) -> None:
        super().__init__()
        self._scales = scales

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_scales: KvScales | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert kv_scales is None
        rotated = super().rope_and_cache(
            q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache
        )
        for cache, scale in zip((k_cache, v_cache), self._scales, strict=True):
            heads = scale[:, None, None]
            cache.copy_((cache / heads).clamp(-448, 448).to(E4M3).float() * heads)
        return rotated


@torch.inference_mode()
def _logits(run: PagedRun) -> torch.Tensor:
    """Prefill in two chunks, then decode: both read the cache."""
    sequence = run.add([(17 * i + 3) % TINY_VOCAB_SIZE for i in range(40)])
    run.step(chunks=[(sequence, 17)])
    run.step(chunks=[(sequence, 20)])
    for _ in range(3):
        run.step(rows=[sequence])
    return torch.stack([sequence.logits[i] for i in range(40)])


@pytest.mark.parametrize("scale", [1.0, 0.02, 0.003])  # the last one cuts large values off
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2: windows, soft caps
def test_logits_are_those_of_rounded_values(family: str, scale: float, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, family)
    model = load_model(folder, dtype="float32")
    plain = _logits(PagedRun(model, CpuBackend()))
    scales = KvScales(scale * torch.tensor([1.0, 1.5]), scale * torch.tensor([0.75, 1.25]))
    expected = _logits(PagedRun(model, RoundingBackend(scales)))

    model.scale_kv()
    for layer in model.layers:
        given = layer.options.kv_scales
        assert given is not None
        assert bool((torch.stack(given) == 1.0).all())
        layer.options = replace(layer.options, kv_scales=scales)
    run = PagedRun(model, CpuBackend())
    run.kv_caches = [(k.to(E4M3), v.to(E4M3)) for k, v in run.kv_caches]
    logits = _logits(run)
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    assert float((logits - plain).norm() / plain.norm()) > 1e-3


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def _with_scales(folder: Path, scales: list[tuple[float, float]], **scheme: Any) -> Path:
    """A folder whose layers are plain, with scales of keys and values for each."""
    save_tiny_model(folder, "llama")
    stored = load_file(folder / SINGLE_NAME)
    for layer, pair in enumerate(scales):
        for name, scale in zip("kv", pair, strict=True):
            stored[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale])
    save_file(stored, folder / SINGLE_NAME)
    config = compressed("tensor") | {"ignore": ["re:.*"], "kv_cache_scheme": SCHEME | scheme}
    edit(folder, quantization_config=config)
    return folder


def test_scales_that_a_checkpoint_brings(tmp_path: Path) -> None:
    """They are a cache's in 8 bits, and of no account to another."""
    pair = (0.02, 0.015)
    model = load_model(_with_scales(tmp_path, [pair, pair]), dtype="float32")
    plain = _logits(PagedRun(model, CpuBackend()))
    scales = KvScales(*(torch.full((2,), scale) for scale in pair))
    expected = _logits(PagedRun(model, RoundingBackend(scales)))
    model.scale_kv()
    run = PagedRun(model, CpuBackend())
    run.kv_caches = [(k.to(E4M3), v.to(E4M3)) for k, v in run.kv_caches]
    logits = _logits(run)
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    assert float((logits - plain).norm() / plain.norm()) > 1e-3
    unscaled = save_tiny_model(tmp_path / "plain", "llama")
    assert torch.equal(
        plain, _logits(PagedRun(load_model(unscaled, dtype="float32"), CpuBackend()))
    )


def test_each_layer_has_its_own(tmp_path: Path) -> None:
    folder = _with_scales(tmp_path, [(0.5, 0.25), (2.0, 4.0)])
    model = load_model(folder, dtype="float32")
    model.scale_kv()
    given = [layer.options.kv_scales for layer in model.layers]
    expected = [[[0.5, 0.5], [0.25, 0.25]], [[2.0, 2.0], [4.0, 4.0]]]
    assert [[scale.tolist() for scale in scales] for scales in given if scales] == expected


def test_another_formats_field_of_that_name_says_nothing() -> None:
    fields = {"quant_method": "gptq", "kv_cache_scheme": SCHEME}
    assert not has_kv_scales({"quantization_config": fields})
    assert not has_kv_scales({})
    assert has_kv_scales({"compression_config": compressed("tensor") | {"kv_cache_scheme": SCHEME}})


def test_scales_that_are_refused(tmp_path: Path) -> None:
    for number, scale in enumerate((0.0, -1.0, torch.nan, torch.inf)):
        folder = _with_scales(tmp_path / str(number), [(1.0, scale), (1.0, 1.0)])
        with pytest.raises(ConfigurationError, match=r"layers.0.self_attn.v_scale is .* no scale"):
            load_model(folder)
    for field, value in (
        ("num_bits", 4),
        ("type", "int"),
        ("dynamic", True),
        ("strategy", "token"),
    ):
        folder = _with_scales(tmp_path / field, [(1.0, 1.0)] * 2, **{field: value})
        with pytest.raises(ConfigurationError, match=f"kv_cache_scheme.{field}"):
            load_model(folder)
    with pytest.raises(ConfigurationError, match=r"layers.1.self_attn.k_scale"):
        load_model(_with_scales(tmp_path / "absent", [(1.0, 1.0)]))


def test_half_the_bytes_and_a_scheme_of_its_own(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    config = load_model(folder).config
    plain = WorkerSettings(num_kv_blocks=4)
    small = replace(plain, kv_cache_dtype="fp8")
    cpu = torch.device("cpu")
    sizes = [size_kv_cache(config, settings, cpu, 512) for settings in (plain, small)]
    assert sizes[0].bytes_per_token == 4 * sizes[1].bytes_per_token
    assert kv_dtype_of(config, plain) == torch.float32
    assert kv_scheme_of(kv_dtype_of(config, small)) == "fp8e4m3-head"
    for k_cache, v_cache in allocate_kv_caches(config, sizes[1], cpu, E4M3):
        assert k_cache.dtype == v_cache.dtype == E4M3


def test_a_worker_says_its_scheme(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    settings = WorkerSettings(model=str(folder), kv_cache_dtype="fp8", num_kv_blocks=8)
    loaded = load(settings, WorkerMetrics(CollectorRegistry()), print)
    assert loaded.spec.kv_scheme == "fp8e4m3-head"


def test_models_in_others_code_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    settings = WorkerSettings(
        model=str(folder), kv_cache_dtype="fp8", model_impl="transformers", num_kv_blocks=8
    )
    with pytest.raises(ConfigurationError, match="OCTAVO_KV_CACHE_DTYPE=fp8"):
        load_runner(settings)
