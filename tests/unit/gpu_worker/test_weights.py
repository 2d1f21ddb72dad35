"""Checkpoints, whole and broken: every parameter loaded once, or an error by name.

Broken ones must fail before anything is loaded, name file and tensor, and never end in a model.
"""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigurationError
from octavo_worker.models import load_model
from octavo_worker.models.decoder import EMBED_NAME, HEAD_NAME
from octavo_worker.slots import Slot
from octavo_worker.weights import INDEX_NAME, SINGLE_NAME, Checkpoint, load_weights
from tests.tiny_models import save_tiny_model
from tests.unit.gpu_worker.checkpoint_files import (
    Q_NAME,
    assert_refused,
    drop,
    edit,
    edit_index,
    set_tie_flag,
    shard_of,
)


@pytest.fixture(scope="module")
def sharded_origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


@pytest.fixture
def sharded(sharded_origin: Path, tmp_path: Path) -> Path:
    """A private copy of a checkpoint in at least three shards."""
    return Path(shutil.copytree(sharded_origin, tmp_path / "model"))


# --- whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "200KB"])
def test_every_tensor_is_loaded_once_to_its_place(
    family: str, max_shard_size: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, family, max_shard_size=max_shard_size)
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    model = load_model(folder)
    loaded = {name: slot.target for name, slot in model.slots().items()}
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name
    layer = model.layers[0]
    parts = [stored[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(parts))
    parts = [stored[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat(parts))
    assert model.num_bytes() == sum(tensor.nbytes for tensor in stored.values())


def test_progress_rises_to_one(sharded: Path) -> None:
    fractions: list[float] = []
    load_model(sharded, progress=fractions.append)
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] < 1
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_cast_while_loaded(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, dtype=stored)
    model = load_model(folder, dtype=wanted)
    expected = load_file(folder / SINGLE_NAME)
    for name, slot in model.slots().items():
        assert slot.target.dtype == wanted
        assert torch.equal(slot.target, expected[name].to(wanted))


def test_stray_safetensors_file_is_ignored(sharded: Path) -> None:
    save_file({Q_NAME: torch.zeros(3), "stray": torch.zeros(1)}, sharded / "adapter.safetensors")
    (sharded / "broken.safetensors").write_bytes(b"")
    expected = load_file(shard_of(sharded, Q_NAME))[Q_NAME]
    assert torch.equal(load_model(sharded).slots()[Q_NAME].target, expected)


def test_computed_buffers_of_old_checkpoints_are_ignored(sharded: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    shard = shard_of(sharded, Q_NAME)
    edit(shard, lambda tensors: tensors.update({name: torch.ones(8)}))
    edit_index(sharded, lambda weight_map: weight_map.update({name: shard.name}))
    assert name not in load_model(sharded).slots()


def test_files_may_be_links(sharded: Path, tmp_path: Path) -> None:
    """A snapshot of the hub's cache holds links into its blobs."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert load_model(snapshot).config.num_layers == 2


def test_a_single_file_wins_over_an_index(sharded: Path) -> None:
    """As in transformers, where both lie in one folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sharded.glob("model-*.safetensors"):
        tensors |= load_file(path)
    tensors[Q_NAME] = torch.full_like(tensors[Q_NAME], 3.0)
    save_file(tensors, sharded / SINGLE_NAME, metadata={"format": "pt"})
    assert bool((load_model(sharded).slots()[Q_NAME].target == 3.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_tells_its_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    with Checkpoint(save_tiny_model(tmp_path, dtype=dtype)) as checkpoint:
        assert checkpoint.dtype() == dtype


# --- broken -----------------------------------------------------------------------------------


def test_deleted_shard(sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    shard.unlink()
    assert_refused(sharded, shard.name, "absent", INDEX_NAME)


@pytest.mark.parametrize("num_cut", [1, 1000, 100_000])
def test_truncated_shard(num_cut: int, sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    data = shard.read_bytes()
    assert len(data) > num_cut
    shard.write_bytes(data[:-num_cut])
    assert_refused(sharded, shard.name, "cut short", f"{len(data) - num_cut:,} bytes")


def test_longer_file_than_its_header_says(sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    shard.write_bytes(shard.read_bytes() + b"\0" * 8)
    assert_refused(sharded, shard.name, "damaged")


@pytest.mark.parametrize("header_length", [0, 1, 7, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_flipped_header_length(header_length: int, sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    shard.write_bytes(struct.pack("<Q", header_length) + shard.read_bytes()[8:])
    assert_refused(sharded, shard.name, "damaged")


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_of_the_header_length(bit: int, sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    data = bytearray(shard.read_bytes())
    data[0] ^= 1 << bit
    shard.write_bytes(data)
    assert_refused(sharded, shard.name, "damaged")


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 5000, b"<html>not found</html>"])
def test_no_safetensors_at_all(content: bytes, sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    shard.write_bytes(content)
    assert_refused(sharded, shard.name, "no safetensors file")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 537\n"


def test_git_lfs_pointer(sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    shard.write_bytes(POINTER)
    assert_refused(sharded, shard.name, "Git-LFS pointer", "git lfs pull")


def test_git_lfs_pointer_in_place_of_the_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).write_bytes(POINTER)
    assert_refused(sharded, INDEX_NAME, "Git-LFS pointer")


def test_index_with_old_names(sharded: Path) -> None:
    """Renamed by a conversion that forgot the index."""

    def rename(weight_map: dict[str, str]) -> None:
        for name in list(weight_map):
            weight_map[name.replace("model.", "transformer.")] = weight_map.pop(name)

    edit_index(sharded, rename)
    assert_refused(sharded, "transformer.", ".safetensors: holds no", INDEX_NAME)


def test_index_lists_a_tensor_that_no_shard_has(sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    edit_index(sharded, lambda weight_map: weight_map.update({"model.more": shard.name}))
    assert_refused(sharded, shard.name, "holds no model.more", INDEX_NAME)


def test_index_names_the_wrong_shard(sharded: Path) -> None:
    right = shard_of(sharded, Q_NAME)
    wrong = next(p for p in sorted(sharded.glob("model-*.safetensors")) if p != right)
    edit_index(sharded, lambda weight_map: weight_map.update({Q_NAME: wrong.name}))
    assert_refused(sharded, Q_NAME, INDEX_NAME)


def test_tensor_in_a_shard_but_not_in_the_index(sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    edit_index(sharded, drop(Q_NAME))
    assert_refused(sharded, shard.name, Q_NAME, INDEX_NAME)


@pytest.mark.parametrize("file_name", ["../outside.safetensors", "/etc/passwd", "a/b", "", ".."])
def test_index_reaching_out_of_its_folder(file_name: str, sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({Q_NAME: file_name}))
    assert_refused(sharded, INDEX_NAME, Q_NAME, "no file name")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_index(text: str, sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text(text)
    assert_refused(sharded, INDEX_NAME)


@pytest.mark.parametrize(
    "name",
    [
        Q_NAME,
        EMBED_NAME,
        HEAD_NAME,
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_missing_tensor(name: str, sharded: Path) -> None:
    shard = shard_of(sharded, name)
    edit(shard, drop(name))
    edit_index(sharded, drop(name))
    assert_refused(sharded, name)


def test_missing_bias(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    edit(folder / SINGLE_NAME, drop(name))
    assert_refused(folder, name, SINGLE_NAME)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "visual"]
)
def test_tensor_without_a_place(name: str, sharded: Path) -> None:
    """More layers, biases or modules than config.json says: another model's files."""
    shard = shard_of(sharded, Q_NAME)
    edit(shard, lambda tensors: tensors.update({name: torch.zeros(4, 2)}))
    edit_index(sharded, lambda weight_map: weight_map.update({name: shard.name}))
    assert_refused(sharded, shard.name, name, "[4, 2]")


@pytest.mark.parametrize("shape", [(95, 96), (96, 95), (96,), (96, 96, 1), (0, 96)])
def test_wrong_shape(shape: tuple[int, ...], sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    edit(shard, lambda tensors: tensors.update({Q_NAME: torch.ones(shape)}))
    assert_refused(sharded, shard.name, Q_NAME, str(list(shape)), "[96, 96]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_wrong_dtype(dtype: torch.dtype, sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    edit(shard, lambda tensors: tensors.update({Q_NAME: torch.ones(96, 96).to(dtype)}))
    assert_refused(sharded, shard.name, Q_NAME, "dtype")


def test_no_weights(sharded: Path) -> None:
    for path in [sharded / INDEX_NAME, *sharded.glob("*.safetensors")]:
        path.unlink()
    (sharded / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert_refused(sharded, SINGLE_NAME, INDEX_NAME, "converted")


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert_refused(sharded, INDEX_NAME, "model-00001-of-")


def test_weights_that_are_a_folder(sharded: Path) -> None:
    shard = shard_of(sharded, Q_NAME)
    shard.unlink()
    shard.mkdir()
    assert_refused(sharded, shard.name, "can't be read")


def test_nothing_is_loaded_if_the_last_shard_is_wrong(sharded: Path) -> None:
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    name = sorted(load_file(last))[0]
    edit(last, lambda tensors: tensors.update({name: torch.ones(1)}))
    places = {key: torch.full_like(t, 7.0) for key, t in load_reference(sharded).items()}
    slots = {key: Slot(place) for key, place in places.items()}
    with Checkpoint(sharded) as checkpoint, pytest.raises(ConfigurationError, match=name):
        load_weights(checkpoint, slots)
    assert all(bool((place == 7.0).all()) for place in places.values())


def load_reference(folder: Path) -> dict[str, torch.Tensor]:
    """Places of the right shapes, whatever the files hold."""
    slots = load_model(folder, load_format="random").slots()
    return {name: slot.target for name, slot in slots.items()}


# --- random -----------------------------------------------------------------------------------


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    folder = save_tiny_model(tmp_path, "qwen2")
    (folder / SINGLE_NAME).unlink()
    return folder


def test_random_weights_follow_the_seed(config_only: Path) -> None:
    def load(seed: int) -> dict[str, torch.Tensor]:
        slots = load_model(config_only, load_format="random", seed=seed).slots()
        return {name: slot.target for name, slot in slots.items()}

    first, again, other = load(1), load(1), load(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
            continue
        assert not torch.equal(tensor, other[name])
        assert tensor.std() == pytest.approx(0.02, rel=0.25)
        assert abs(float(tensor.mean())) < 0.01
    matrices = [t for t in first.values() if t.shape == (96, 96)]
    assert len({hash(t.numpy().tobytes()) for t in matrices}) == len(matrices)


def test_random_weights_of_a_tied_model_need_no_files(config_only: Path) -> None:
    set_tie_flag(config_only, True)
    fractions: list[float] = []
    model = load_model(config_only, load_format="random", progress=fractions.append)
    assert model.lm_head is model.embed_tokens
    assert fractions == [1.0]


def test_a_config_only_folder_is_no_checkpoint(config_only: Path) -> None:
    assert_refused(config_only, SINGLE_NAME)
