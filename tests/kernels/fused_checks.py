"""What a fused decode step must fulfil, on whatever device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from octavo_kernels.e4m3_weight import arrange
from octavo_kernels.w4_dequantize import dequantize
from octavo_kernels.w4_weight import pack
from octavo_kernels.w4a16 import matmul
from octavo_worker.attention_inputs import StepInputs
from octavo_worker.backends import Backend
from octavo_worker.backends.fused_decode import FusedDecode
from octavo_worker.models import Model
from octavo_worker.models.fp8_linear import Fp8Linear
from octavo_worker.models.linear import DenseLinear, Linear
from octavo_worker.models.quant_linear import PackedPiece, PlainPiece, QuantLinear, W4Kernels
from octavo_worker.quant.fp8 import E4M3, E4M3_MAX, ExactProduct
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
        run = PagedRun(model, backend, num_blocks=64 + sum(len(ids) for ids in prompts) // 8)
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


def narrow(model: Model, form: str) -> Callable[[], None]:
    """Rounds the weights of a model's linear layers to what `form` can hold, "e4m3" or "w4", and
    gives the call that puts layers in their place which store them so."""
    calls: list[Callable[[], None]] = []
    for layer in model.layers:
        places = ((layer, "qkv"), (layer, "o"), (layer.mlp, "gate_up"), (layer.mlp, "down"))
        for owner, name in places:
            dense = getattr(owner, name)
            linear, twin = _NARROWED[form](dense)
            dense.weight.copy_(twin)
            calls.append(partial(setattr, owner, name, linear))

    def install() -> None:
        for call in calls:
            call()

    return install


def _e4m3(dense: DenseLinear) -> tuple[Linear, Tensor]:
    scales = _power_of_2(dense.weight.float().abs().amax(-1) / E4M3_MAX)
    codes = (dense.weight.float() / scales[:, None]).to(E4M3)
    linear = Fp8Linear(arrange(codes), scales, dense.bias, [], {}, ExactProduct())
    linear.is_arranged = True
    return linear, codes.float() * scales[:, None]


def _w4(dense: DenseLinear) -> tuple[Linear, Tensor]:
    groups = dense.weight.float().unflatten(1, (-1, 64))
    scales = _power_of_2(groups.abs().amax(-1) / 7)
    codes = (groups / scales[:, :, None]).round() + 8
    weight = pack(codes.flatten(1).byte(), scales, torch.full_like(scales, 8), 64)
    linear = QuantLinear([], {}, dense.bias, PlainPiece)  # type: ignore[arg-type]
    kernels = W4Kernels(pack, matmul, dequantize)
    linear.pieces = (PackedPiece(kernels, weight, None, codes.shape[1] * codes.shape[2]),)
    return linear, ((codes - 8) * scales[:, :, None]).flatten(1)


def _power_of_2(scales: Tensor) -> Tensor:
    """At least as large: the rounded weights then are numbers of any float."""
    return torch.exp2(torch.ceil(torch.log2(scales)))


_NARROWED = {"e4m3": _e4m3, "w4": _w4}


def _copied(caches: KVCaches) -> KVCaches:
    return [(k.clone(), v.clone()) for k, v in caches]
