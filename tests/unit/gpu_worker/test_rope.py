"""The cos/sin table equals transformers' to the bit, for every scaling and both spellings."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GlmConfig, LlamaConfig, Phi3Config
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from octavo.errors import ConfigurationError
from octavo_worker.models.rope import RopeConfig, cos_sin_table, identity_table

HEAD_DIM = 64
MAX_POSITION = 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn of the whole length": {"rope_type": "yarn", "factor": 4.0},
    "yarn factor 1": YARN | {"factor": 1.0},
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2},
    "yarn mscale alone": YARN | {"mscale": 0.8},
    "yarn betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn not truncated": YARN | {"truncate": False},
    "yarn equal bounds": YARN | {"beta_fast": 1, "beta_slow": 1, "truncate": False},
}


def expected_table(scaling: dict[str, Any], theta: float, num_positions: int) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    half = HEAD_DIM // 2
    return torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1)


def rope_of(fields: dict[str, Any]) -> RopeConfig:
    defaults = {"rope_theta": 10_000.0, "max_position_embeddings": MAX_POSITION}
    return RopeConfig.from_fields(defaults | fields, head_dim=HEAD_DIM)


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str) -> None:
    scaling = SCALINGS[name]
    num_positions = 20_000  # far beyond the original context, over a chunk's border
    table = cos_sin_table(
        rope_of({"rope_parameters": {**scaling, "rope_theta": 500_000.0}}), num_positions
    )
    assert table.shape == (num_positions, 2, HEAD_DIM // 2)
    assert table.dtype == torch.float32
    assert torch.equal(table, expected_table(scaling, 500_000.0, num_positions))


def test_scalings_differ_from_each_other() -> None:
    """Guards the comparison above: no scaling is silently the default one."""
    tables = [cos_sin_table(rope_of({"rope_parameters": s}), 2048) for s in SCALINGS.values()]
    digests = {hash(table.numpy().tobytes()) for table in tables}
    # `mscale` alone changes nothing, in transformers either.
    assert len(digests) == len(SCALINGS) - 1


@settings(max_examples=40, deadline=None)
@given(
    rope_type=st.sampled_from(["linear", "llama3", "yarn"]),
    theta=st.floats(1_000, 2_000_000),
    factor=st.floats(1, 40),
    original=st.integers(64, MAX_POSITION - 1),
    low=st.floats(0.5, 2),
    high=st.floats(2.5, 40),
)
def test_any_parameters_give_transformers_table(
    rope_type: str, theta: float, factor: float, original: int, low: float, high: float
) -> None:
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": factor}
    if rope_type != "linear":
        scaling["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    if rope_type == "yarn":
        scaling |= {"beta_slow": low, "beta_fast": high}
    table = cos_sin_table(rope_of({"rope_scaling": scaling, "rope_theta": theta}), 300)
    assert torch.equal(table, expected_table(scaling, theta, 300))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": YARN, "rope_theta": 7e5},
        {"rope_scaling": {**YARN, "rope_theta": 7e5}, "rope_theta": 1.0},
        {"rope_parameters": {**YARN, "rope_theta": 7e5}},
        {"rope_parameters": YARN, "rope_theta": 7e5},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}, "rope_theta": 7e5},
        {"rope_scaling": {"type": "yarn", **YARN} | {"rope_type": None}, "rope_theta": 7e5},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 512,
            "rope_theta": 7e5,
        },
        {
            "rope_parameters": {**YARN, "original_max_position_embeddings": 9, "rope_theta": 7e5},
            "original_max_position_embeddings": 512,
        },
    ],
)
def test_all_spellings_mean_the_same(fields: dict[str, Any]) -> None:
    assert rope_of(fields) == rope_of({"rope_parameters": {**YARN, "rope_theta": 7e5}})


@pytest.mark.parametrize("absent", [{}, {"rope_scaling": None}, {"rope_parameters": {}}])
def test_no_scaling_is_the_default_one(absent: dict[str, Any]) -> None:
    rope = rope_of(absent)
    assert (rope.rope_type, rope.theta, rope.factor) == ("default", 10_000.0, 1.0)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "longrope"}, "longrope.*short_factor=None"),
        ({"type": "su", "short_factor": [1.0]}, "short_factor=.*32 numbers"),
        ({"type": "longrope", "short_factor": [1.0] * 31 + [0]}, "short_factor=.*32 numbers"),
        (
            {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 33},
            "long_factor=.*32 numbers",
        ),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2'"),
        ({"rope_type": "linear", "factor": True}, "factor=True"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ([1], "rope_scaling"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(scaling: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        rope_of({"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "default"}, MAX_POSITION),
        ({"rope_type": "linear", "factor": 2.0}, 2 * MAX_POSITION),
        (LLAMA3, MAX_POSITION),
        (YARN, MAX_POSITION),  # 4 x 512 is less: the file names the length after scaling
        ({"rope_type": "yarn", "factor": 4.0}, 4 * MAX_POSITION),
    ],
)
def test_longest_sequence(scaling: dict[str, Any], longest: int) -> None:
    assert rope_of({"rope_scaling": scaling}).max_position(MAX_POSITION) == longest


LONGROPE = {
    "short_factor": [1.0 + index / 20 for index in range(24)],
    "long_factor": [1.0 + index for index in range(24)],
}


@pytest.mark.parametrize("change", [{}, {"attention_factor": 1.3}, {"factor": 3.0}])
@pytest.mark.parametrize(
    ("max_position", "num_positions"), [(2048, 512), (2048, 513), (2048, 2048), (512, 512)]
)
def test_longrope_chooses_by_the_tables_length(
    max_position: int, num_positions: int, change: dict[str, Any]
) -> None:
    """As transformers does for a sequence of that length; 512 is the original one."""
    scaling = {**LONGROPE, **change, "partial_rotary_factor": 0.75, "rope_theta": 1e4}
    fields = {"max_position_embeddings": max_position, "original_max_position_embeddings": 512}
    config = Phi3Config(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        rope_parameters={**scaling, "rope_type": "longrope"},
        **fields,
    )
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    expected = torch.stack([cos[0, :, :24], sin[0, :, :24]], dim=1)
    for spelling in ({"rope_type": "longrope"}, {"type": "longrope"}, {"type": "su"}):
        rope = RopeConfig.from_fields(
            {"rope_scaling": scaling | spelling, **fields}, head_dim=HEAD_DIM, can_be_partial=True
        )
        assert rope.max_position(max_position) == max_position
        assert torch.equal(cos_sin_table(rope, num_positions), expected)


@pytest.mark.parametrize(("partial", "num_rotated"), [(0.5, 32), (0.75, 48), (1.0, 64)])
def test_part_of_a_head_may_rotate(partial: float, num_rotated: int) -> None:
    config = GlmConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        head_dim=HEAD_DIM,
        partial_rotary_factor=partial,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    cos, _ = GlmRotaryEmbedding(config)(torch.zeros(1), torch.arange(100)[None])
    fields = {"rope_theta": 1e4, "max_position_embeddings": 100, "partial_rotary_factor": partial}
    rope = RopeConfig.from_fields(fields, head_dim=HEAD_DIM, can_be_partial=True)
    table = cos_sin_table(rope, 100)
    assert table.shape == (100, 2, num_rotated // 2)
    assert torch.equal(table[:, 0], cos[0, :, : num_rotated // 2])


@pytest.mark.parametrize("partial", [0.01, 1.5, "half", True, -1, 0.05])
def test_impossible_parts_of_a_head_are_refused(partial: Any) -> None:
    fields = {"rope_theta": 1e4, "max_position_embeddings": 64, "partial_rotary_factor": partial}
    with pytest.raises(ConfigurationError, match=f"partial_rotary_factor='?{partial}"):
        RopeConfig.from_fields(fields, head_dim=HEAD_DIM, can_be_partial=True)


def test_identity_table_rotates_by_nothing() -> None:
    table = identity_table(rope_of({}), 5)
    assert torch.equal(table[:, 0], torch.ones(5, HEAD_DIM // 2))
    assert torch.equal(table[:, 1], torch.zeros(5, HEAD_DIM // 2))
