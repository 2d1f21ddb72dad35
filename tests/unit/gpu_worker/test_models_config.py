"""config.json in all its spellings; every mistake in it names file and field."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo_worker.attention_inputs import AttentionOptions
from octavo_worker.models import FAMILIES, ModelConfig
from octavo_worker.models.config import Activation, read_fields
from octavo_worker.models.folder import choose_dtype, stored_dtype
from octavo_worker.models.rope import RopeConfig
from tests.tiny_models import TINY_FAMILIES, tiny_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}


def write(folder: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, fields: dict[str, Any], **options: Any) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, fields), **options)


def test_fields_of_a_plain_file(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 6, 2)
    assert (config.head_dim, config.q_size, config.kv_size) == (16, 96, 32)
    assert config.max_model_len == 2048
    assert config.attention == (AttentionOptions(scale=0.25),) * 2
    assert config.ropes == (config.rope, config.rope)
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert config.dtype == torch.float32


@pytest.mark.parametrize("model_type", TINY_FAMILIES)
def test_an_absent_key_means_what_transformers_takes_it_to_mean(
    model_type: str, tmp_path: Path
) -> None:
    config_class, model_class = TINY_FAMILIES[model_type]
    sizes = {"vocab_size": 384, "hidden_size": 4096, "intermediate_size": 160}
    required = sizes | {"num_hidden_layers": 30, "num_attention_heads": 32}
    named = {"architectures": [model_class.__name__], "model_type": model_type}
    (tmp_path / "complete").mkdir()
    config_class(**required, architectures=named["architectures"]).save_pretrained(
        tmp_path / "complete"
    )
    complete = json.loads((tmp_path / "complete" / "config.json").read_text())
    assert len(complete) > len(required) + 12  # all keys stand there
    assert read(tmp_path, named | required) == ModelConfig.from_folder(tmp_path / "complete")
    sliding = {"use_sliding_window": True, "sliding_window": 64}
    assert read(tmp_path, named | required | sliding) == read(
        tmp_path, {k: v for k, v in complete.items() if k != "layer_types"} | sliding
    )


@pytest.mark.parametrize("model_type", TINY_FAMILIES)
def test_files_written_by_transformers(model_type: str, tmp_path: Path) -> None:
    hf = tiny_config(model_type)
    hf.architectures = [TINY_FAMILIES[model_type][1].__name__]
    hf.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert config.architecture == hf.architectures[0]
    assert config.num_layers == hf.num_hidden_layers
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    assert config.rope.theta == rope["rope_theta"]
    assert config.max_model_len == hf.max_position_embeddings
    assert config.qk_norm == model_type.startswith(("qwen3", "gemma3"))
    assert config.qkv_bias == (model_type in ("qwen2", "qwen2_moe", "glm", "glm4"))
    if model_type == "smollm3":
        assert config.ropes == (*[config.rope] * 3, None)
    elif model_type == "gemma3_text":
        local, everywhere = config.ropes
        assert everywhere == config.rope
        assert local == RopeConfig("default", 10_000.0, 16, hf.max_position_embeddings)
    else:
        assert config.ropes == (config.rope, config.rope)


def test_model_type_serves_where_no_architecture_is_named(tmp_path: Path) -> None:
    fields = {k: v for k, v in QWEN2.items() if k != "architectures"}
    assert read(tmp_path, fields).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba'"),
    ],
)
def test_other_architectures_are_refused_with_the_list(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        read(tmp_path, LLAMA | change)
    assert all(family.architecture in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size=None"),
        ({"hidden_size": "96"}, "hidden_size='96'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"intermediate_size": True}, "intermediate_size=True"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is no multiple"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size=96 is no multiple"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes'"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
    ],
)
def test_mistakes_name_the_field(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read(tmp_path, LLAMA | change)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "no such file"),
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[]", "must hold an object"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "Git-LFS pointer"),
    ],
)
def test_a_broken_file_is_named(text: str | None, named: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=rf"config\.json: .*{named}"):
        ModelConfig.from_folder(tmp_path)


def test_too_few_layer_flags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no_rope_layers has 1 entries for 2 layers"):
        read(tmp_path, SMOLLM3 | {"no_rope_layers": [1]})


def by_layer(layer_types: list[str]) -> dict[str, Any]:
    return {"sliding_window": 9, "use_sliding_window": True, "layer_types": layer_types}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (MISTRAL | {"sliding_window": 128}, (128, 128)),
        (MISTRAL | {"sliding_window": 32_768}, (None, None)),  # no query ever leaves it
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL, (4096, 4096)),  # the default of an absent key, as in transformers
        (LLAMA | {"sliding_window": 128}, (None, None)),  # transformers ignores it there
        (QWEN2 | {"sliding_window": 128}, (None, None)),  # not used unless `use_sliding_window`
        # From layer 28 on.
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True}, (None, None)),
        (
            QWEN2 | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (None, 9),
        ),
        (QWEN2 | by_layer(["sliding_attention", "full_attention"]), (9, None)),
        (SMOLLM3 | by_layer(["sliding_attention", "full_attention"]), (9, None)),
        (
            SMOLLM3 | {"sliding_window": 9, "use_sliding_window": True, "no_rope_layers": [1, 0]},
            (None, 9),
        ),
        (
            QWEN2
            | {
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "full_attention"],
            },
            (None, None),
        ),
    ],
)
def test_windows_are_the_layers_own_and_limit_no_length(
    fields: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, {"max_position_embeddings": 32_768, **fields})
    assert tuple(options.window for options in config.attention) == windows
    assert config.max_model_len == 32_768


@pytest.mark.parametrize(
    ("layer_types", "named"),
    [(["sliding_attention"], "has 1 entries for 2 layers"), (["chunked_attention"] * 2, "chunked")],
)
def test_layer_types_that_are_not_computed_are_refused(
    layer_types: list[str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"layer_types.*{named}"):
        read(tmp_path, QWEN2 | by_layer(layer_types))


GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
# What Gemma 3's first files say of positions, and what files say now.
OLD_ROPES = {
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 20_000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window_pattern": 2,
}
NEW_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    },
    "layer_types": ["sliding_attention", "full_attention"],
}


def test_gemma_3s_old_and_new_words_mean_the_same(tmp_path: Path) -> None:
    old, new = read(tmp_path, GEMMA3 | OLD_ROPES), read(tmp_path, GEMMA3 | NEW_ROPES)
    assert old == new
    assert old.max_model_len == 131_072  # after the scaling, not before
    local, everywhere = old.ropes
    assert local is not None
    assert everywhere is not None
    assert (local.rope_type, local.theta) == ("default", 20_000.0)
    assert (everywhere.rope_type, everywhere.theta) == ("linear", 1_000_000.0)
    assert [options.window for options in old.attention] == [4096, None]


def test_gemma_attends_as_its_file_says(tmp_path: Path) -> None:
    gemma2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 64}
    config = read(tmp_path, gemma2)
    assert config.attention == (
        AttentionOptions(1 / 8, 4096, 50.0),
        AttentionOptions(1 / 8, None, 50.0),
    )
    assert config.final_soft_cap == 30.0
    config = read(tmp_path, gemma2 | {"attn_logit_softcapping": None, "sliding_window": None})
    assert config.attention == (AttentionOptions(1 / 8),) * 2
    with pytest.raises(ConfigurationError, match="use_bidirectional_attention=True"):
        read(tmp_path, GEMMA3 | {"use_bidirectional_attention": True})


def test_gemmas_activation_is_the_approximated_one(tmp_path: Path) -> None:
    gemma = LLAMA | {"architectures": ["GemmaForCausalLM"]}
    for fields in ({}, {"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}):
        assert read(tmp_path, gemma | fields).activation is Activation.GELU_TANH
    mixtral = LLAMA | {"architectures": ["MixtralForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
    with pytest.raises(ConfigurationError, match="'gelu_pytorch_tanh' isn't supported for experts"):
        read(tmp_path, mixtral)


def test_requested_length_is_checked(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, max_model_len=2048).max_model_len == 2048
    with pytest.raises(ConfigurationError, match=r"OCTAVO_MAX_MODEL_LEN=2049.*at most 2048"):
        read(tmp_path, LLAMA, max_model_len=2049)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        ({}, None, (2,)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [7, 5, 7]}, None, (7, 5)),
        ({"eos_token_id": 5}, {"eos_token_id": [8, 9]}, (8, 9)),
        ({"eos_token_id": 5}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 5}, {"temperature": 0.6}, (5,)),
    ],
)
def test_ending_ids(
    in_config: dict[str, Any],
    in_generation: dict[str, Any] | None,
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    write(tmp_path, LLAMA | in_config, in_generation)
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
    ],
)
def test_stored_dtype(fields: dict[str, Any], expected: torch.dtype | None, tmp_path: Path) -> None:
    assert stored_dtype(read_fields(write(tmp_path, LLAMA | fields))) == expected


def test_unknown_stored_dtype_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="float8_e4m3fn"):
        stored_dtype({"dtype": "float8_e4m3fn"})


def test_auto_dtype_is_the_stored_one_on_a_card_and_float32_on_the_cpu() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_dtype("auto", torch.float16, cuda) == torch.float16
    assert choose_dtype("auto", None, cuda) == torch.bfloat16
    assert choose_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert choose_dtype("bfloat16", torch.float32, cpu) == torch.bfloat16
    assert choose_dtype(torch.float32, torch.float16, cuda) == torch.float32
    with pytest.raises(ConfigurationError, match="OCTAVO_DTYPE='int8'"):
        choose_dtype("int8", None, cpu)


def test_float16_for_bfloat16_weights_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_dtype("float16", torch.float32, torch.device("cpu"))
        assert not caplog.records
        choose_dtype("float16", torch.bfloat16, torch.device("cuda"))
    assert "float16 for bfloat16 weights" in caplog.text


QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("change", "sparse_layers"),
    [
        ({}, (True, True)),
        ({"decoder_sparse_step": 2}, (False, True)),
        ({"mlp_only_layers": [1, 7]}, (True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False)),
    ],
)
def test_layers_with_experts(
    change: dict[str, Any], sparse_layers: tuple[bool, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, QWEN3_MOE | change)
    assert config.sparse_layers == sparse_layers
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.expert_size) == (16, 4, 24)


def test_experts_are_counted_under_either_name(tmp_path: Path) -> None:
    renamed = {("num_local_experts" if k == "num_experts" else k): v for k, v in QWEN3_MOE.items()}
    assert read(tmp_path, renamed) == read(tmp_path, QWEN3_MOE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok=17 is more than num_experts=16"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers='0'"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size=-1"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
            "quantized experts aren't supported",
        ),
    ],
)
def test_mistakes_about_experts_name_the_field(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read(tmp_path, QWEN3_MOE | change)


@pytest.mark.parametrize(
    ("architecture", "change", "expected"),
    [
        ("Qwen2Moe", {}, (None, None)),
        ("Qwen2Moe", {"use_sliding_window": True}, (9, None)),
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 0}, (None, None)),
        ("Qwen3Moe", {}, (None, None)),
        ("Qwen3Moe", {"use_sliding_window": True}, (9, 9)),
        ("Mixtral", {}, (9, 9)),
    ],
)
def test_windows_of_mixtures(
    architecture: str, change: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    fields = QWEN3_MOE | {"architectures": [f"{architecture}ForCausalLM"], "sliding_window": 9}
    config = read(tmp_path, fields | change)
    assert tuple(options.window for options in config.attention) == expected
