"""Whether 4-bit layers get 16-bit copies beside their codes, which steps of many rows read.

A step of many rows is bound by arithmetic: there codes save nothing and cost what unpacking them
takes. Copies cost memory that KV blocks would have, so both are weighed here, after loading and
before the cache is sized. Must not know: how a layer computes. Entry points: `keep_copies`;
`are_affordable`, the rule.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from octavo.errors import ConfigurationError
from octavo.settings import WorkerSettings
from octavo_worker.kv_cache import (
    KVShape,
    card_room,
    kv_bytes_per_token,
    kv_dtype_of,
    most_blocks,
    parse_bytes,
)
from octavo_worker.models import Model
from octavo_worker.models.quant_linear import MOST_ROWS_OF_CODES

_logger = logging.getLogger(__name__)
_LARGEST_SHARE = 6  # one of so many parts
_FEWEST_BLOCKS = 2  # with the null block


class KVWish(NamedTuple):
    """Bytes that KV blocks can use at most, and must have.

    `is_set`: the settings say how many; then both are the same.
    """

    most: int
    least: int
    is_set: bool = False


def are_affordable(copies_bytes: int, room_bytes: int, kv: KVWish) -> bool:
    """Whether KV blocks lose at most a sixth of what they'd have of the room, and not what they
    must have. Room that they have no use for may be taken."""
    left = room_bytes - copies_bytes
    without, beside = min(room_bytes, kv.most), min(left, kv.most)
    return left >= kv.least and _LARGEST_SHARE * (without - beside) <= without


def bytes_of_copies(num_weights: int, dtype: torch.dtype) -> int:
    """0 where there can be none: 4-bit codes hold no more than 16 bits do."""
    return num_weights * dtype.itemsize if dtype.itemsize == 2 else 0


def keep_copies(
    model: Model,
    settings: WorkerSettings,
    device: torch.device,
    max_num_batched_tokens: int,
    agree: Callable[[int], int] | None = None,
) -> None:
    """Make the copies of a loaded model if `settings` and the card's memory say so.

    `agree` gives the least of all ranks' numbers, where several share the model: all have copies
    of the same size, and so decide alike. Raises ConfigurationError if copies that must be can't.
    """
    layers = [layer for layer in model.quantized if layer.is_packed]
    num_weights = sum(layer.num_quantized for layer in layers)
    config = model.config
    if not layers or not _are_kept(
        num_weights, config, settings, device, max_num_batched_tokens, agree
    ):
        return
    for layer in layers:
        layer.keep_matrices(config.dtype)
    # What was between counts as used until the card has it back.
    torch.cuda.empty_cache()


def _are_kept(
    num_weights: int,
    shape: KVShape,
    settings: WorkerSettings,
    device: torch.device,
    max_num_batched_tokens: int,
    agree: Callable[[int], int] | None,
) -> bool:
    """And says so in the log, with the sizes."""
    if settings.dequantized_copies == "never":
        _logger.info("4-bit layers: no 16-bit copies, as set")
        return False
    is_must = settings.dequantized_copies == "always"
    num_bytes = bytes_of_copies(num_weights, shape.dtype)
    if not num_bytes:
        why = f"copies have 16 bits, but {shape.dtype} is computed in"
        if is_must:
            raise _refusal(why)
        _logger.info("4-bit layers: no 16-bit copies: %s", why)
        return False
    kv = _kv_wish(shape, settings)
    card = card_room(shape, settings, device, max_num_batched_tokens)
    room = card.left
    if is_must and kv.is_set:
        # Whoever sets the cache's size has the rest of the card to give.
        room = max(card.total - card.used - card.scratch, 0)
    room = room if agree is None else agree(room)
    if is_must and num_bytes + kv.least > room:
        raise _refusal(
            f"copies take {_gb(num_bytes)} and the KV cache at least {_gb(kv.least)}, but the "
            f"weights leave {_gb(room)}"
        )
    is_kept = is_must or are_affordable(num_bytes, room, kv)
    _logger.info(
        "4-bit layers: 16-bit copies for steps of more than %d rows take %s; weights leave %s, "
        "of which KV blocks can use %s: %s",
        MOST_ROWS_OF_CODES,
        _gb(num_bytes),
        _gb(room),
        _gb(min(room, kv.most)),
        _verdict(is_kept, is_must, kv),
    )
    return is_kept


def _verdict(is_kept: bool, is_must: bool, kv: KVWish) -> str:
    if is_kept:
        return "kept, as set" if is_must else "kept"
    if kv.is_set:
        return "not kept, there's no room beside a cache of the size that is set"
    return f"not kept, blocks would lose more than 1/{_LARGEST_SHARE}"


def _kv_wish(shape: KVShape, settings: WorkerSettings) -> KVWish:
    per_block = kv_bytes_per_token(shape, kv_dtype_of(shape, settings)) * settings.block_size
    most = most_blocks(shape, settings) * per_block
    if settings.num_kv_blocks:
        wanted = settings.num_kv_blocks * per_block
    elif settings.kv_cache_memory:
        wanted = min(parse_bytes(settings.kv_cache_memory, "kv_cache_memory"), most)
    else:
        return KVWish(most, _FEWEST_BLOCKS * per_block)
    return KVWish(wanted, wanted, is_set=True)


def _refusal(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"OCTAVO_DEQUANTIZED_COPIES=always: {why}", param="dequantized_copies"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
