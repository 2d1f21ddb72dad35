"""Random weights of every format: centred, as wide as wanted, in codes that the format has."""

import pytest
import torch

from octavo_worker.quant import Codes, Fp8Format, quantization_of
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, quantization_config

NUM_OUTPUTS, NUM_INPUTS = 512, 1024
STD = 0.02
RECIPES = {
    "awq": Recipe("awq"),
    "awq, one group": Recipe("awq", group_size=-1),
    "gptq": Recipe("gptq"),
    "gptq, 8 bits": Recipe("gptq", bits=8),
    "gptq, minus 1 in whole words": Recipe("gptq", writer="gptqmodel"),
    "gptq v2": Recipe("gptq", v2=True),
    "gptq v2, 8 bits": Recipe("gptq", bits=8, v2=True),
    "gptq, symmetric": Recipe("gptq", symmetric=True),
    "gptq, symmetric, 8 bits": Recipe("gptq", bits=8, symmetric=True),
    "gptq, act-order": Recipe("gptq", act_order=True),
    "compressed-tensors": Recipe("compressed-tensors"),
    "compressed-tensors, symmetric": Recipe("compressed-tensors", symmetric=True),
    "compressed-tensors, symmetric, one group": Recipe(
        "compressed-tensors", symmetric=True, group_size=-1
    ),
}


def drawn(recipe: Recipe) -> Codes:
    """A layer whose stored tensors are random, and can't be refused."""
    quantization = quantization_of({"quantization_config": quantization_config(recipe)}, None)
    assert quantization is not None
    assert not isinstance(quantization, Fp8Format)
    size = quantization.size(NUM_OUTPUTS, NUM_INPUTS)
    region = quantization.region(size, range(NUM_OUTPUTS), range(NUM_INPUTS))
    generator = torch.Generator().manual_seed(0)
    raw: dict[str, torch.Tensor] = {}
    for form in quantization.forms(size):
        target = torch.empty(form.shape(size), dtype=form.dtype)
        form.fill(target, generator, STD)
        raw[form.suffix] = form.take(target, region)
    return quantization.unpack(raw, region)


@pytest.mark.parametrize("name", RECIPES)
def test_drawn_weights_are_centred_and_as_wide_as_wanted(name: str) -> None:
    weight = drawn(RECIPES[name]).dequantize(torch.float32)
    assert weight.shape == (NUM_OUTPUTS, NUM_INPUTS)
    assert weight.std().item() == pytest.approx(STD, rel=0.03)
    # Half a scale, what a zero point of 8 is beside the mean of the codes, would be 0.11 or,
    # with 8 bits, 0.007.
    assert abs(weight.mean().item()) < (0.02 if RECIPES[name].bits == 4 else 0.005) * STD


@pytest.mark.parametrize("name", RECIPES)
def test_drawn_codes_are_all_that_the_format_has(name: str) -> None:
    recipe = RECIPES[name]
    codes, middle = drawn(recipe), 1 << (recipe.bits - 1)
    # Symmetric: the lowest code has no opposite.
    assert codes.values.unique().tolist() == list(range(int(recipe.symmetric), 2 * middle))
    assert codes.zeros.unique().tolist() == ([middle] if recipe.symmetric else [middle - 1, middle])
