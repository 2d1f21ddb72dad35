"""Layers of which every rank holds a part, and a vocabulary in parts.

A maker is wrapped: it makes a rank's layer at its own, smaller size, and the same layer at the
stored size on the meta device, which only lends its shapes. Where the two differ, the stored
tensor is narrowed (a view of the mapped file: the other ranks' values are never read). So any
maker can be cut whose stored tensors follow outputs and inputs in proportion.

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

from octavo.errors import ConfigurationError
from octavo_worker.models.config import ModelConfig
from octavo_worker.models.decoder import Model
from octavo_worker.models.linear import DenseMaker, Linear, LinearMaker, Split
from octavo_worker.parallel.shares import Share, Span
from octavo_worker.slots import Slot

MakeOn = Callable[[torch.device], LinearMaker]


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
    config: ModelConfig, device: torch.device, exchange: Exchange, *, tied: bool
) -> Model:
    """One rank's part of the model of `config`, uninitialised.

    Raises ConfigurationError naming the field of config.json that can't be shared out.
    """
    own_config = exchange.share.of_config(config)
    make = ShardedMaker(partial(DenseMaker, config.dtype), exchange, config, device)
    vocab = ShardedVocab(exchange, config.vocab_size)
    return Model(config, device, tied=tied, make=make, own_config=own_config, vocab=vocab)


class ShardedMaker:
    """Makes a rank's part of layers that `make_on(device)` makes."""

    def __init__(
        self, make_on: MakeOn, exchange: Exchange, config: ModelConfig, device: torch.device
    ) -> None:
        """`config`: the whole model's."""
        self._make = make_on(device)
        self._make_whole = make_on(torch.device("meta"))
        self._exchange = exchange
        self._head_dim = config.head_dim

    def __call__(
        self, module: str, parts: Mapping[str, int], in_size: int, *, bias: bool, split: Split
    ) -> Linear:
        """See `LinearMaker`; `parts` and `in_size` are the whole layer's."""
        if split is Split.NONE:
            return self._make(module, parts, in_size, bias=bias, split=split)
        spans = {name: self._span(size, split) for name, size in parts.items()}
        if split is Split.ROWS:
            own_parts, own_in = parts, _part_of(in_size, self._exchange.share.of_any)
        else:
            own_parts = {name: _part_of(size, spans[name]) for name, size in parts.items()}
            own_in = in_size
        layer = self._make(module, own_parts, own_in, bias=bias, split=split)
        whole = self._make_whole(module, parts, in_size, bias=bias, split=split)
        named = {f"{module}.{name}": span for name, span in spans.items()}
        if split is Split.ROWS:
            return RowsLinear(layer, whole, named, self._exchange)
        return ColumnsLinear(layer, whole, named)

    def _span(self, size: int, split: Split) -> Span:
        share = self._exchange.share
        if split is Split.HEADS:
            return share.of_heads(size // self._head_dim)
        return share.of_any


def _part_of(size: int, span: Span) -> int:
    assert size % span.total == 0, (size, span)
    return size // span.total * span.num


class ColumnsLinear:
    """A rank's outputs of a layer; `spans`: part -> which of its units."""

    def __init__(self, layer: Linear, whole: Linear, spans: Mapping[str, Span]) -> None:
        self._layer = layer
        self._whole = whole
        self._spans = spans

    def __call__(self, x: Tensor) -> Tensor:
        return self._layer(x)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        whole = dict(self._whole.slots())
        for name, slot in self._layer.slots():
            span = self._spans[name.rsplit(".", 1)[0]]
            yield name, _narrowed(name, slot, whole[name], span)

    def finish(self) -> None:
        self._layer.finish()

    def num_bytes(self) -> int:
        return self._layer.num_bytes()


class RowsLinear(ColumnsLinear):
    """A rank's inputs of a layer: its sums are partial, until all ranks have added theirs."""

    def __init__(
        self, layer: Linear, whole: Linear, spans: Mapping[str, Span], exchange: Exchange
    ) -> None:
        super().__init__(layer, whole, spans)
        self._exchange = exchange

    def __call__(self, x: Tensor) -> Tensor:
        return self._exchange.all_reduce(self._layer(x))

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots():
            # Once in the sum of all ranks.
            if name.endswith(".bias") and self._exchange.share.rank > 0:
                slot = dataclasses.replace(slot, take=_zeros, fill=_no_values)
            yield name, slot


def _zeros(stored: Tensor) -> Tensor:
    return torch.zeros_like(stored)


def _no_values(target: Tensor, _generator: torch.Generator, _std: float) -> None:
    target.zero_()


def _narrowed(name: str, slot: Slot, whole: Slot, span: Span) -> Slot:
    """`slot`, filled from the stored tensor of the whole layer's."""
    cuts: list[tuple[int, int, int]] = []
    for dim, (own, stored) in enumerate(zip(slot.shape, whole.shape, strict=True)):
        if own == stored:
            continue
        if own * span.total != stored * span.num:
            raise ConfigurationError(
                f"OCTAVO_TENSOR_PARALLEL: {name} {list(whole.shape)} can't be cut along dimension "
                f"{dim} into {span.total} parts",
                param="tensor_parallel",
            )
        cuts.append((dim, own // span.num * span.start, own))

    def take(stored: Tensor) -> Tensor:
        for dim, start, length in cuts:
            stored = stored.narrow(dim, start, length)
        return stored if slot.take is None else slot.take(stored)

    return dataclasses.replace(slot, shape=whole.shape, take=take if cuts else slot.take)


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
