"""A model shared by ranks gives the logits of one that isn't, and all ranks the same bits.

The ranks are threads here: every family, layout and quantised format, cheaply. Real processes
over gloo: `test_tensor_parallel`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from octavo.errors import ConfigurationError
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import load_model
from octavo_worker.models.moe import Experts
from octavo_worker.models.moe_config import QWEN_NAMES, MoeConfig
from octavo_worker.models.quant_linear import QuantLinear
from octavo_worker.parallel.shares import Share
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.row_limits import RowLimits
from octavo_worker.runner import Model, Runner
from tests.fakes.thread_ranks import ThreadExchange, run_ranks
from tests.original_layouts import save_chatglm, save_qwen1
from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model
from tests.unit.gpu_worker.dense_backend import PagedRun, greedy
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, save_quantized

TOLERANCE = 1e-4
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD_VOCAB = {"vocab_size": TINY_VOCAB_SIZE + 3}


def tiny(family: str, **overrides: Any) -> Callable[[Path], PreTrainedModel]:
    """Saves a checkpoint; transformers' model of it."""

    def save(folder: Path) -> PreTrainedModel:
        save_tiny_model(folder, family, **(GQA | overrides))
        return tiny_model(tiny_config(family, **(GQA | overrides)))

    return save


def quantized(recipe: Recipe, **overrides: Any) -> Callable[[Path], PreTrainedModel]:
    return lambda folder: save_quantized(folder, recipe, "qwen2", **(GQA | overrides)).twin


ACT_ORDER = {"act_order": True, "same_order": False}
CASES: dict[str, Callable[[Path], PreTrainedModel]] = {
    "llama": tiny("llama"),
    "llama tied": tiny("llama", tie_word_embeddings=True),
    "llama biases": tiny("llama", attention_bias=True, mlp_bias=True),
    "llama odd vocabulary": tiny("llama", **ODD_VOCAB),
    "llama tied odd vocabulary": tiny("llama", **ODD_VOCAB, tie_word_embeddings=True),
    "mistral one kv head": tiny("mistral", num_key_value_heads=1),
    "qwen2": tiny("qwen2"),
    "qwen3": tiny("qwen3"),
    "mixtral": tiny("mixtral"),
    "qwen2-moe with a shared expert": tiny("qwen2_moe"),
    "qwen3-moe": tiny("qwen3_moe"),
    "phi3 fused": tiny("phi3"),
    "glm4": tiny("glm4"),
    "gemma2": tiny("gemma2"),
    "gemma3": tiny("gemma3_text"),
    "chatglm3 fused and interleaved": save_chatglm,
    "qwen1 fused": save_qwen1,
    "gptq": quantized(Recipe("gptq")),
    "gptq tied": quantized(Recipe("gptq"), tie_word_embeddings=True),
    "gptq act-order": quantized(Recipe("gptq", **ACT_ORDER)),
    "gptq act-order, one group": quantized(Recipe("gptq", group_size=-1, **ACT_ORDER)),
    "gptq groups that ranks share": quantized(Recipe("gptq", group_size=64), intermediate_size=192),
    "awq": quantized(Recipe("awq")),
    "compressed-tensors act-order": quantized(Recipe("compressed-tensors", **ACT_ORDER)),
}
FOUR_RANKS = ("qwen2", "llama tied odd vocabulary", "gptq act-order")


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in CASES), *((name, 4) for name in FOUR_RANKS)]
)
def test_ranks_compute_what_transformers_does(name: str, size: int, tmp_path: Path) -> None:
    reference = CASES[name](tmp_path)
    num_heads = reference.config.num_attention_heads

    @torch.inference_mode()
    def run_rank(exchange: ThreadExchange) -> tuple[list[int], torch.Tensor]:
        model = load_model(tmp_path, exchange=exchange)
        assert model.config.num_heads == num_heads // size
        run = PagedRun(model, CpuBackend())
        first, second = (run.add(prompt(count)) for count in (33, 21))
        run.step(chunks=[(first, 33)])
        run.step(chunks=[(second, 21)])
        greedy(run, [first, second], 4)
        # The embedding; attention, MLP and the expert for all tokens of every layer.
        has_shared = model.config.moe is not None and model.config.moe.shared_size > 0
        assert exchange.num_reduced == 6 * (1 + (2 + has_shared) * model.config.num_layers)
        ids = [*first.token_ids, *second.token_ids]
        return ids, torch.stack([*first.logits.values(), *second.logits.values()])

    (ids, logits), *others = run_ranks(size, run_rank)
    for other_ids, other_logits in others:
        assert other_ids == ids
        assert torch.equal(other_logits, logits)
    with torch.inference_mode():
        rows = [reference(torch.tensor([part])).logits[0] for part in (ids[:37], ids[37:])]
    torch.testing.assert_close(logits, torch.cat(rows), rtol=0, atol=TOLERANCE)


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(TINY_VOCAB_SIZE) for _ in range(length)]


