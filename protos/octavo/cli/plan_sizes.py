"""What fits on a card and how fast it could be: arithmetic over a model's sizes. No I/O.

Memory of one card: what the share of it that may be used leaves after weights, the CUDA context
and a step's scratch is the KV cache's, as the worker sizes it; 16-bit copies of 4-bit layers take
their part of that where the worker would keep them, and are what steps of many rows read. With N
cards each holds 1/N of the weights, and the KV heads are dealt out, or repeated where there are
fewer. Limits: a step reads its weights once and each row's KV, and multiplies every row with the
weights:

    step = max(weight bytes / BW, 2 params rows / F) + rows context KV bytes / BW

over N cards all three divide by N; attention's arithmetic and the exchange between cards are left
out, so that nothing can be faster. Entry point: `make_plan`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.cli.gpus import Gpu
from octavo.errors import ConfigurationError

# What the driver, kernels and captured steps take beside tensors.
CONTEXT_BYTES = 640 << 20
_TENSOR_PARALLEL = (1, 2, 4, 8)
_BATCHED_TOKENS = (8192, 4096, 2048, 1024, 512)
_MOST_SEQS = 1024
# A step's scratch may take this share of the card.
_SCRATCH_SHARE = 0.1

# (copies' bytes, the room for them and KV blocks, what KV blocks can use of it at most): whether a
# worker keeps copies by default; `octavo_worker.footprint.keeps_copies` is its rule.
KeepsCopies = Callable[[int, int, int], bool]


class Sizes(Protocol):
    """A model's sizes; `octavo_worker.footprint.Footprint` has them."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def copies_bytes(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def read_bytes_of_one(self) -> int: ...
    @property
    def read_bytes_with_copies(self) -> int: ...
    @property
    def most_rows_of_codes(self) -> int: ...
    @property
    def params_per_token(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def scratch_bytes(self, max_num_seqs: int, max_num_batched_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for; 0 = suggest one. `context_tokens`: of a typical sequence;
    `dequantized_copies`: as the worker's setting."""

    tensor_parallel: int = 0
    max_num_seqs: int = 0
    context_tokens: int = 2048
    memory_utilization: float = 0.9
    block_size: int = 16
    dequantized_copies: str = "auto"


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens a second that the hardware allows; None = its speed isn't known."""

    one_sequence: float
    all_sequences: float
    prefill: float


@dataclass(frozen=True, slots=True)
class CardPlan:
    """Bytes are of one card; sequences and limits of all `tensor_parallel` cards together."""

    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    usable_bytes: int
    weight_bytes: int
    copies_bytes: int
    scratch_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    num_kv_blocks: int
    num_kv_tokens: int
    sequences_at_max_len: float
    sequences_at_context: float
    limits: Limits | None


def make_plan(sizes: Sizes, gpu: Gpu, wish: Wish, keeps_copies: KeepsCopies) -> CardPlan:
    """The least number of cards on which the model fits with room for a long sequence, and what
    fits there. Raises ConfigurationError if it fits on none."""
    context = min(wish.context_tokens, sizes.max_model_len)
    enough = min(sizes.max_model_len, max(8192, context))
    candidates = (wish.tensor_parallel,) if wish.tensor_parallel else _TENSOR_PARALLEL
    best: CardPlan | None = None
    tried: CardPlan | None = None
    for num_cards in candidates:
        if sizes.num_heads % num_cards:
            continue
        plan = tried = _plan(sizes, gpu, wish, keeps_copies, num_cards, context)
        if plan.num_kv_tokens >= wish.block_size:
            best = plan
        if plan.num_kv_tokens >= enough:
            break
    if tried is None:
        raise ConfigurationError(
            f"--tensor-parallel {wish.tensor_parallel}: the model's {sizes.num_heads} heads can't "
            "be shared out evenly",
            param="tensor_parallel",
        )
    if best is None:
        copies = f"{_gb(tried.copies_bytes)} for copies, " if tried.copies_bytes else ""
        raise ConfigurationError(
            f"doesn't fit on {tried.tensor_parallel} x {gpu.name}: of {_gb(tried.usable_bytes)} "
            f"that may be used, each needs {_gb(tried.weight_bytes)} for weights, {copies}"
            f"{_gb(tried.scratch_bytes)} for a step's scratch and {_gb(CONTEXT_BYTES)} for CUDA; "
            "take larger cards or a quantised model",
            param="gpu",
        )
    return best


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _plan(
    sizes: Sizes,
    gpu: Gpu,
    wish: Wish,
    keeps_copies: KeepsCopies,
    num_cards: int,
    context: int,
) -> CardPlan:
    usable = int(gpu.memory_bytes * wish.memory_utilization)
    weight_bytes = -(-sizes.weight_bytes // num_cards)
    per_token = sizes.kv_bytes_per_token // sizes.num_kv_heads
    per_token *= -(-sizes.num_kv_heads // num_cards)
    per_block = per_token * wish.block_size

    def most_blocks(seqs: int) -> int:
        return seqs * -(-sizes.max_model_len // wish.block_size) + 1

    def room(seqs: int, batched_tokens: int, copies_bytes: int) -> int:
        scratch = sizes.scratch_bytes(seqs, batched_tokens)
        return max(usable - weight_bytes - CONTEXT_BYTES - scratch - copies_bytes, 0)

    seqs = wish.max_num_seqs or 256
    batched_tokens = next(
        (
            tokens
            for tokens in _BATCHED_TOKENS
            if sizes.scratch_bytes(seqs, tokens) <= usable * _SCRATCH_SHARE
        ),
        _BATCHED_TOKENS[-1],
    )
    each_bytes = -(-sizes.copies_bytes // num_cards)
    most_kv_bytes = most_blocks(seqs) * per_block
    has_copies = wish.dequantized_copies == "always" or (
        wish.dequantized_copies == "auto"
        and keeps_copies(each_bytes, room(seqs, batched_tokens, 0), most_kv_bytes)
    )
    copies_bytes = each_bytes if has_copies else 0
    if not wish.max_num_seqs:
        seqs = _suggest_seqs(room(seqs, batched_tokens, copies_bytes) // per_token, context)
    num_blocks = min(room(seqs, batched_tokens, copies_bytes) // per_block, most_blocks(seqs))
    num_tokens = max(num_blocks - 1, 0) * wish.block_size  # one is the null block
    return CardPlan(
        tensor_parallel=num_cards,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched_tokens,
        max_model_len=min(sizes.max_model_len, num_tokens),
        usable_bytes=usable,
        weight_bytes=weight_bytes,
        copies_bytes=copies_bytes,
        scratch_bytes=sizes.scratch_bytes(seqs, batched_tokens),
        kv_cache_bytes=num_blocks * per_block,
        kv_bytes_per_token=per_token,
        num_kv_blocks=num_blocks,
        num_kv_tokens=num_tokens,
        sequences_at_max_len=num_tokens / sizes.max_model_len,
        sequences_at_context=num_tokens / context,
        limits=_limits(sizes, gpu, num_cards, seqs, num_tokens, context, has_copies),
    )


def _suggest_seqs(num_tokens: int, context: int) -> int:
    """As many typical sequences as fit, a multiple of 8 where there are many."""
    fit = min(num_tokens // context, _MOST_SEQS)
    return max(fit - fit % 8 if fit >= 16 else fit, 1)


def _limits(
    sizes: Sizes,
    gpu: Gpu,
    num_cards: int,
    max_num_seqs: int,
    num_tokens: int,
    context: int,
    has_copies: bool,
) -> Limits | None:
    if not gpu.read_bytes_per_s or not gpu.flops:
        return None
    bandwidth, flops = gpu.read_bytes_per_s * num_cards, gpu.flops * num_cards
    kv_s = context * sizes.kv_bytes_per_token / bandwidth
    flops_s = 2 * sizes.params_per_token / flops

    def tokens_per_s(rows: int) -> float:
        read_s = _read_bytes(sizes, rows, has_copies) / bandwidth
        return rows / (max(read_s, rows * flops_s) + rows * kv_s)

    rows = max(min(max_num_seqs, num_tokens // context), 1)
    return Limits(
        one_sequence=tokens_per_s(1), all_sequences=tokens_per_s(rows), prefill=1 / flops_s
    )


def _read_bytes(sizes: Sizes, rows: int, has_copies: bool) -> int:
    if rows == 1:
        return sizes.read_bytes_of_one
    if has_copies and rows > sizes.most_rows_of_codes:
        return sizes.read_bytes_with_copies
    return sizes.read_bytes
