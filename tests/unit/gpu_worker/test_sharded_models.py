"""A model shared by ranks gives the logits of one that isn't, and all ranks the same bits."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import load_model
from octavo_worker.parallel.shares import Share
from tests.fakes.thread_ranks import ThreadExchange, run_ranks
from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model
from tests.unit.gpu_worker.dense_backend import PagedRun, greedy

TOLERANCE = 1e-4
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD_VOCAB = {"vocab_size": TINY_VOCAB_SIZE + 3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama odd vocabulary": ("llama", ODD_VOCAB),
    "llama tied odd vocabulary": ("llama", {**ODD_VOCAB, "tie_word_embeddings": True}),
    "mistral one kv head": ("mistral", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {}),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in CASES), ("qwen2", 4), ("llama tied odd vocabulary", 4)],
)
def test_ranks_compute_what_transformers_does(name: str, size: int, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    overrides = GQA | overrides
    folder = save_tiny_model(tmp_path, family, **overrides)

    @torch.inference_mode()
    def run_rank(exchange: ThreadExchange) -> tuple[list[int], torch.Tensor]:
        model = load_model(folder, exchange=exchange)
        assert model.config.num_heads == 4 // size
        assert model.config.num_kv_heads == max(1, model_kv_heads(overrides) // size)
        run = PagedRun(model, CpuBackend())
        first, second = (run.add(prompt(count)) for count in (33, 21))
        run.step(chunks=[(first, 33)])
        run.step(chunks=[(second, 21)])
        greedy(run, [first, second], 8)
        # The embedding; attention and MLP of every layer.
        assert exchange.num_reduced == 10 * (1 + 2 * model.config.num_layers)
        ids = [*first.token_ids, *second.token_ids]
        return ids, torch.stack([*first.logits.values(), *second.logits.values()])

    (ids, logits), *others = run_ranks(size, run_rank)
    for other_ids, other_logits in others:
        assert other_ids == ids
        assert torch.equal(other_logits, logits)
    with torch.inference_mode():
        whole = tiny_model(tiny_config(family, **overrides))
        rows = [whole(torch.tensor([part])).logits[0] for part in (ids[:41], ids[41:])]
    torch.testing.assert_close(logits, torch.cat(rows), rtol=0, atol=TOLERANCE)


def model_kv_heads(overrides: dict[str, Any]) -> int:
    return int(overrides["num_key_value_heads"])


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(TINY_VOCAB_SIZE) for _ in range(length)]


def test_every_stored_value_has_its_rank(tmp_path: Path) -> None:
    """Each weight matrix lies in parts on the ranks: no rank holds what it doesn't need."""
    folder = save_tiny_model(tmp_path, **GQA, mlp_bias=True)
    whole = load_model(folder)
    shares = run_ranks(2, lambda exchange: load_model(folder, exchange=exchange))
    names = whole.slots()
    for name, slot in names.items():
        parts = [share.slots()[name] for share in shares]
        assert all(part.shape == slot.shape for part in parts)
        sizes = [part.target.numel() for part in parts]
        is_cut = "norm" not in name and not name.endswith("down_proj.bias")
        assert sizes == [slot.target.numel() // (2 if is_cut else 1)] * 2, name
    downs = [share.slots()["model.layers.1.mlp.down_proj.bias"].target for share in shares]
    assert torch.equal(downs[0] + downs[1], names["model.layers.1.mlp.down_proj.bias"].target)
    assert not downs[1].any()


def test_random_weights_are_drawn_for_every_part(tmp_path: Path) -> None:
    tiny_config(**GQA, mlp_bias=True).save_pretrained(tmp_path)

    def load(exchange: ThreadExchange) -> dict[str, torch.Tensor]:
        model = load_model(tmp_path, load_format="random", exchange=exchange)
        return {name: slot.target for name, slot in model.slots().items()}

    first, second = run_ranks(2, load)
    name = "model.layers.0.mlp.down_proj.bias"
    assert first[name].any()
    assert not second[name].any()


@pytest.mark.parametrize(
    ("size", "overrides", "field"),
    [
        (4, {}, "num_attention_heads=6"),
        (5, {"num_attention_heads": 10, "hidden_size": 160}, "num_key_value_heads=2"),
        (3, {"num_key_value_heads": 3}, "intermediate_size=160"),
    ],
)
def test_what_cant_be_shared_out_is_named(
    size: int, overrides: dict[str, int], field: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, **overrides)
    exchange = run_ranks(size, lambda exchange: exchange)[0]
    with pytest.raises(ConfigurationError, match=f"OCTAVO_TENSOR_PARALLEL={size}.*{field}"):
        load_model(folder, exchange=exchange)


def test_heads_of_several_ranks_and_rows_of_a_vocabulary() -> None:
    def of_heads(size: int, num_heads: int) -> list[range]:
        return [Share(rank, size).of_heads(num_heads) for rank in range(size)]

    assert of_heads(2, 4) == [range(2), range(2, 4)]
    assert of_heads(4, 2) == [range(1), range(1), range(1, 2), range(1, 2)]
    assert of_heads(4, 1) == [range(1)] * 4
    rows = [Share(rank, 4).of_vocabulary(9) for rank in range(4)]
    assert rows == [range(3), range(3, 6), range(6, 9), range(9, 9)]
    assert Share(3, 4).vocab_rows(9) == 3
