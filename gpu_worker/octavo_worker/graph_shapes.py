"""Which steps are captured as CUDA graphs: the sizes that their tensors are padded to.

Must not know: graphs, tensors. Entry points: `batch_sizes` of steps that only decode;
`mixed_shapes` of steps that also compute prompts, `max_graph_tokens` up to how many tokens.
"""

from typing import NamedTuple, Protocol

_TOKEN_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_FEWEST_ROWS = 32
MOST_CHUNKS = 32
# Launched kernel by kernel, a layer takes the host about half a millisecond, in which a Hopper
# card multiplies so many weights with one token each: at 600 TFLOP/s, 0.5e-3 * 600e12 / 2. From
# there on the card is the slower of the two: a graph would only pad.
_PRODUCTS_A_LAUNCH = 150_000_000_000


class StepShape(NamedTuple):
    """What a step's tensors are made for."""

    num_tokens: int  # of chunks
    num_chunks: int
    num_rows: int  # that decode


class LayerShape(Protocol):
    """What a layer's products depend on; `models.ModelConfig` has it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Decode rows, ascending: dense where a step is short and padding costs most."""
    steps = ((16, 4), (64, 8), (128, 16), (512, 32), (max_num_seqs, 64))
    sizes = [1, 2]
    for end, step in steps:
        while sizes[-1] < end:
            sizes.append((sizes[-1] // step + 1) * step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_shapes(max_tokens: int, max_num_seqs: int) -> list[StepShape]:
    """Steps of up to `max_tokens` prompt tokens, ascending: in tokens, then in rows."""
    rows = [_FEWEST_ROWS]
    while rows[-1] < max_num_seqs:
        rows.append(2 * rows[-1])
    rows[-1] = max_num_seqs
    return [
        StepShape(tokens, min(tokens // 16, MOST_CHUNKS), num_rows)
        for tokens in _TOKEN_SIZES
        if tokens <= max_tokens
        for num_rows in rows
    ]


def max_graph_tokens(shape: LayerShape) -> int:
    """The prompt tokens of a step up to which its launch takes longer than its computation."""
    products = 4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size
    return min(_PRODUCTS_A_LAUNCH // products, _TOKEN_SIZES[-1])
