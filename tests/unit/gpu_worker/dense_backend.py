"""An oracle backend in plain loops, and a driver that runs a model over paged caches.

`DenseBackend` shares no code with the real backends: it copies each sequence's keys and values
out of the paged cache, slot by slot as the layout says, and attends to them densely.
`PagedRun` plays the part of the runner: caches full of NaN, blocks handed out in random order,
any mixture of chunks, decode rows and dead rows in a step.

T tokens, H query heads, K kv heads, D head dim, N blocks, B block size, V vocabulary.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from octavo_worker.attention_inputs import AttentionOptions, KvScales, Readout, StepInputs
from octavo_worker.backends import Backend
from octavo_worker.models import Model
from octavo_worker.sampling import SamplingTensors


class DenseBackend:
    """See `octavo_worker.backends.base.Backend` for the shapes."""

    name = "cpu"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        mean_square = (wide * wide).mean(-1, keepdim=True)
        return (wide / torch.sqrt(mean_square + eps) * weight.double()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self.rms_norm(x + residual, weight, eps), x + residual

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert kv_scales is None
        half, block_size = cos_sin.shape[2], k_cache.shape[2]

        def rotate(x: Tensor, position: int) -> Tensor:
            cos, sin = cos_sin[position]
            first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
            turned = (first * cos - second * sin, second * cos + first * sin, rest)
            return torch.cat(turned, dim=-1)

        q = torch.stack([rotate(x, p) for x, p in zip(q, positions.tolist(), strict=True)])
        k = torch.stack([rotate(x, p) for x, p in zip(k, positions.tolist(), strict=True)])
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                k_cache[slot // block_size, :, slot % block_size] = k[token]
                v_cache[slot // block_size, :, slot % block_size] = v[token]
        return q, k

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        inner = gate_up.shape[-1] // 2
        gate, up = gate_up[:, :inner], gate_up[:, inner:]
        return gate / (1 + torch.exp(-gate)) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        inner = gate_up.shape[-1] // 2
        gate, up = gate_up[:, :inner], gate_up[:, inner:]
        inside = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inside)) * up

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        slot_mapping: Tensor,
        *,
        top_k: int,
        renormalise: bool,
    ) -> Tensor:
        out = torch.zeros_like(x)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            exponentials = torch.exp(router_logits[token].double())
            probabilities = (exponentials / exponentials.sum()).tolist()
            ranked = sorted(range(len(probabilities)), key=lambda e: -probabilities[e])[:top_k]
            total = sum(probabilities[e] for e in ranked) if renormalise else 1.0
            for e in ranked:
                inner = self.silu_mul((gate_up[e] @ x[token])[None])[0]
                out[token] += probabilities[e] / total * (down[e] @ inner)
        return out

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
        own_kv: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        del own_kv
        assert q.shape[0] == inputs.num_prefill_tokens
        out = torch.empty_like(q)
        starts = inputs.cu_seqlens_q.tolist()
        contexts = inputs.prefill_context_lens.tolist()
        for chunk, context in enumerate(contexts):
            start, stop = starts[chunk], starts[chunk + 1]
            table = inputs.prefill_block_table[chunk].tolist()
            for token in range(start, stop):
                seen = context - (stop - 1 - token)
                out[token] = _attend(q[token], k_cache, v_cache, table, seen, options)
        return out

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
    ) -> Tensor:
        out = torch.zeros_like(q)
        for row, context in enumerate(inputs.decode_context_lens.tolist()):
            table = inputs.decode_block_table[row].tolist()
            if context:
                out[row] = _attend(q[row], k_cache, v_cache, table, context, options)
        return out

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        assert params.all_greedy
        return logits.argmax(dim=-1)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: list[int],
    num_keys: int,
    options: AttentionOptions,
) -> Tensor:
    """[H, D] of one query over its first `num_keys` keys, or the last ones of these."""
    block_size = k_cache.shape[2]
    num_blocks = -(-num_keys // block_size)
    k = torch.cat([k_cache[block] for block in table[:num_blocks]], dim=1)[:, :num_keys]
    v = torch.cat([v_cache[block] for block in table[:num_blocks]], dim=1)[:, :num_keys]
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if options.window is not None:
        k, v = k[:, -options.window :], v[:, -options.window :]
    scores = torch.einsum("hd,hld->hl", q, k) * options.scale
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    return torch.einsum("hl,hld->hd", scores.softmax(-1), v)


@dataclass
class PagedSequence:
    """One sequence: its ids, how many are computed, its blocks, its logits by position."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)


