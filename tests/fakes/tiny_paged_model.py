"""A tiny random decoder with paged attention, and the same function computed densely.

Rotary embedding, grouped heads, one norm a layer: enough for every operation of a backend to
matter. `dense_logits` shares the weights and nothing else with the paged path.
"""

import torch
import torch.nn.functional as F

from octavo_worker.attention_inputs import AttentionOptions, StepInputs
from octavo_worker.backends.base import Backend

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 6, 2, 8
HIDDEN = NUM_HEADS * HEAD_DIM
VOCAB_SIZE = 97
MAX_MODEL_LEN = 256
EPS = 1e-5


class TinyPagedModel:
    """See `octavo_worker.runner.Model`. `broken_ids`: tokens whose hidden state is NaN."""

    def __init__(self, seed: int = 0, broken_ids: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        self.embedding = torch.randn((VOCAB_SIZE, HIDDEN), generator=generator)
        for token_id in broken_ids:
            self.embedding[token_id] = torch.nan
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        self.qkv = [weight(width, HIDDEN) for _ in range(NUM_LAYERS)]
        self.out = [weight(HIDDEN, HIDDEN) for _ in range(NUM_LAYERS)]
        self.gate_up = [weight(2 * HIDDEN, HIDDEN) for _ in range(NUM_LAYERS)]
        self.norm = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
        self.head = weight(VOCAB_SIZE, HIDDEN) * 4
        angles = torch.arange(MAX_MODEL_LEN)[:, None] / 100 ** (
            torch.arange(HEAD_DIM // 2)[None] / (HEAD_DIM // 2)
        )
        self.cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
        self.num_forwards = 0

    def forward(
        self,
        inputs: StepInputs,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        backend: Backend,
    ) -> torch.Tensor:
        self.num_forwards += 1
        num_prefill = inputs.num_prefill_tokens
        hidden = self.embedding[inputs.input_ids]
        for layer, (k_cache, v_cache) in enumerate(kv_caches):
            x = backend.rms_norm(hidden, self.norm, EPS)
            q, k, v = self._split(x @ self.qkv[layer].T)
            q, k = backend.rope_and_cache(
                q, k, v, self.cos_sin, inputs.positions, inputs.slot_mapping, k_cache, v_cache
            )
            options = AttentionOptions(scale=HEAD_DIM**-0.5)
            parts = []
            if num_prefill:
                parts.append(
                    backend.prefill_attention(q[:num_prefill], k_cache, v_cache, inputs, options)
                )
            if num_prefill < len(hidden):
                parts.append(
                    backend.decode_attention(q[num_prefill:], k_cache, v_cache, inputs, options)
                )
            attended = torch.cat(parts).flatten(1) @ self.out[layer].T
            x, hidden = backend.add_rms_norm(attended, hidden, self.norm, EPS)
            hidden = hidden + backend.silu_mul(x @ self.gate_up[layer].T)
        if inputs.readout is not None:
            hidden = hidden[inputs.readout.tokens]
        return backend.rms_norm(hidden, self.norm, EPS)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T

    def dense_logits(self, token_ids: list[int]) -> torch.Tensor:
        """fp32 [T, V]: the logits after every prefix of `token_ids`."""
        hidden = self.embedding[torch.tensor(token_ids)]
        num_tokens = len(token_ids)
        for layer in range(NUM_LAYERS):
            x = F.rms_norm(hidden, (HIDDEN,), self.norm, EPS)
            q, k, v = self._split(x @ self.qkv[layer].T)
            q, k = self._rotate(q), self._rotate(k)
            group = NUM_HEADS // NUM_KV_HEADS
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
            causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
            weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
            attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.out[layer].T
            hidden = hidden + attended
            gate, up = (
                F.rms_norm(hidden, (HIDDEN,), self.norm, EPS) @ self.gate_up[layer].T
            ).chunk(2, dim=-1)
            hidden = hidden + F.silu(gate) * up
        return F.rms_norm(hidden, (HIDDEN,), self.norm, EPS) @ self.head.T

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` ids, one dense pass each."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(self.dense_logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.unflatten(-1, (-1, HEAD_DIM))
        sizes = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
        q, k, v = heads.split(sizes, dim=1)
        return q, k, v

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin[: len(x)].repeat(1, 1, 2).unbind(dim=1)
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def make_kv_caches(
    num_blocks: int, block_size: int, fill: float = float("nan")
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Poisoned caches: whatever is read without having been written shows."""
    shape = (num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM)
    return [(torch.full(shape, fill), torch.full(shape, fill)) for _ in range(NUM_LAYERS)]
