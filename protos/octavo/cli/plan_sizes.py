"""What fits on a card and how fast it could be: arithmetic over a model's sizes. No I/O.

Memory of one card: what the share of it that may be used leaves after weights, the CUDA context
and a step's scratch is the KV cache's, as the worker sizes it; 16-bit copies of 4-bit layers take
their part of that where the worker would keep them. With N cards each holds 1/N of the
weights, and the KV heads are dealt out, or repeated where there are fewer. Limits: a step reads
its weights once and each row's KV, and multiplies every row with the weights:

    step = max(weight bytes / BW, 2 params rows / F) + rows context KV bytes / BW

over N cards all three divide by N; attention's arithmetic and the exchange between cards are left
out, so that nothing can be faster. Entry point: `make_plan`.
"""

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

    def keeps_copies(self, copies_bytes: int, room_bytes: int, most_kv_bytes: int) -> bool: ...


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


def make_plan(sizes: Sizes, gpu: Gpu, wish: Wish) -> CardPlan:
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
        plan = tried = _plan(sizes, gpu, wish, num_cards, context)
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


def _plan(sizes: Sizes, gpu: Gpu, wish: Wish, num_cards: int, context: int) -> CardPlan:
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
    copies_bytes = _copies(
        sizes, wish, num_cards, room(seqs, batched_tokens, 0), most_blocks(seqs) * per_block
    )
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
        limits=_limits(sizes, gpu, num_cards, seqs, num_tokens, context),
    )


def _copies(sizes: Sizes, wish: Wish, num_cards: int, room: int, most_kv_bytes: int) -> int:
    """Bytes of the copies that each card keeps."""
    copies_bytes = -(-sizes.copies_bytes // num_cards)
    match wish.dequantized_copies:
        case "always":
            return copies_bytes
        case "auto":
            is_kept = sizes.keeps_copies(copies_bytes, room, most_kv_bytes)
            return copies_bytes if is_kept else 0
        case _:
            return 0


def _suggest_seqs(num_tokens: int, context: int) -> int:
    """As many typical sequences as fit, a multiple of 8 where there are many."""
    fit = min(num_tokens // context, _MOST_SEQS)
    return max(fit - fit % 8 if fit >= 16 else fit, 1)


def _limits(
    sizes: Sizes, gpu: Gpu, num_cards: int, max_num_seqs: int, num_tokens: int, context: int
) -> Limits | None:
    if not gpu.read_bytes_per_s or not gpu.flops:
        return None
    bandwidth, flops = gpu.read_bytes_per_s * num_cards, gpu.flops * num_cards
    kv_s = context * sizes.kv_bytes_per_token / bandwidth
    flops_s = 2 * sizes.params_per_token / flops

    def tokens_per_s(rows: int, read_bytes: int) -> float:
        return rows / (max(read_bytes / bandwidth, rows * flops_s) + rows * kv_s)

    rows = max(min(max_num_seqs, num_tokens // context), 1)
    return Limits(
        one_sequence=tokens_per_s(1, sizes.read_bytes_of_one),
        all_sequences=tokens_per_s(rows, sizes.read_bytes if rows > 1 else sizes.read_bytes_of_one),
        prefill=1 / flops_s,
    )
