"""Layers of which every rank holds a part, and a vocabulary in parts.

A wrapped maker cuts a rank's part out of each layer: of what is stored, the rest is never read.
Layers cut by outputs need no exchange. Those cut by inputs give partial sums, added up over the
ranks. Must not know: files, processes. Entry point: `make_share`.

T tokens, E entries, V vocabulary, Hid hidden size, N ranks.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_worker.attention_inputs import StepInputs
from octavo_worker.backends.base import Backend
from octavo_worker.models.config import ModelConfig
from octavo_worker.models.decoder import Model
from octavo_worker.models.linear import CuttingMaker, Linear, Split
from octavo_worker.models.moe import Experts
from octavo_worker.models.moe_config import MoeConfig
from octavo_worker.parallel.shares import Share
from octavo_worker.slots import Slot


class Exchange(Protocol):
    """What ranks do together; every rank calls the same in the same order."""

    @property
    def share(self) -> Share: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks of `x`, which is overwritten; the same bits on each."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, ...]: every rank's `x`, in the ranks' order."""
        ...


def make_share(
    config: ModelConfig,
    device: torch.device,
    exchange: Exchange,
    *,
    tied: bool,
    make: CuttingMaker,
) -> Model:
    """One rank's part of the model of `config`, whose layers `make` makes; uninitialised.

    Raises ConfigurationError naming the field of config.json that can't be shared out.
    """
    own_config = exchange.share.of_config(config)
    sharded = ShardedMaker(make, exchange, config.head_dim)
    vocab = ShardedVocab(exchange, config.vocab_size)
    empty = partial(torch.empty, dtype=config.dtype, device=device)
    return Model(
        config,
        device,
        tied=tied,
        make=sharded,
        own_config=own_config,
        vocab=vocab,
        make_experts=partial(PartialExperts, exchange=exchange, empty=empty),
    )


class ShardedMaker:
    """Makes a rank's part of a model's linear layers."""

    def __init__(self, make: CuttingMaker, exchange: Exchange, head_dim: int) -> None:
        self._make = make
        self._exchange = exchange
        self._head_dim = head_dim

    def __call__(
        self, module: str, parts: Mapping[str, int], in_size: int, *, bias: bool, split: Split
    ) -> Linear:
        """See `LinearMaker`; `parts` and `in_size` are the whole layer's."""
        if split is Split.NONE:
            return self._make(module, parts, in_size, bias=bias, split=split)
        share = self._exchange.share
        if split is Split.ROWS:
            outputs = {name: range(size) for name, size in parts.items()}
            inputs = share.of_values(in_size)
        else:
            outputs = {name: self._outputs(size, split) for name, size in parts.items()}
            inputs = range(in_size)
        layer = self._make.cut(module, parts, in_size, bias=bias, outputs=outputs, inputs=inputs)
        return PartialSums(layer, self._exchange) if split is Split.ROWS else layer

    def _outputs(self, size: int, split: Split) -> range:
        if split is Split.HEADS:
            heads = self._exchange.share.of_heads(size // self._head_dim)
            return range(heads.start * self._head_dim, heads.stop * self._head_dim)
        return self._exchange.share.of_values(size)


class PartialSums:
    """A layer over a rank's inputs: its sums are partial, until all ranks have added theirs."""

    def __init__(self, wrapped: Linear, exchange: Exchange) -> None:
        self.wrapped = wrapped
        self._exchange = exchange

    def __call__(self, x: Tensor) -> Tensor:
        return self._exchange.all_reduce(self.wrapped(x))

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for name, slot in self.wrapped.slots():
            # A bias belongs into the sum once.
            if name.endswith(".bias") and self._exchange.share.rank > 0 and slot.target.numel():
                slot = dataclasses.replace(slot, take=torch.zeros_like, fill=_no_values)
            yield name, slot

    def finish(self) -> None:
        self.wrapped.finish()

    def num_bytes(self) -> int:
        return self.wrapped.num_bytes()


def _no_values(target: Tensor, _generator: torch.Generator, _std: float) -> None:
    target.zero_()


class PartialExperts(Experts):
    """A part of every expert's width: sums are partial, until all ranks have added theirs.

    The router is whole on each rank, and sees the same bits: all choose the same experts.
    """

    def __init__(
        self,
        moe: MoeConfig,
        hidden_size: int,
        module: str,
        *,
        exchange: Exchange,
        empty: Callable[..., Tensor],
    ) -> None:
        part = exchange.share.of_values(moe.expert_size)
        super().__init__(moe, hidden_size, module, empty, part)
        self._exchange = exchange

    def __call__(
        self, hidden: Tensor, scores: Tensor, inputs: StepInputs, backend: Backend
    ) -> Tensor:
        return self._exchange.all_reduce(super().__call__(hidden, scores, inputs, backend))


class ShardedVocab:
    """Embedding and head of which a rank holds some tokens' rows, padded to equal numbers."""

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        share = exchange.share
        self._exchange = exchange
        self._vocab_size = vocab_size
        self._ids = share.of_vocabulary(vocab_size)
        self.num_rows = share.vocab_rows(vocab_size)

    def slot(self, rows: Tensor) -> Slot:
        """The place [rows, Hid] of a stored [V, Hid]; rows of no token are 0."""

        def take(stored: Tensor) -> Tensor:
            part = stored[self._ids.start : self._ids.stop]
            return F.pad(part, (0, 0, 0, self.num_rows - len(self._ids)))

        return Slot(rows, shape=(self._vocab_size, rows.shape[1]), take=take)

    def embed(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """[T, Hid] of ids [T]: the rank that holds a token adds its row to the others' zeros."""
        own = input_ids - self._ids.start
        is_own = (own >= 0) & (own < len(self._ids))
        hidden = F.embedding(torch.where(is_own, own, 0), rows)
        return self._exchange.all_reduce(hidden.masked_fill_(~is_own[:, None], 0))

    def join(self, logits: Tensor) -> Tensor:
        """[E, V] of every rank's [E, rows], the same bits on each, so that all draw the same."""
        parts = self._exchange.all_gather(logits).transpose(0, 1)
        return parts.flatten(1)[:, : self._vocab_size].contiguous()
