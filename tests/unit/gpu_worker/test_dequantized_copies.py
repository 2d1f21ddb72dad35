"""16-bit copies beside 4-bit codes: when there are some, what they hold, who reads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigurationError
from octavo.settings import WorkerSettings
from octavo_kernels.w4_dequantize import dequantize_reference
from octavo_kernels.w4_weight import W4Weight, pack
from octavo_kernels.w4a16 import matmul_reference
from octavo_worker.backends.folded_linear import FoldedLinear
from octavo_worker.dequantized_copies import KVWish, are_affordable, keep_copies
from octavo_worker.footprint import footprint
from octavo_worker.models import Model, load_model
from octavo_worker.models.quant_linear import (
    MOST_ROWS_OF_CODES,
    PackedPiece,
    PlainPiece,
    QuantLinear,
    W4Kernels,
)
from octavo_worker.quant import Codes
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, Saved, save_quantized
from tests.unit.gpu_worker.test_packed_layers import KERNELS, ROWS, load_packed

CARD = torch.device("cuda")
GIB = 1 << 30
SETTINGS = WorkerSettings(max_num_seqs=4, memory_utilization=0.9, max_graph_tokens=0)


def use_card(monkeypatch: pytest.MonkeyPatch, total: int, free: int | None = None) -> None:
    """The memory of a card that isn't there, as torch tells it."""
    sizes = (total if free is None else free, total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: sizes)


# --- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "room", "kv", "expected"),
    [
        (20, 120, KVWish(most=1000, least=2), True),  # a sixth
        (21, 120, KVWish(most=1000, least=2), False),
        (1, 0, KVWish(most=1000, least=0), False),
        (120, 120, KVWish(most=0, least=0), True),
        (121, 120, KVWish(most=0, least=0), False),
        (90, 120, KVWish(most=30, least=2), True),  # of room that blocks have no use for
        (95, 120, KVWish(most=30, least=2), True),  # and a sixth of the rest
        (96, 120, KVWish(most=30, least=2), False),
        (90, 120, KVWish(most=30, least=30), True),
        (91, 120, KVWish(most=30, least=30), False),  # what is set is not touched
    ],
)
def test_blocks_lose_at_most_a_sixth(copies: int, room: int, kv: KVWish, expected: bool) -> None:
    assert are_affordable(copies, room, kv) is expected


# --- what is kept -------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save_quantized(tmp_path, Recipe("awq"))


def pieces_of(model: Model) -> list[PackedPiece]:
    pieces = [piece for layer in model.quantized for piece in layer.pieces]
    return [piece for piece in pieces if isinstance(piece, PackedPiece)]


def has_copies(model: Model) -> bool:
    held = {piece.matrix is not None for piece in pieces_of(model)}
    assert len(held) == 1
    return held.pop()


def test_a_roomy_card_keeps_them_and_they_count(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_card(monkeypatch, 100 * GIB)
    model = load_packed(saved.folder, dtype=torch.bfloat16)
    before = model.num_bytes()
    with caplog.at_level("INFO"):
        keep_copies(model, SETTINGS, CARD, 512)
    assert has_copies(model)
    planned = footprint(saved.folder, dtype="bfloat16").copies_bytes
    assert (
        model.num_bytes() - before
        == planned
        == sum(layer.codes.size * 2 for layer in saved.layers.values())
    )
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        "4-bit layers: 16-bit copies for steps of more than 64 rows take 0.00 GB"
    )
    assert said.endswith(": kept")


