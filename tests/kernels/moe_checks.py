"""What the mixture of experts must fulfil, on whatever device."""

from typing import Any

import torch

from octavo_kernels.moe import moe, moe_reference
from octavo_kernels.moe_routing import choose_reference, route
from tests.kernels.cases import far_apart, normal, poisoned_outputs
from tests.kernels.cases_moe import moe_tensors
from tests.kernels.checks import assert_near


def check_moe(case: dict[str, Any], device: str) -> None:
    arguments = moe_tensors(case, device)
    options = {"top_k": case["experts"][1], "renormalise": case["renormalise"]}
    with poisoned_outputs():
        out = moe(**arguments, **options, tile=case["tile"])
    assert_near(out, moe_reference(**arguments, **options))
    assert bool((out[arguments["slot_mapping"] < 0] == 0).all())


def check_routing(case: dict[str, Any], device: str) -> None:
    """Every live pair is in exactly one tile, with its expert's others; dead ones are in none."""
    top_k, tile = case["experts"][1], case["tile"]
    arguments = moe_tensors(case, device)
    logits, slots = arguments["router_logits"], arguments["slot_mapping"]
    with poisoned_outputs():
        routing = route(logits, slots, top_k=top_k, renormalise=case["renormalise"], tile=tile)
    weights, chosen = choose_reference(logits, top_k=top_k, renormalise=case["renormalise"])
    pairs, placed = routing.pairs.tolist(), []
    for expert, first, num_rows in routing.tiles.tolist():
        assert 0 <= num_rows <= tile
        rows = pairs[first : first + num_rows]
        assert all(int(chosen[pair // top_k, pair % top_k]) == expert for pair in rows)
        placed += rows
    live = (slots >= 0).nonzero().flatten().tolist()
    expected = [token * top_k + j for token in live for j in range(top_k)]
    assert sorted(placed) == expected
    # By expert, and within an expert by token.
    assert placed == sorted(placed, key=lambda pair: (int(chosen.flatten()[pair]), pair))
    got = routing.weights.view(-1, top_k)[live]
    torch.testing.assert_close(got, weights[live], rtol=1e-5, atol=1e-6)


def check_batch_independence(device: str, dtype: torch.dtype, tile: int | None) -> None:
    """A token's result is the same, bit for bit, alone, in a batch, and in another place of it."""
    case = {"experts": (8, 2), "num_tokens": 40, "skew": "even", "widths": (64, 64)}
    arguments = moe_tensors(case | {"dtype": dtype}, device)
    options = {"top_k": 2, "renormalise": True, "tile": tile}
    per_token = ("x", "router_logits", "slot_mapping")
    together = moe(**arguments, **options)
    flipped = arguments | {name: arguments[name].flip(0) for name in per_token}
    assert torch.equal(moe(**flipped, **options).flip(0), together)
    for token in (0, 1, 39):
        alone = arguments | {name: arguments[name][token : token + 1] for name in per_token}
        assert torch.equal(moe(**alone, **options)[0], together[token])


def check_bad_tokens(device: str) -> None:
    """NaN and infinity in live tokens stay theirs, and choose experts that exist."""
    case = {"experts": (8, 2), "num_tokens": 7, "skew": "even", "widths": (64, 64)}
    arguments = moe_tensors(case | {"dtype": torch.float16}, device)
    options = {"top_k": 2, "renormalise": True}
    good = moe(**arguments, **options)
    logits = arguments["router_logits"].clone()
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    logits[3, 5] = torch.inf
    logits[5] = -torch.inf
    bad = moe(**(arguments | {"router_logits": logits}), **options)
    assert bad[[1, 2, 3, 5]].isnan().any(dim=1).tolist() == [True] * 4
    assert torch.equal(bad[[0, 4, 6]], good[[0, 4, 6]])


def check_captured(device: str) -> None:
    """A CUDA graph of one batch, replayed with another whose experts and dead tokens differ."""
    case = {"experts": (128, 8), "num_tokens": 24, "skew": "even", "widths": (256, 64)}
    first = moe_tensors(case | {"dtype": torch.bfloat16}, device)
    options = {"top_k": 8, "renormalise": True}
    other = {name: first[name].flip(0) for name in ("router_logits", "slot_mapping")}
    other["x"] = first["x"].flip(0).contiguous()
    expected = moe_reference(**(first | other), **options)
    static = first | {"x": first["x"].contiguous()}
    moe(**static, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(**static, **options)
    for name, value in other.items():
        static[name].copy_(value)
    graph.replay()
    assert_near(out, expected)


def check_ties(device: str) -> None:
    """Of equal experts the lower ones are chosen."""
    logits = torch.zeros(3, 8, device=device)
    logits[1, 5] = 1.0
    slots = torch.arange(3, device=device)
    routing = route(logits, slots, top_k=3, renormalise=True, tile=16)
    hit = {expert: rows for expert, _, rows in routing.tiles.tolist() if rows}
    assert hit == {0: 3, 1: 3, 2: 2, 5: 1}


def check_far_experts(device: str) -> None:
    """Experts times their stride beyond 32 bits."""
    num_experts, hidden, inner_size = 3, 32, 16
    shapes = {"gate_up": (2 * inner_size, hidden), "down": (hidden, inner_size)}
    near, far = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        width = shape[0] * shape[1]
        near[name] = normal(num_experts, *shape, dtype=torch.float16, device=device, seed=seed)
        storage = far_apart(num_experts, width, dtype=torch.float16, device=device)
        storage.copy_(near[name].flatten(1))
        far[name] = storage.unflatten(1, shape)
    arguments = {
        "x": normal(5, hidden, dtype=torch.float16, device=device, seed=44),
        "router_logits": torch.eye(3, device=device).repeat(2, 1)[:5],
        "slot_mapping": torch.arange(5, device=device),
    }
    options = {"top_k": 1, "renormalise": False}
    assert torch.equal(moe(**arguments, **far, **options), moe(**arguments, **near, **options))


def check_no_tokens(device: str) -> None:
    case = {"experts": (8, 2), "num_tokens": 1, "skew": "even", "widths": (64, 64)}
    arguments = moe_tensors(case | {"dtype": torch.float16}, device)
    for name in ("x", "router_logits", "slot_mapping"):
        arguments[name] = arguments[name][:0]
    assert moe(**arguments, top_k=2, renormalise=True).shape == (0, 64)
