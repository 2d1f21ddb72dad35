"""Every family and quirk equals transformers: logits within 1e-4, the same greedy ids.

Whole prompts, chunked prefill mixed with decode, dead rows and decode all go through the paged
cache, over the oracle backend and the CPU backend.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo_worker.backends import Backend
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import Model, linear, load_model
from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model
from tests.unit.gpu_worker.dense_backend import DenseBackend, PagedRun, PagedSequence, greedy

TOLERANCE = 1e-4
BACKENDS: dict[str, type[Backend]] = {"dense": DenseBackend, "cpu": CpuBackend}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
YARN_SHORT = YARN | {"original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SHORT = {"max_position_embeddings": 128}


def heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": 16 * num_heads,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama mha, head dim 64": ("llama", heads(4, 4, 64)),
    "llama gqa 3, head dim 64": ("llama", heads(9, 3, 64)),
    "llama gqa 4, head dim 80": ("llama", heads(8, 2, 80)),
    "llama gqa 7, head dim 96": ("llama", heads(7, 1, 96)),
    "llama gqa 7, head dim 128": ("llama", heads(14, 2, 128)),
    "llama linear": ("llama", {"rope_parameters": LINEAR, **SHORT}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3, **SHORT}),
    "llama yarn": ("llama", {"rope_parameters": YARN_SHORT, **SHORT}),
    "mistral": ("mistral", {}),
    "mistral wide heads": ("mistral", {**heads(4, 1, 128), "hidden_size": 64}),
    "mistral window": ("mistral", {"sliding_window": 20}),
    "mistral window of one token": ("mistral", {"sliding_window": 1}),
    "mistral yarn": ("mistral", {"rope_parameters": YARN_SHORT, **SHORT}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied gqa 7": ("qwen2", {**heads(14, 2, 64), "tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN, "max_position_embeddings": 32}),
    "qwen2 window by layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 window by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3 tied, head dim 128": ("qwen3", {**heads(8, 2, 128), "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 32}),
    "phi3": ("phi3", {}),
    "phi3 partial rotary, tied": (
        "phi3",
        {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "phi3 window": ("phi3", {"sliding_window": 30}),
    "glm": ("glm", {}),
    "glm without biases": ("glm", {"attention_bias": False, **heads(8, 2, 64)}),
    "glm4": ("glm4", {}),
    "mixtral": ("mixtral", {}),
    "mixtral one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen2 moe": ("qwen2_moe", {}),
    "qwen2 moe without biases, normed weights": (
        "qwen2_moe",
        {"qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen2 moe, every second layer": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3 moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3 moe, weights as they are": ("qwen3_moe", {}),
    "qwen2 moe windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3 moe windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    "mixtral window": ("mixtral", {"sliding_window": 9}),
    "qwen3 moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "gemma": ("gemma", {}),
    "gemma, one kv head, untied": (
        "gemma",
        {**heads(4, 1, 64), "tie_word_embeddings": False},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 1},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3 by pattern, biases": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "layer_types": None,
            "sliding_window_pattern": 3,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3 tied": ("smollm3", {"tie_word_embeddings": True}),
    "smollm3 window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [0, 1, 1, 0]},
    ),
    "smollm3 chosen layers": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
}


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY_VOCAB_SIZE) for _ in range(length)]


@torch.inference_mode()
def assert_equal(reference: torch.nn.Module, sequence: PagedSequence, num_prompt: int) -> None:
    """All logits so far, and that each token after the prompt is transformers' choice."""
    ids = torch.tensor([sequence.token_ids[: sequence.num_computed]])
    expected = reference(ids).logits[0]
    got = torch.stack([sequence.logits[i] for i in range(sequence.num_computed)])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    chosen = expected.argmax(dim=-1).tolist()
    assert sequence.token_ids[num_prompt:] == chosen[num_prompt - 1 : -1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_ids_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    folder = save_tiny_model(tmp_path, family, **overrides)
    reference = tiny_model(tiny_config(family, **overrides))
    model = load_model(folder)
    run = PagedRun(model, BACKENDS[backend](), checks_readout=True)

    whole = run.add(prompt(50, seed=1))
    run.step(chunks=[(whole, 50)])
    chunked = run.add(prompt(48, seed=2))
    short = run.add(prompt(1, seed=3))
    run.step(chunks=[(chunked, 17), (short, 1)])
    greedy(run, [whole, short], 2)
    for sequence in (whole, short):
        last = sequence.logits[len(sequence.token_ids) - 1]
        sequence.token_ids.append(int(last.argmax()))
    run.step(chunks=[(chunked, 15)], rows=[short, whole])
    run.step(chunks=[(chunked, 16)])
    greedy(run, [whole, chunked, short], 14)

    for sequence, num_prompt in ((whole, 50), (chunked, 48), (short, 1)):
        assert_equal(reference, sequence, num_prompt)


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN_SHORT, YARN], ids=str)
def test_long_contexts_of_scaled_positions_equal_transformers(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    """Up to the last position that the scaling allows, far beyond the original context."""
    overrides = {"rope_parameters": scaling, "max_position_embeddings": 128}
    folder = save_tiny_model(tmp_path, **overrides)
    reference = tiny_model(tiny_config(**overrides))
    model = load_model(folder)
    longest = 128 if "original_max_position_embeddings" in scaling else 512
    assert model.config.max_model_len == longest
    run = PagedRun(model, CpuBackend())
    sequence = run.add(prompt(longest - 4, seed=4))
    run.step(chunks=[(sequence, 100)])
    run.step(chunks=[(sequence, longest - 4 - 100)])
    greedy(run, [sequence], 4)
    assert sequence.num_computed == longest
    assert_equal(reference, sequence, longest - 4)


@pytest.mark.parametrize(("max_model_len", "num_prompt"), [(128, 80), (64, 50)])
def test_longrope_takes_the_frequencies_of_the_workers_longest_sequence(
    max_model_len: int, num_prompt: int, tmp_path: Path
) -> None:
    """Long ones for prompts beyond the original length, short ones where none can be."""
    factors = {"short_factor": [1.0] * 7 + [1.5], "long_factor": [1.0 + i for i in range(8)]}
    overrides = {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors},
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 64,
    }
    folder = save_tiny_model(tmp_path, "phi3", **overrides)
    model = load_model(folder, max_model_len=max_model_len)
    run = PagedRun(model, CpuBackend())
    sequence = run.add(prompt(num_prompt, seed=8))
    run.step(chunks=[(sequence, 20)])
    run.step(chunks=[(sequence, num_prompt - 20)])
    greedy(run, [sequence], 10)
    assert_equal(tiny_model(tiny_config("phi3", **overrides)), sequence, num_prompt)


