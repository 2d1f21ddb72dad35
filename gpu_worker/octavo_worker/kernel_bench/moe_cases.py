"""A layer's experts as steps of 1, 32 and 256 tokens compute them. Entry point: `moe_cases`.

How many experts are hit decides what must be read, so the choice is no router's but an even one:
token t's experts are t * k + j, modulo E.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from octavo_kernels.moe import moe, moe_work
from octavo_worker.kernel_bench.case import Call, Case, num_sets

_ITEM = 2


class _Shape(NamedTuple):
    name: str
    num_experts: int
    top_k: int
    hidden: int
    expert_size: int


_SHAPES = (
    _Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    _Shape("mixtral-8x7b", 8, 2, 4096, 14_336),
)
_NUM_TOKENS = (1, 32, 256, 4096)


def moe_cases() -> Iterator[Case]:
    for shape in _SHAPES:
        for num_tokens in _NUM_TOKENS:
            yield _case(shape, num_tokens)


def _case(shape: _Shape, num_tokens: int) -> Case:
    num_hit = min(shape.num_experts, num_tokens * shape.top_k)
    work = moe_work(
        num_tokens, num_hit, shape.hidden, shape.expert_size, top_k=shape.top_k, itemsize=_ITEM
    )

    def make() -> list[Call]:
        gate_up = _random(shape.num_experts, 2 * shape.expert_size, shape.hidden)
        down = _random(shape.num_experts, shape.hidden, shape.expert_size)
        return [
            _call(shape, num_tokens, gate_up, down, index)
            for index in range(num_sets(work.num_bytes))
        ]

    return Case(f"moe {shape.name} {num_tokens}", work.num_bytes, work.num_flops, make)


def _call(
    shape: _Shape, num_tokens: int, gate_up: torch.Tensor, down: torch.Tensor, index: int
) -> Call:
    """Set `index` chooses the experts behind those of the set before it: they're cold."""
    x = _random(num_tokens, shape.hidden)
    first = index * num_tokens * shape.top_k
    pair = torch.arange(first, first + num_tokens * shape.top_k, device="cuda")
    chosen = (pair % shape.num_experts).view(num_tokens, shape.top_k)
    logits = torch.zeros(num_tokens, shape.num_experts, dtype=torch.bfloat16, device="cuda")
    logits.scatter_(1, chosen, 1.0)
    slots = torch.arange(num_tokens, device="cuda")
    return lambda: moe(x, logits, gate_up, down, slots, top_k=shape.top_k, renormalise=True)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
