"""Families without a native path run in transformers' code and give transformers' own answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import Model, load_any_model
from octavo_worker.models.fallback import FallbackModel
from octavo_worker.weights import SINGLE_NAME
from tests.tiny_fallbacks import FALLBACKS, save_fallback_config, save_fallback_model
from tests.tiny_models import save_tiny_model
from tests.unit.gpu_worker.checkpoint_files import drop, edit
from tests.unit.gpu_worker.dense_backend import PagedRun, greedy
from tests.unit.gpu_worker.test_models_forward import assert_equal, prompt


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("model_type", FALLBACKS)
def test_logits_and_greedy_ids_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """Chunked prefill, steps of chunks and rows, dead rows, decode."""
    reference = save_fallback_model(tmp_path, model_type)
    model = load_any_model(tmp_path)
    assert isinstance(model, FallbackModel)
    with torch.inference_mode():
        run = PagedRun(model, CpuBackend())
        whole = run.add(prompt(50, seed=1))
        run.step(chunks=[(whole, 50)])
        chunked = run.add(prompt(48, seed=2))
        short = run.add(prompt(1, seed=3))
        run.step(chunks=[(chunked, 17), (short, 1)])
        greedy(run, [whole, short], 2)
        for sequence in (whole, short):
            last = sequence.logits[len(sequence.token_ids) - 1]
            sequence.token_ids.append(int(last.argmax()))
        run.step(chunks=[(chunked, 15)], rows=[short, None, whole])
        run.step(chunks=[(chunked, 16)])
        greedy(run, [whole, chunked, short], 14)
    for sequence, num_prompt in ((whole, 50), (chunked, 48), (short, 1)):
        assert_equal(reference, sequence, num_prompt)


def test_windows_caps_scales_and_shapes_are_found(tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "cohere2")
    model = load_any_model(tmp_path)
    assert isinstance(model, FallbackModel)
    assert [layer.options.window for layer in model.layers] == [24, 24, 24, None]
    assert {layer.options.scale for layer in model.layers} == {32**-0.5}
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        4,
        6,
        2,
        32,
    )
    assert (config.vocab_size, config.hidden_size, config.max_model_len) == (384, 96, 256)
    assert config.eos_token_ids == (2,)
    assert model.is_capturable


def test_a_window_as_long_as_the_model_allows_is_none(tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "starcoder2", sliding_window=256)
    model = load_any_model(tmp_path)
    assert isinstance(model, FallbackModel)
    assert {layer.options.window for layer in model.layers} == {None}


def test_forced_on_a_known_family_it_equals_the_native_decoder(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    answers: list[list[int]] = []
    logits: list[torch.Tensor] = []
    for impl, expected in (("auto", Model), ("native", Model), ("transformers", FallbackModel)):
        model = load_any_model(folder, impl=impl)
        assert isinstance(model, expected)
        run = PagedRun(model, CpuBackend())
        sequence = run.add(prompt(40, seed=4))
        run.step(chunks=[(sequence, 40)])
        greedy(run, [sequence], 20)
        answers.append(sequence.token_ids)
        logits.append(torch.stack(list(sequence.logits.values())))
    assert answers[0] == answers[1] == answers[2]
    torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "granite")
    results: list[torch.Tensor] = []
    for chosen in (dtype, torch.float32):
        model = load_any_model(tmp_path, dtype=chosen)
        run = PagedRun(model, CpuBackend())
        run.kv_caches = [(k.to(chosen), v.to(chosen)) for k, v in run.kv_caches]
        sequence = run.add(prompt(40, seed=6))
        run.step(chunks=[(sequence, 40)])
        results.append(torch.stack(list(sequence.logits.values())))
    assert results[0].dtype == torch.float32
    error = (results[0] - results[1]).abs().max()
    assert 0 < error < (0.15 if dtype == torch.bfloat16 else 0.02)


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "phi")
    (tmp_path / SINGLE_NAME).unlink()
    fractions: list[float] = []
    hidden: list[torch.Tensor] = []
    for seed in (1, 1, 2):
        model = load_any_model(tmp_path, load_format="random", seed=seed, progress=fractions.append)
        run = PagedRun(model, CpuBackend())
        sequence = run.add(prompt(5, seed=7))
        run.step(chunks=[(sequence, 5)])
        hidden.append(sequence.logits[4])
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(hidden[0], hidden[2])
    assert fractions == [1.0] * 3


def test_parameters_are_counted_once(tmp_path: Path) -> None:
    reference = save_fallback_model(tmp_path, "gpt2")
    assert reference.config.tie_word_embeddings
    model = load_any_model(tmp_path)
    assert model.num_bytes() == sum(p.nbytes for p in reference.parameters())


def test_native_only_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "olmo2")
    with pytest.raises(ConfigurationError, match=r"Olmo2ForCausalLM.*LlamaForCausalLM"):
        load_any_model(tmp_path, impl="native")


# --- refused ----------------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {"num_hidden_layers": 1}, "carry a state"),
    "mamba beside attention": ("falcon_h1", {}, "carry a state"),
    "alibi": ("bloom", {"n_head": 6, "n_layer": 1}, "position_ids"),
    "attention of its own": (
        "gptj",
        {"n_embd": 96, "n_head": 6, "n_layer": 1, "rotary_dim": 16},
        "AttentionInterface",
    ),
    "attention twice a layer": ("diffllama", {}, "once a layer"),
    "sinks": ("gpt_oss", {"num_local_experts": 2, "head_dim": 16}, "s_aux"),
    "shared keys and values": (
        "gemma4_text",
        {"num_kv_shared_layers": 1, "head_dim": 16, "global_head_dim": 16},
        "share keys and values",
    ),
    "a decoder without its encoder": ("bart", {}, "position_ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_paged_attention_cannot_compute_is_refused(name: str, tmp_path: Path) -> None:
    model_type, fields, reason = REFUSED[name]
    save_fallback_config(tmp_path, model_type, **fields)
    with pytest.raises(ConfigurationError, match=reason):
        load_any_model(tmp_path, load_format="random")


def test_positions_that_depend_on_the_batch_end_the_context(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    save_fallback_model(tmp_path, "olmo2", rope_parameters=rope)
    assert load_any_model(tmp_path).config.max_model_len == 64
    with pytest.raises(ConfigurationError, match=r"OCTAVO_MAX_MODEL_LEN=128.* at most 64"):
        load_any_model(tmp_path, max_model_len=128)


def test_code_that_needs_values_runs_but_is_not_captured(tmp_path: Path) -> None:
    """Dynamic frequencies look at the longest position of the batch."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    reference = save_fallback_model(tmp_path, "olmo2", rope_parameters=rope)
    model = load_any_model(tmp_path)
    assert isinstance(model, FallbackModel)
    assert not model.is_capturable
    run = PagedRun(model, CpuBackend())
    sequence = run.add(prompt(30, seed=8))
    run.step(chunks=[(sequence, 30)])
    greedy(run, [sequence], 4)
    assert_equal(reference, sequence, 30)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM"),
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_wrong_configurations_are_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    save_fallback_config(tmp_path, "olmo2")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | fields
    if "model_type" in fields and "architectures" not in fields:
        del config["architectures"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=named):
        load_any_model(tmp_path, load_format="random")


