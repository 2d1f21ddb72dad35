"""Tied embeddings: the head is what transformers makes of the same files, held once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from octavo_worker.models import Model, load_model
from octavo_worker.models.decoder import EMBED_NAME, HEAD_NAME
from octavo_worker.weights import SINGLE_NAME
from tests.tiny_models import save_tiny_model
from tests.unit.gpu_worker.checkpoint_files import assert_refused, drop, edit, set_tie_flag


@torch.no_grad()
def assert_head_equals_transformers(folder: Path) -> Model:
    """Embedding and head are those that transformers uses for this folder."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder)
    assert torch.equal(model.embed_tokens, reference.get_input_embeddings().weight)
    assert torch.equal(model.lm_head, reference.get_output_embeddings().weight)
    is_tied = reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    assert (model.lm_head is model.embed_tokens) == is_tied
    unique = {parameter.data_ptr(): parameter.nbytes for parameter in reference.parameters()}
    assert model.num_bytes() == sum(unique.values())  # held once, counted once
    return model


@pytest.fixture(params=["llama", "qwen3"])
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = save_tiny_model(tmp_path, request.param, tie_word_embeddings=True)
    assert HEAD_NAME not in load_file(folder / SINGLE_NAME)
    return folder


def test_tied_without_a_head(tied: Path) -> None:
    assert assert_head_equals_transformers(tied).config.tie_word_embeddings


def test_tied_with_a_copy_as_head(tied: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(tied / SINGLE_NAME, lambda t: t.update({HEAD_NAME: t[EMBED_NAME].clone()}))
    model = assert_head_equals_transformers(tied)
    assert model.lm_head is model.embed_tokens
    assert "octavo_worker.weights" not in {record.name for record in caplog.records}


def test_tied_with_another_head_warns_and_unties(
    tied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(tied / SINGLE_NAME, lambda t: t.update({HEAD_NAME: t[EMBED_NAME] + 0.25}))
    model = assert_head_equals_transformers(tied)
    assert model.lm_head is not model.embed_tokens
    warnings = [r for r in caplog.records if r.name == "octavo_worker.weights"]
    assert len(warnings) == 1
    assert HEAD_NAME in warnings[0].getMessage()


def test_tied_with_only_a_head(tied: Path) -> None:
    edit(tied / SINGLE_NAME, lambda t: t.update({HEAD_NAME: t.pop(EMBED_NAME)}))
    assert_head_equals_transformers(tied)


def test_tied_with_neither(tied: Path) -> None:
    edit(tied / SINGLE_NAME, drop(EMBED_NAME))
    assert_refused(tied, EMBED_NAME)


def test_tied_with_a_head_of_another_shape(tied: Path) -> None:
    edit(tied / SINGLE_NAME, lambda t: t.update({HEAD_NAME: t[EMBED_NAME][:-1].clone()}))
    assert_refused(tied, HEAD_NAME, "[383, 96]")


@pytest.mark.parametrize("flag", [False, None])
def test_untied_with_a_head(flag: bool | None, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=False)
    set_tie_flag(folder, flag)
    model = assert_head_equals_transformers(folder)
    assert model.lm_head is not model.embed_tokens


@pytest.mark.parametrize("flag", [False, None])
def test_untied_without_a_head_is_no_random_head(flag: bool | None, tied: Path) -> None:
    set_tie_flag(tied, flag)
    assert_refused(tied, HEAD_NAME)


def test_smollm3_is_tied_by_default(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "smollm3", tie_word_embeddings=True)
    set_tie_flag(folder, None)
    model = assert_head_equals_transformers(folder)
    assert model.lm_head is model.embed_tokens