class PagedRun:
    """Runs `model` with paged caches of `num_blocks` blocks; only written slots aren't NaN."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        checks_readout: bool = False,
    ) -> None:
        """`checks_readout`: steps with chunks also run with only what they end on read."""
        config, self.device = model.config, model.device
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.model, self.backend, self.block_size = model, backend, block_size
        self._checks_readout = checks_readout
        self.kv_caches = [
            (self._nan(shape, config.dtype), self._nan(shape, config.dtype))
            for _ in range(config.num_layers)
        ]
        self._max_blocks = -(-config.max_model_len // block_size)
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)

    def _nan(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def add(self, token_ids: Sequence[int]) -> PagedSequence:
        return PagedSequence(list(token_ids))

    def step(
        self,
        chunks: Sequence[tuple[PagedSequence, int]] = (),
        rows: Sequence[PagedSequence | None] = (),
    ) -> None:
        """Compute the next n tokens of each chunk, one token of each row (None = a dead row).

        The logits of every computed token land in its sequence.
        """
        work = [*chunks, *((sequence, 1) for sequence in rows)]
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in work:
            if sequence is None:
                ids.append(0)
                positions.append(0)
                slots.append(-1)
                continue
            stop = sequence.num_computed + count
            assert stop <= len(sequence.token_ids)
            while len(sequence.block_ids) * self.block_size < stop:
                sequence.block_ids.append(self._free.pop())
            for position in range(sequence.num_computed, stop):
                ids.append(sequence.token_ids[position])
                positions.append(position)
                block = sequence.block_ids[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            sequence.num_computed = stop
        lens = [count for _, count in chunks]
        contexts = [sequence.num_computed for sequence, _ in chunks]
        row_lens = [0 if sequence is None else sequence.num_computed for sequence in rows]
        inputs = StepInputs(
            input_ids=self._tensor(ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            num_prefill_tokens=sum(lens),
            cu_seqlens_q=self._tensor([0, *lens]).cumsum(0).int(),
            prefill_context_lens=self._tensor(contexts, torch.int32),
            prefill_block_table=self._table([sequence for sequence, _ in chunks]),
            max_seqlen_q=max(lens, default=0),
            max_context_prefill=max(contexts, default=0),
            decode_context_lens=self._tensor(row_lens, torch.int32),
            decode_block_table=self._table(rows),
            max_context_decode=max(row_lens, default=0),
        )
        hidden = self.model.forward(inputs, self.kv_caches, self.backend)
        assert hidden.shape == (len(ids), self.model.config.hidden_size)
        if chunks and self._checks_readout:
            self._check_readout(inputs, hidden, [sequence for sequence, _ in chunks], rows)
        logits = iter(self.model.logits(hidden))
        for sequence, count in work:
            for index in range(count):
                row = next(logits)
                if sequence is not None:
                    sequence.logits[sequence.num_computed - count + index] = row

    def _check_readout(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        chunks: Sequence[PagedSequence],
        rows: Sequence[PagedSequence | None],
    ) -> None:
        """The same step with only its last tokens and rows read gives their states alone, and
        stores what it stored before."""
        tokens = torch.cat(
            [
                inputs.cu_seqlens_q[1:] - 1,
                inputs.num_prefill_tokens + self._tensor(range(len(rows))),
            ]
        ).long()
        context_lens = torch.cat([inputs.prefill_context_lens, inputs.decode_context_lens])
        longest = max(inputs.max_context_prefill, inputs.max_context_decode)
        read = StepInputs.of_rows(
            inputs.input_ids[:0],
            inputs.positions[:0],
            inputs.slot_mapping[tokens],
            context_lens,
            self._table([*chunks, *rows]),
            longest,
        )
        inputs = replace(inputs, readout=Readout(tokens, read))
        stored = [(k.clone(), v.clone()) for k, v in self.kv_caches]
        blocks, offsets = (
            inputs.slot_mapping // self.block_size,
            inputs.slot_mapping % self.block_size,
        )
        is_stored = inputs.slot_mapping >= 0
        for cache in (cache for pair in self.kv_caches for cache in pair):
            cache[blocks[is_stored], :, offsets[is_stored]] = torch.nan
        states = self.model.forward(inputs, self.kv_caches, self.backend)
        for pair, expected in zip(self.kv_caches, stored, strict=True):
            # Block 0 takes what has no slot.
            for cache, values in zip(pair, expected, strict=True):
                torch.testing.assert_close(cache[1:], values[1:], rtol=0, atol=0, equal_nan=True)
        tolerance = 1e-4 if states.dtype == torch.float32 else 0.1
        torch.testing.assert_close(
            states, hidden[tokens], rtol=tolerance, atol=tolerance, equal_nan=True
        )

    def _table(self, sequences: Sequence[PagedSequence | None]) -> Tensor:
        table = torch.zeros(len(sequences), self._max_blocks, dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                table[row, : len(sequence.block_ids)] = torch.tensor(sequence.block_ids)
        return table.to(self.device)


def greedy(run: PagedRun, sequences: Sequence[PagedSequence], num_tokens: int) -> None:
    """Decode: append the argmax of the last logits, compute it; `num_tokens` times."""
    for _ in range(num_tokens):
        for sequence in sequences:
            last = sequence.logits[len(sequence.token_ids) - 1]
            sequence.token_ids.append(int(last.argmax()))
        run.step(rows=[*sequences[:1], None, *sequences[1:]])