O_NAME = "model.layers.1.self_attn.o_proj.weight"


def _edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], named: str) -> None:
    save_fallback_model(folder, "olmo2")
    edit(folder / SINGLE_NAME, change)
    with pytest.raises(ConfigurationError, match=named):
        load_any_model(folder)


def test_missing_tensor(tmp_path: Path) -> None:
    _edited(tmp_path, drop(O_NAME), f"needs {O_NAME}")


def test_tensor_without_a_place(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.bias"
    _edited(
        tmp_path, lambda tensors: tensors.update({name: torch.ones(96)}), f"no place for {name}"
    )


def test_wrong_shape(tmp_path: Path) -> None:
    _edited(
        tmp_path,
        lambda tensors: tensors.update({O_NAME: torch.ones(96, 95)}),
        rf"{O_NAME} has the shape \[96, 95\].*\[96, 96\]",
    )


def test_wrong_dtype(tmp_path: Path) -> None:
    _edited(
        tmp_path,
        lambda tensors: tensors.update({O_NAME: torch.ones(96, 96, dtype=torch.int8)}),
        f"{O_NAME} has the dtype I8",
    )


def test_missing_head(tmp_path: Path) -> None:
    _edited(tmp_path, drop("lm_head.weight"), "needs lm_head.weight")


def test_truncated_file(tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "olmo2")
    path = tmp_path / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match="cut short"):
        load_any_model(tmp_path)
