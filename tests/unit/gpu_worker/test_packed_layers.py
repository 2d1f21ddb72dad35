"""4-bit layers packed for the kernels: what kernels are given means the same matrix.

The products here are the kernels' references in plain torch; the kernels themselves are compared
with these in tests/kernels.
"""

from pathlib import Path

import pytest
import torch

from octavo_kernels.w4_dequantize import dequantize_reference
from octavo_kernels.w4_weight import check_group_size, pack
from octavo_kernels.w4a16 import matmul_reference
from octavo_worker.models import Model, ModelConfig
from octavo_worker.models.quant_linear import PackedPiece, PlainPiece, QuantLinear, W4Kernels
from octavo_worker.models.quantized import QuantMaker
from octavo_worker.quant import Codes
from octavo_worker.quant.arrangement import arrange
from octavo_worker.weights import SINGLE_NAME, Checkpoint, load_weights
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, save_quantized
from tests.unit.gpu_worker.test_quantized_models import assert_equals_twin

KERNELS = W4Kernels(pack, matmul_reference, dequantize_reference)


def load_packed(
    folder: Path, kernels: W4Kernels = KERNELS, dtype: torch.dtype = torch.float32
) -> Model:
    config = ModelConfig.from_folder(folder, dtype=dtype)
    assert config.quantization is not None
    with Checkpoint(folder) as checkpoint:
        make = QuantMaker(
            config, config.quantization, torch.device("cpu"), checkpoint.tensors, kernels
        )
        model = Model(config, torch.device("cpu"), tied=False, make=make)
        load_weights(checkpoint, model.slots())
    model.finish()
    return model


ROWS = {
    "gptq": (Recipe("gptq"), 1),
    "gptq one group": (Recipe("gptq", group_size=-1), 1),
    "gptq act-order": (Recipe("gptq", act_order=True, group_size=64), 1),
    "gptq act-order, other orders": (Recipe("gptq", act_order=True, same_order=False), 3),
    "gptq short last group": (Recipe("gptq", group_size=64), 1),
    "awq": (Recipe("awq", group_size=128), 1),
    "compressed-tensors": (Recipe("compressed-tensors", symmetric=True), 1),
    "compressed-tensors act-order": (Recipe("compressed-tensors", act_order=True), 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_packed_layers_equal_their_dequantised_twins(name: str, tmp_path: Path) -> None:
    recipe, num_pieces = ROWS[name]
    width = {"intermediate_size": 160} if "short" in name else {}
    saved = save_quantized(tmp_path, recipe, **width)
    model = load_packed(tmp_path)
    for layer in model.layers:
        assert isinstance(layer.qkv, QuantLinear)
        assert len(layer.qkv.pieces) == num_pieces
        assert all(isinstance(piece, PackedPiece) for piece in layer.qkv.pieces)
    assert_equals_twin(saved, model)


def test_packed_layers_take_half_a_byte_a_weight(tmp_path: Path) -> None:
    """And padding, scales, zero points, the order."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16}
    saved = save_quantized(tmp_path, Recipe("gptq", group_size=128, act_order=True), **shape)
    model = load_packed(tmp_path)
    num_weights = sum(layer.codes.size for layer in saved.layers.values())
    plain = model.embed_tokens.nbytes + model.lm_head.nbytes
    assert 0.5 < (model.num_bytes() - plain) / num_weights < 0.6


def test_a_layer_in_part_left_out(tmp_path: Path) -> None:
    """Packed where it's quantised, plain where it isn't, in the order of its outputs."""
    recipe = Recipe("compressed-tensors", config={"ignore": ["lm_head", "re:.*k_proj"]})
    saved = save_quantized(tmp_path, recipe, leave_out=lambda name: name.endswith("k_proj"))
    model = load_packed(tmp_path)
    kinds = [type(piece) for piece in model.layers[0].qkv.pieces]
    assert kinds == [PackedPiece, PlainPiece, PackedPiece]
    assert_equals_twin(saved, model)


def test_eight_bits_become_matrices(tmp_path: Path) -> None:
    save_quantized(tmp_path, Recipe("gptq", bits=8))
    assert [type(piece) for piece in load_packed(tmp_path).layers[0].o.pieces] == [PlainPiece]
    assert (tmp_path / SINGLE_NAME).exists()


# --- the order of inputs ------------------------------------------------------------------------


def codes_of(groups: torch.Tensor, seed: int) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    num_groups = int(groups.max()) + 1
    return Codes(
        bits=4,
        values=torch.randint(0, 16, (5, len(groups)), generator=generator).byte(),
        scales=torch.rand(5, num_groups, generator=generator).half().float(),
        zeros=torch.randint(0, 16, (5, num_groups), generator=generator).byte(),
        groups=groups,
    )


ORDERED = torch.arange(256)
SHUFFLED = torch.randperm(256, generator=torch.Generator().manual_seed(7))
GROUPS: dict[str, tuple[torch.Tensor, int, int]] = {
    # groups of inputs; inputs of a group and columns as arranged
    "in order": (ORDERED // 64, 64, 256),
    "one group": (ORDERED * 0, 256, 256),
    "one group of any size": (torch.zeros(40, dtype=torch.int64), 40, 40),
    "wide groups": (ORDERED // 128, 128, 256),
    "shuffled": (SHUFFLED // 32, 32, 256),
    "short last group": (torch.arange(224) // 64, 32, 224),
    "odd last group": (torch.arange(200) // 64, 32, 224),
    "a share that begins within a group": ((ORDERED + 32) // 64, 32, 256),
    "a share of shuffled inputs": (SHUFFLED[:128] // 64, 32, 256),
    "groups of which some are absent": (torch.tensor([3] * 64 + [0] * 64), 64, 128),
}


@pytest.mark.parametrize("name", GROUPS)
def test_arranged_codes_mean_the_same_matrix(name: str) -> None:
    groups, size, most = GROUPS[name]
    codes = codes_of(groups, seed=len(groups))
    values, scales, zeros, group_size, order = arrange(codes)
    num_columns = values.shape[1]
    assert group_size == size
    assert num_columns <= most
    assert scales.shape == zeros.shape == (5, num_columns // group_size)
    check_group_size(group_size, num_columns)
    wide = [tensor.repeat_interleave(group_size, dim=1) for tensor in (scales, zeros)]
    columns = wide[0] * (values.float() - wide[1].float())
    inputs = torch.arange(num_columns) if order is None else order
    matrix = torch.zeros(5, len(groups)).index_add_(1, inputs, columns)
    assert torch.equal(matrix, codes.dequantize(torch.float32))


def test_scales_that_no_16_bit_float_holds_are_rounded() -> None:
    codes = codes_of(ORDERED // 64, seed=1)
    odd = Codes(4, codes.values, codes.scales * 1.0001, codes.zeros, codes.groups)
    piece = PackedPiece.of(odd, KERNELS, torch.bfloat16)
    assert piece.weight.scale_dtype == torch.bfloat16
    kept = PackedPiece.of(codes, KERNELS, torch.bfloat16)
    assert kept.weight.scale_dtype == torch.float16