def test_four_ranks_hold_each_kv_head_twice(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, **GQA)
    shares = run_ranks(4, lambda exchange: load_model(folder, exchange=exchange))
    assert [share.config.num_kv_heads for share in shares] == [1] * 4
    keys = [share.slots()["model.layers.0.self_attn.k_proj.weight"].target for share in shares]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[1], keys[2])


def run_plans(folder: Path, exchange: ThreadExchange | None) -> list[StepOutcome]:
    """Rows of every way to draw, decoded for a while by a runner over one rank's part."""
    model = load_model(folder, exchange=exchange)
    limits = RowLimits(4, 32, 16, model.config.max_model_len, model.config.vocab_size)
    runner = make_runner(model, limits)
    samplings = (
        Sampling(),
        Sampling(temperature=1.0, seed=3, logprobs=2),
        Sampling(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=5),
        Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=7),
    )
    prompts = [np.array(prompt(9 + row), np.int64) for row in range(4)]
    plan = Plan(
        plan_id=1,
        decode_until=16,
        added_rows=tuple(
            RowAdd(
                row=row,
                generation=1,
                sampling=sampling,
                sequence_index=0,
                block_ids=np.arange(1 + 2 * row, 3 + 2 * row),
                num_computed_tokens=0,
                max_total_tokens=28,
                history_token_ids=prompts[row],
                num_prompt_tokens=len(prompts[row]),
            )
            for row, sampling in enumerate(samplings)
        ),
        chunks=tuple(Chunk(row, 0, ids, is_last=True) for row, ids in enumerate(prompts)),
    )
    runner.submit(plan)
    outcomes = [runner.poll()]
    while runner.can_repeat:
        runner.submit(None)
        outcomes.append(runner.poll())
    return [outcome for outcome in outcomes if outcome is not None]


def make_runner(model: Model, limits: RowLimits) -> Runner:
    config = model.config  # type: ignore[attr-defined]
    shape = (limits.num_blocks, config.num_kv_heads, limits.block_size, config.head_dim)
    caches = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_layers)]
    return Runner(model, CpuBackend(), caches, limits, torch.device("cpu"))


def test_all_ranks_draw_the_same_tokens(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, **GQA, **ODD_VOCAB)
    first, second = run_ranks(2, partial(run_plans, folder))
    alone = run_plans(folder, None)
    assert len(first) == 16
    for one, other, expected in zip(first, second, alone, strict=True):
        assert not one.faults
        for column in ("rows", "token_ids", "events"):
            assert np.array_equal(getattr(one, column), getattr(other, column))
            assert np.array_equal(getattr(one, column), getattr(expected, column))
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert (mine.logprob, mine.rank) == (theirs.logprob, theirs.rank)


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


def test_quantised_layers_lie_in_parts_too(tmp_path: Path) -> None:
    save_quantized(tmp_path, Recipe("gptq", act_order=True), "qwen2", **GQA)

    def load(exchange: ThreadExchange) -> int:
        model = load_model(tmp_path, exchange=exchange)
        assert isinstance(model.layers[0].qkv, QuantLinear)
        num_quantized.append(sum(layer.num_quantized for layer in model.quantized))
        return model.num_bytes()

    num_quantized: list[int] = []

    first, second = run_ranks(2, load)
    norms = 5 * 128 * 4
    assert first == second
    # Of the quantised ones' biases, qkv's are cut.
    whole = load_model(tmp_path)
    assert first - norms == (whole.num_bytes() - norms) // 2
    assert num_quantized == [sum(layer.num_quantized for layer in whole.quantized) // 2] * 2


def test_experts_are_cut_alike_however_they_are_stored() -> None:
    moe = MoeConfig(3, 2, 8, 0, True, (True,), QWEN_NAMES)
    part, hidden = range(4, 8), 5
    in_one = {"gate_up_proj": torch.rand(3, 16, hidden), "down_proj": torch.rand(3, hidden, 8)}
    one_by_one: dict[str, torch.Tensor] = {}
    for expert in range(3):
        gate, up = in_one["gate_up_proj"][expert].chunk(2)
        down = in_one["down_proj"][expert]
        for name, weight in (("gate", gate), ("up", up), ("down", down)):
            one_by_one[f"{expert}.{name}_proj.weight"] = weight
    made: list[Experts] = []
    for names, stored in ((QWEN_NAMES, one_by_one), (None, in_one)):
        experts = Experts(replace(moe, names=names), hidden, "experts", torch.empty, part)
        for name, slot in experts.slots():
            assert slot.shape == stored[name.removeprefix("experts.")].shape
            slot.load(stored[name.removeprefix("experts.")])
        made.append(experts)
    assert torch.equal(made[0].gate_up, made[1].gate_up)
    assert torch.equal(made[0].down, made[1].down)
    assert torch.equal(made[0].gate_up[:, :4], in_one["gate_up_proj"][:, 4:8])


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
        (
            3,
            {"family": "qwen3_moe", "intermediate_size": 162, "num_key_value_heads": 3},
            "moe_intermediate_size=40",
        ),
    ],
)
def test_what_cant_be_shared_out_is_named(
    size: int, overrides: dict[str, Any], field: str, tmp_path: Path
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
