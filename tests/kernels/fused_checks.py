"""What a fused decode step must fulfil, on whatever device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo_worker.attention_inputs import StepInputs
from octavo_worker.backends import Backend
from octavo_worker.backends.fused_decode import FusedDecode
from octavo_worker.models import Model
from tests.unit.gpu_worker.dense_backend import PagedRun

KVCaches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LaterStep:
    """A decode step over prompts already computed: its inputs, the caches before and after it,
    and the logits [S, V] that the separate operations give."""

    model: Model
    inputs: StepInputs
    before: KVCaches
    after: KVCaches
    logits: Tensor

    @classmethod
    def of(cls, model: Model, backend: Backend, prompts: Sequence[list[int]]) -> Self:
        run = PagedRun(model, backend)
        rows = [run.add(prompt) for prompt in prompts]
        run.step(chunks=[(row, len(row.token_ids)) for row in rows])
        for row in rows:
            row.token_ids.append(int(row.logits[len(row.token_ids) - 1].argmax()))
        seen: list[StepInputs] = []
        forward = model.forward

        def watch(inputs: StepInputs, kv: KVCaches, backend: Backend) -> Tensor:
            seen.append(inputs)
            before.extend(_copied(kv))
            hidden = forward(inputs, kv, backend)
            after.extend(_copied(kv))
            logits.append(model.logits(hidden))
            return hidden

        before: KVCaches = []
        after: KVCaches = []
        logits: list[Tensor] = []
        model.forward = watch  # type: ignore[method-assign]
        try:
            run.step(rows=[rows[0], None, *rows[1:]])
        finally:
            del model.forward
        return cls(model, seen[0], before, after, logits[0])


def check_step(step: LaterStep, *, pdl: bool = False, tolerance: float = 1e-4) -> None:
    """The logits, and what the step wrote into the caches, NaN where there was NaN."""
    fused = FusedDecode.of(step.model, pdl=pdl)
    assert fused is not None
    caches = _copied(step.before)
    logits = fused.logits(fused.forward(step.inputs, caches))
    live = step.inputs.decode_context_lens > 0
    torch.testing.assert_close(
        logits[live].float(), step.logits[live].float(), rtol=tolerance, atol=tolerance
    )
    for written, expected in zip(caches, step.after, strict=True):
        for mine, theirs in zip(written, expected, strict=True):
            # The null block takes what a backend likes to write for dead rows.
            torch.testing.assert_close(
                mine[1:].float(), theirs[1:].float(), rtol=tolerance, atol=tolerance, equal_nan=True
            )


def _copied(caches: KVCaches) -> KVCaches:
    return [(k.clone(), v.clone()) for k, v in caches]
