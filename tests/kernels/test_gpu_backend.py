"""The worker's two backends give the same answers: one step of chunks and rows, one dead."""

import pytest
import torch

from octavo_worker.attention_inputs import AttentionOptions, StepInputs
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.backends.cuda import CudaBackend
from octavo_worker.sampling import SamplingTensors
from tests.kernels.cases import logits_of, normal, paged_kv, sampling_parameters

pytestmark = pytest.mark.gpu

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
CHUNKS = [(0, 5), (20, 33)]  # (computed before, tokens of the chunk)
DECODES = [0, 1, 40, 300]


def _inputs(device: str) -> tuple[StepInputs, tuple[torch.Tensor, torch.Tensor]]:
    lengths = [history + length for history, length in CHUNKS] + DECODES
    kv = paged_kv(
        lengths,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=device,
    )
    positions = [torch.arange(start, start + length) for start, length in CHUNKS]
    positions += [torch.tensor([max(length - 1, 0)]) for length in DECODES]
    owners = torch.tensor([0] * 5 + [1] * 33 + [2, 3, 4, 5])
    position = torch.cat(positions)
    slots = kv.block_table.cpu()[owners, position // BLOCK_SIZE].long() * BLOCK_SIZE
    slots += position % BLOCK_SIZE
    slots[38] = -1
    num_tokens = len(position)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    inputs = StepInputs(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=position.to(device),
        slot_mapping=slots.to(device),
        num_prefill_tokens=38,
        cu_seqlens_q=int32([0, 5, 38]),
        prefill_context_lens=int32(lengths[:2]),
        prefill_block_table=kv.block_table[:2],
        max_seqlen_q=33,
        max_context_prefill=53,
        decode_context_lens=int32(DECODES),
        decode_block_table=kv.block_table[2:],
        max_context_decode=300,
    )
    return inputs, (kv.k_cache, kv.v_cache)


def _run(backend: CpuBackend | CudaBackend, device: str) -> dict[str, torch.Tensor]:
    inputs, caches = _inputs(device)
    num_tokens = inputs.positions.shape[0]
    x = normal(num_tokens, 576, dtype=torch.float32, device=device, seed=30)
    weight = normal(576, dtype=torch.float32, device=device, seed=31)
    heads = normal(
        num_tokens,
        NUM_HEADS + 2 * NUM_KV_HEADS,
        HEAD_DIM,
        dtype=torch.float32,
        device=device,
        seed=32,
    )
    q, k, v = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    angle = normal(512, HEAD_DIM // 2, dtype=torch.float32, device=device, seed=33)
    cos_sin = torch.stack((angle.cos(), angle.sin()), dim=1)
    results = {"norm": backend.rms_norm(x, weight, 1e-5), "silu": backend.silu_mul(x)}
    results["gelu"] = backend.gelu_mul(x)
    results["sum_norm"], results["sum"] = backend.add_rms_norm(x, x, weight, 1e-5)
    gate_up = normal(6, 2 * 40, 576, dtype=torch.float32, device=device, seed=37) * 0.05
    down = normal(6, 576, 40, dtype=torch.float32, device=device, seed=38) * 0.1
    options = {"top_k": 2, "renormalise": True}
    experts = (x, x[:, :6], gate_up, down, inputs.slot_mapping)
    results["experts"] = backend.experts(*experts, **options)
    q, k = backend.rope_and_cache(q, k, v, cos_sin, inputs.positions, inputs.slot_mapping, *caches)
    results |= {"q": q, "k": k}
    first = inputs.num_prefill_tokens
    # Two layers of a step that share their work list, and two of other windows.
    for layer, (window, soft_cap) in enumerate(((None, None), (None, 5.0), (30, None), (7, 2.0))):
        options = AttentionOptions(scale=0.1, window=window, soft_cap=soft_cap)
        results[f"prefill{layer}"] = backend.prefill_attention(q[:first], *caches, inputs, options)
        results[f"decode{layer}"] = backend.decode_attention(q[first:], *caches, inputs, options)
    return {name: value.cpu() for name, value in results.items()}


def test_every_operation_of_a_step() -> None:
    expected, actual = _run(CpuBackend(), "cpu"), _run(CudaBackend(), "cuda")
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert bool((actual["decode0"][0] == 0).all())


def test_the_same_draws() -> None:
    num_rows = 96
    logits = logits_of("normal", num_rows, 49_152, seed=34)
    parameters = sampling_parameters(num_rows, 0.8, 0.9, 0, 0.0, seed=35)
    parameters["temperature"][::4] = 0.0
    on_card = {name: value.cuda() for name, value in parameters.items()}
    expected = CpuBackend().sample(
        logits, SamplingTensors(**parameters, all_greedy=False, any_filter=True)
    )
    actual = CudaBackend().sample(
        logits.cuda(), SamplingTensors(**on_card, all_greedy=False, any_filter=True)
    )
    assert actual.tolist() == expected.tolist()


def test_a_bad_row_gets_an_id_that_exists() -> None:
    logits = torch.full((2, 64), torch.nan, device="cuda")
    logits[1] = 0.0
    logits[1, 7] = 1.0
    parameters = sampling_parameters(2, 0.0, 1.0, 0, 0.0, seed=36)
    on_card = {name: value.cuda() for name, value in parameters.items()}
    tokens = CudaBackend().sample(
        logits, SamplingTensors(**on_card, all_greedy=True, any_filter=False)
    )
    assert tokens.tolist() == [0, 7]
