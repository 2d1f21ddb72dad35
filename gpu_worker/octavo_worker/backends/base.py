"""What a backend can do: the operations that are kernels on a card and plain torch on a CPU.

Models and the runner call these and nothing device-specific. Must not know: plans, gRPC.

T tokens, S rows, H query heads, K kv heads, D head dim, N blocks, B block size, V vocabulary,
P positions, R rotated dims, I intermediate size, E experts. Caches are `[N, K, B, D]`, contiguous;
block 0 is the null block.
"""

from typing import Protocol

import torch

from octavo_worker.attention_inputs import AttentionOptions, KvScales, StepInputs
from octavo_worker.sampling import SamplingTensors


class Backend(Protocol):
    """Operations of one device kind. Outputs have the dtype of their first tensor argument."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension of x [..., X]; fp32 inside.

        x / rms(x) is rounded to the weight's dtype, x's or float32, before they meet.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), both [T, X]."""
        ...

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_scales: KvScales | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, H, D] and k [T, K, D] by halves, write k and v [T, K, D] to their slots.

        `cos_sin` is fp32 [P, 2, R / 2] (cos, then sin); the first R of the D dims rotate.
        Tokens of slot -1 are not stored. With `kv_scales` caches are e4m3 and hold the values
        divided by them, 448 at most, 0 for NaN. Returns the rotated (q, k).
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up [T, I] of gate_up [T, 2 I] (gate first)."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * up, GELU approximated by tanh; shapes as `silu_mul`'s."""
        ...

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        top_k: int,
        renormalise: bool,
    ) -> torch.Tensor:
        """[T, X]: for each token of x [T, X] the weighted sum of its `top_k` best experts.

        An expert is down(silu(gate(x)) * up(x)) with its part of gate_up [E, 2 I, X] (gate
        first) and down [E, X, I]; its weight is its part of softmax(router_logits [T, E]) in
        fp32, divided by the chosen ones' sum if `renormalise`. Tokens of slot -1 are dead: they
        choose none, and get zeros.
        """
        ...

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
        own_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Causal attention of the chunks' queries over their paged context.

        q is [num_prefill_tokens, H, D]; so is the result, zeros for tokens behind the last
        chunk. Chunks may be empty. Their own keys and values are already stored; `own_kv` are
        the same, [num_prefill_tokens, K, D] each, if the caller has them. Keys that no query
        sees (`options.window`) are never read.
        """
        ...

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attention of one query a row, q [S, H, D], over its context; zeros for dead rows."""
        ...

    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        """One token id a row, int64 [S], of logits fp32 [S, V] by the rule of octavo.philox."""
        ...
