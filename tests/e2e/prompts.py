"""Prompts of every kind that a tokenizer finds hard, cut to exact lengths in tokens."""

import random
from collections.abc import Callable, Sequence

_SOURCES = (
    "The history of the printing press begins long before Gutenberg. In the seventh century, "
    "Chinese monks carved whole pages into blocks of wood and printed prayers by the thousand. ",
    "人工智能的发展经历了几次起伏。上个世纪五十年代,科学家们相信机器很快就能像人一样思考,但是事情没有那么简单。",
    "Weather report 🌦️: sunny ☀️ in Lisbon, snow ❄️ in Oslo, "
    "and 👨‍👩‍👧‍👦 families at the beach 🏖️ in Rio 🇧🇷. ",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n"
    "    left = [x for x in items[1:] if x < pivot]\n    return quicksort(left) + [pivot]\n\n",
    "Žluťoučký kůň úpěl ďábelské ódy. Съешь же ещё этих мягких французских булок. สวัสดีชาวโลก ",
)


def text_of_kind(kind: int, num_characters: int) -> str:
    source = _SOURCES[kind % len(_SOURCES)]
    return (source * (num_characters // len(source) + 2))[: num_characters + 1]


def prompt_ids(
    encode: Callable[[str], Sequence[int]], lengths: Sequence[int], seed: int = 0
) -> list[list[int]]:
    """One prompt of exactly `lengths[i]` ids each, the kinds in turn, each unlike the others."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for kind, length in enumerate(lengths):
        text = f"{rng.randrange(10**6)} " + text_of_kind(kind, 6 * length + 40)
        ids = list(encode(text))
        assert len(ids) >= length
        prompts.append([int(i) for i in ids[:length]])
    return prompts


def lengths(count: int, longest: int, block_sizes: Sequence[int] = (16, 32)) -> list[int]:
    """`count` lengths from 1 to `longest`, exact multiples of the block sizes and their
    neighbours among them. Short ones are more frequent, as they are in traffic: what can
    go wrong depends on borders, not on the number of tokens."""
    edges = [1, 2, *(b + d for b in block_sizes for d in (-1, 0, 1)), 5 * block_sizes[0], longest]
    edges = sorted({n for n in edges if n <= longest})
    rng = random.Random(1)
    rest = [max(1, round(longest * rng.random() ** 3)) for _ in range(max(0, count - len(edges)))]
    return (edges + rest)[:count]
