"""The text part of models that take images, too: transformers' numbers for text alone."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

from octavo.errors import ConfigurationError
from octavo_worker.footprint import footprint
from octavo_worker.models import load_any_model, load_model
from octavo_worker.models.config import read_fields
from octavo_worker.models.decoder import Model
from octavo_worker.weights import SINGLE_NAME
from tests.tiny_models import TINY_VOCAB_SIZE, randomise
from tests.unit.gpu_worker.test_fp8_models import logits_of, twin_logits

TEXT: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3() -> PreTrainedModel:
    """Two local layers with a window that the prompt leaves, and a global one."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = TEXT | {"sliding_window": 8, "layer_types": kinds, "query_pre_attn_scalar": 16}
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def mistral3() -> PreTrainedModel:
    config = Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=VISION | {"model_type": "pixtral"},
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


MODELS = {"gemma3": gemma3, "mistral3": mistral3}


def save(folder: Path, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model = make().eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_text_alone(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twin = save(tmp_path, MODELS[name])
    stored = load_file(tmp_path / SINGLE_NAME)
    assert any(key.startswith("vision_tower.") for key in stored)
    with caplog.at_level(logging.INFO):
        model = load_any_model(tmp_path, dtype="float32")
    assert isinstance(model, Model)
    assert "the text part" in caplog.text
    torch.testing.assert_close(logits_of(model), twin_logits(twin), rtol=1e-4, atol=1e-4)
    planned = footprint(tmp_path, dtype="float32")
    assert planned.implementation == "native"
    assert planned.weight_bytes == model.num_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_the_newer_names(name: str, tmp_path: Path) -> None:
    """The text part inside `model.`, its head outside."""
    twin = save(tmp_path, MODELS[name])
    stored = load_file(tmp_path / SINGLE_NAME)

    def renamed(key: str) -> str:
        key = key.replace("language_model.lm_head.", "lm_head.")
        key = key.replace("language_model.model.", "model.language_model.")
        return key.replace("vision_tower.", "model.vision_tower.")

    save_file({renamed(key): value for key, value in stored.items()}, tmp_path / SINGLE_NAME)
    logits = logits_of(load_model(tmp_path, dtype="float32"))
    torch.testing.assert_close(logits, twin_logits(twin), rtol=1e-4, atol=1e-4)


def test_what_gemma_3_4b_says_of_itself(tmp_path: Path) -> None:
    """Its config.json leaves out what is as in transformers' class."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = read_fields(tmp_path)
    transformers = Gemma3Config(**config).text_config
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"),
        *("max_position_embeddings", "rms_norm_eps", "query_pre_attn_scalar"),
    ):
        assert fields[name] == getattr(transformers, name), name
    assert fields["eos_token_id"] == [1, 106]
    assert fields["torch_dtype"] == "bfloat16"
    planned = footprint(tmp_path)
    assert planned.architecture == "Gemma3ForCausalLM"
    assert 7.5e9 < planned.weight_bytes < 8e9  # 3.88e9 parameters


def test_damage_is_named_as_it_is_stored(tmp_path: Path) -> None:
    save(tmp_path, gemma3)
    stored = load_file(tmp_path / SINGLE_NAME)
    name = "language_model.model.layers.1.mlp.up_proj.weight"

    def refused(expected: str, **changed: Tensor) -> None:
        save_file({**stored, **changed}, tmp_path / SINGLE_NAME)
        with pytest.raises(ConfigurationError, match=expected):
            load_model(tmp_path, dtype="float32")

    refused(f"tensor {name} has the shape", **{name: stored[name][1:].clone()})
    extra = "language_model.model.extra.weight"
    refused(extra, **{extra: torch.ones(1)})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"text_config": None}))
    with pytest.raises(ConfigurationError, match="text_config"):
        load_model(tmp_path, dtype="float32")
