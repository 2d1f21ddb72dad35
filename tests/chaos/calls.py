"""What clients ask of a fleet: every kind of generation, through every door.

Entry point: `mixed_calls`.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.chaos.traffic import Call, Door
from tests.e2e.prompts import prompt_ids

# Prompts of a family begin alike: they share a cell, and a cache that survives shows.
NUM_FAMILIES, NUM_SHARED = 5, 64
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7, "logprobs": 1},
    {"temperature": 1.0, "seed": 11, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 3, "n": 2},
    {"temperature": 1.0, "seed": 5, "stop": ["zq", "xj"]},
    {"logprobs": 0},
    {"temperature": 0.7, "seed": 19, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    # No seed: the Idempotency-Key is one.
    {"temperature": 1.0},
]
DOORS = (Door.GRPC, Door.SSE, Door.GRPC, Door.SSE, Door.WHOLE)


def mixed_calls(model: Path, num_calls: int, max_tokens: int) -> list[Call]:
    """Calls of every kind through every door; prompts of 67 ids and more."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    lengths = [3 + 2 * (i % 40) for i in range(num_calls)]
    prompts = prompt_ids(encode, [NUM_SHARED] * NUM_FAMILIES + lengths)
    families, own = prompts[:NUM_FAMILIES], prompts[NUM_FAMILIES:]
    return [
        Call(
            [*families[i % NUM_FAMILIES], *ids],
            {"max_tokens": max_tokens, "ignore_eos": True, **KINDS[i % len(KINDS)]},
            DOORS[i % len(DOORS)],
            f"key-{i}",
        )
        for i, ids in enumerate(own)
    ]