def test_a_cached_prefix_longer_than_the_window(tmp_path: Path) -> None:
    """Blocks shared by two sequences, the first of them out of the second's sight at once."""
    overrides = {"sliding_window": 20}
    model = load_model(save_tiny_model(tmp_path, "mistral", **overrides))
    run = PagedRun(model, CpuBackend())
    first = run.add(prompt(60, seed=9))
    run.step(chunks=[(first, 60)])
    second = run.add([*first.token_ids[:48], *prompt(7, seed=10)])
    second.block_ids, second.num_computed = first.block_ids[:3], 48
    second.logits = {index: first.logits[index] for index in range(48)}
    run.step(chunks=[(second, 7)])
    greedy(run, [first, second], 5)
    reference = tiny_model(tiny_config("mistral", **overrides))
    assert_equal(reference, first, 60)
    assert_equal(reference, second, 55)


class CountingBackend(CpuBackend):
    """Counts the additions that are not a product's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_adds = 0

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_adds += 1
        return super().add_rms_norm(x, residual, weight, eps)


@pytest.mark.parametrize(
    ("name", "num_adds"),
    [("llama", 0), ("qwen3", 0), ("mixtral", 1), ("llama biases", 2), ("glm4", 2)],
)
def test_products_that_add_to_the_residual_stream(
    name: str, num_adds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps of many rows compute it so: the same states, but for rounding."""
    family, overrides = CASES[name]
    model = load_model(save_tiny_model(tmp_path, family, **overrides))
    run = PagedRun(model, backend := CountingBackend())
    apart = run.add(prompt(50, seed=1))
    with torch.inference_mode():
        run.step(chunks=[(apart, 50)])
        assert backend.num_adds == 2 * model.config.num_layers
        monkeypatch.setattr(linear, "_LEAST_ROWS_ADDED", 1)
        backend.num_adds = 0
        added = run.add(prompt(50, seed=1))
        run.step(chunks=[(added, 50)])
    assert backend.num_adds == num_adds * model.config.num_layers
    for position in range(50):
        torch.testing.assert_close(
            added.logits[position], apart.logits[position], rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("block_size", [16, 32])
def test_block_size_changes_nothing(block_size: int, tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path))
    run = PagedRun(model, CpuBackend(), block_size=block_size)
    sequence = run.add(prompt(2 * block_size, seed=5))
    run.step(chunks=[(sequence, 2 * block_size)])
    greedy(run, [sequence], block_size + 1)
    assert_equal(tiny_model(tiny_config()), sequence, 2 * block_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3", dtype=dtype)
    ids = prompt(40, seed=6)

    def logits(model: Model) -> torch.Tensor:
        run = PagedRun(model, CpuBackend())
        sequence = run.add(ids)
        run.step(chunks=[(sequence, 40)])
        return torch.stack(list(sequence.logits.values()))

    half = load_model(folder, dtype=dtype)
    assert {slot.target.dtype for slot in half.slots().values()} == {dtype}
    got, expected = logits(half), logits(load_model(folder, dtype="float32"))
    assert got.dtype == torch.float32
    error = (got - expected).abs().max()
    assert 0 < error < (0.15 if dtype == torch.bfloat16 else 0.02)


def test_norms_that_lack_1_lose_no_digits_in_bfloat16(tmp_path: Path) -> None:
    """Weights near 0 are told apart beside 1, and nothing is rounded before the end."""
    save_tiny_model(tmp_path, "gemma2", dtype=torch.bfloat16)
    reference = tiny_model(tiny_config("gemma2")).bfloat16()
    model, backend = load_model(tmp_path, dtype=torch.bfloat16), CpuBackend()
    x = torch.randn((7, 96), generator=torch.Generator().manual_seed(8)).bfloat16()
    expected = reference.model.norm(x)
    assert torch.equal(backend.rms_norm(x, model.final_norm, 1e-6), expected)
    assert torch.equal(backend.add_rms_norm(x / 2, x / 2, model.final_norm, 1e-6)[0], expected)
    ids = torch.arange(9)
    embedded = model._embed(ids)
    assert embedded.dtype == torch.bfloat16
    assert torch.equal(embedded, reference.model.embed_tokens(ids))


def test_partial_rotary_leaves_the_other_dims_alone(tmp_path: Path) -> None:
    """With R < D only the first R dims carry the position: the table decides, not the model."""
    model = load_model(save_tiny_model(tmp_path))
    for layer in model.layers:
        layer.cos_sin = layer.cos_sin[:, :, :4].contiguous()
    ids = prompt(20, seed=7)
    results = []
    for backend in (DenseBackend(), CpuBackend()):
        run = PagedRun(model, backend)
        sequence = run.add(ids)
        run.step(chunks=[(sequence, 20)])
        results.append(torch.stack(list(sequence.logits.values())))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=TOLERANCE)


def test_demo_model_says_paris() -> None:
    """SmolLM2-135M, float32, greedy, from the real checkpoint with its real chat template."""
    from transformers import AutoTokenizer

    from octavo.hub import resolve_model

    folder = resolve_model("demo", None, weights=True)
    model = load_model(folder)
    assert model.lm_head is model.embed_tokens
    assert model.config.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    run = PagedRun(model, CpuBackend(), num_blocks=16)
    sequence = run.add(tokenizer.encode(text, add_special_tokens=False))
    num_prompt = len(sequence.token_ids)
    run.step(chunks=[(sequence, num_prompt)])
    greedy(run, [sequence], 8)
    answer = sequence.token_ids[num_prompt:]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