def test_a_full_card_keeps_none(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_card(monkeypatch, 100 * GIB, free=8 * GIB)
    model = load_packed(saved.folder, dtype=torch.bfloat16)
    with caplog.at_level("INFO"):
        keep_copies(model, SETTINGS, CARD, 512)
    assert not has_copies(model)
    assert "not kept, blocks would lose more than 1/6" in caplog.text
    must = WorkerSettings(dequantized_copies="always")
    with pytest.raises(
        ConfigurationError, match=r"OCTAVO_DEQUANTIZED_COPIES=always: copies take .* GB and"
    ):
        keep_copies(model, must, CARD, 512)
    assert not has_copies(model)


def test_the_rank_with_the_least_room_decides(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_card(monkeypatch, 100 * GIB)
    model = load_packed(saved.folder, dtype=torch.bfloat16)
    asked: list[int] = []

    def agree(room: int) -> int:
        asked.append(room)
        return 1 << 20

    keep_copies(model, SETTINGS, CARD, 512, agree)
    assert len(asked) == 1
    assert 80 * GIB < asked[0] < 90 * GIB
    assert not has_copies(model)


@pytest.mark.parametrize("size", [{"num_kv_blocks": 64}, {"kv_cache_memory": "1MiB"}])
def test_a_cache_that_is_set_may_have_the_rest_of_the_card(
    size: dict[str, Any],
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Copies that must be fit beside it; otherwise the usable share of memory bounds them."""
    use_card(monkeypatch, 100 * GIB, free=9 * GIB)
    fixed = {"max_num_seqs": 4, **size}
    model = load_packed(saved.folder, dtype=torch.bfloat16)
    with caplog.at_level("INFO"):
        keep_copies(model, WorkerSettings(**fixed), CARD, 512)
    assert not has_copies(model)
    assert "there's no room beside a cache of the size that is set" in caplog.text
    keep_copies(model, WorkerSettings(dequantized_copies="always", **fixed), CARD, 512)
    assert has_copies(model)


def test_a_cache_of_the_least_size_is_not_one_that_is_set(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One short row fills as many blocks as there must be at least: the usable share still bounds
    copies."""
    use_card(monkeypatch, 100 * GIB, free=9 * GIB)
    model = load_packed(saved.folder, dtype=torch.bfloat16)
    model.config = replace(model.config, max_model_len=16)
    with caplog.at_level("INFO"):
        keep_copies(model, WorkerSettings(max_num_seqs=1), CARD, 512)
    assert not has_copies(model)
    assert "blocks would lose more than 1/6" in caplog.text
    must = WorkerSettings(max_num_seqs=1, dequantized_copies="always")
    with pytest.raises(ConfigurationError, match=r"weights leave 0\.00 GB"):
        keep_copies(model, must, CARD, 512)


def test_never_and_not_of_32_bits(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_card(monkeypatch, 100 * GIB)
    wide, never = load_packed(saved.folder), WorkerSettings(dequantized_copies="never")
    model = load_packed(saved.folder, dtype=torch.float16)
    with caplog.at_level("INFO"):
        keep_copies(model, never, CARD, 512)
        keep_copies(wide, SETTINGS, CARD, 512)
    assert not has_copies(model)
    assert not has_copies(wide)
    assert [record.message for record in caplog.records] == [
        "4-bit layers: no 16-bit copies, as set",
        "4-bit layers: no 16-bit copies: copies have 16 bits, but torch.float32 is computed in",
    ]
    with pytest.raises(ConfigurationError, match=r"but torch\.float32 is computed in"):
        keep_copies(wide, WorkerSettings(dequantized_copies="always"), CARD, 512)


def test_layers_that_are_matrices_already_have_none(saved: Saved) -> None:
    """On a CPU, where no memory of a card is asked for either."""
    model = load_model(saved.folder, dtype="bfloat16")
    before = model.num_bytes()
    keep_copies(model, WorkerSettings(dequantized_copies="always"), torch.device("cpu"), 512)
    assert model.num_bytes() == before


# --- who reads them -----------------------------------------------------------------------------


class CountedProducts:
    """The seam to the kernels: how often codes were multiplied with."""

    def __init__(self) -> None:
        self.count = 0
        self.kernels = W4Kernels(pack, self._matmul, dequantize_reference)

    def _matmul(self, x: Tensor, weight: W4Weight) -> Tensor:
        self.count += 1
        return matmul_reference(x, weight)


@pytest.mark.parametrize("name", ROWS)
def test_many_rows_read_the_copy_and_few_the_codes(name: str, tmp_path: Path) -> None:
    recipe, num_pieces = ROWS[name]
    width = {"intermediate_size": 160} if "short" in name else {}
    saved = save_quantized(tmp_path, recipe, **width)
    products = CountedProducts()
    layer = load_packed(tmp_path, products.kernels).layers[0]
    for linear, modules in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.mlp.down, ("mlp.down_proj",)),
    ):
        assert isinstance(linear, QuantLinear)
        # In float32, where both must be the formula's.
        linear.keep_matrices(torch.float32)
        weight = torch.cat([saved.layers[f"model.layers.0.{part}"].weight for part in modules])
        assert torch.equal(torch.cat([piece.matrix for piece in linear.pieces]), weight)
        x = torch.randn(MOST_ROWS_OF_CODES + 1, weight.shape[1])
        products.count = 0
        torch.testing.assert_close(linear(x), x @ weight.T)
        assert products.count == 0
        torch.testing.assert_close(linear(x[1:]), x[1:] @ weight.T)
        assert products.count == (num_pieces if linear is layer.qkv else 1)


def test_a_layer_in_part_left_out_has_copies_of_the_rest(tmp_path: Path) -> None:
    recipe = Recipe("compressed-tensors", config={"ignore": ["lm_head", "re:.*k_proj"]})
    saved = save_quantized(tmp_path, recipe, leave_out=lambda name: name.endswith("k_proj"))
    linear = load_packed(tmp_path).layers[0].qkv
    assert isinstance(linear, QuantLinear)
    before = linear.num_bytes()
    linear.keep_matrices(torch.float32)
    assert linear.num_bytes() - before == 4 * linear.num_quantized == 4 * (128 + 32) * 128
    named = dict(saved.twin.named_parameters())
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    x = torch.randn(MOST_ROWS_OF_CODES + 1, 128)
    expected = torch.cat([x @ named[name].detach().T for name in names], dim=-1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("act_order", [False, True])
def test_folded_products_take_the_same_choice(act_order: bool) -> None:
    """Codes of inputs in another order can't be folded, but their copy can."""
    height, width = 16_384, 512  # large enough for tiles of many rows
    groups = torch.arange(width) // 128
    codes = Codes(
        bits=4,
        values=torch.randint(0, 16, (height, width), dtype=torch.uint8),
        scales=torch.ones(height, 4),
        zeros=torch.full((height, 4), 8, dtype=torch.uint8),
        groups=groups.flip(0) if act_order else groups,
    )
    linear = QuantLinear([], {}, None, PlainPiece)  # type: ignore[arg-type]
    linear.pieces = (PackedPiece.of(codes, KERNELS, torch.float16),)
    few, many = MOST_ROWS_OF_CODES, MOST_ROWS_OF_CODES + 1

    def read_by(num_rows: int) -> object:
        folded = FoldedLinear(linear).fold(num_rows, gated=True)
        return None if folded is None else folded.weight

    (piece,) = linear.pieces
    packed = None if act_order else piece.weight
    assert read_by(few) is packed
    assert read_by(many) is packed
    linear.keep_matrices(torch.float16)
    (piece,) = linear.pieces
    assert isinstance(piece, PackedPiece)
    assert read_by(few) is packed
    assert read_by(many) is piece.matrix
