"""A decode step's two ends as kernels: what `RowTensors` computes operation by operation."""

import copy
import random

import torch

from octavo_kernels.step_rows import begin, end
from octavo_worker.backends.fused_decode import rows_of
from octavo_worker.rows import RowTensors
from octavo_worker.step_inputs import decode_step_inputs
from tests.kernels.cases import poisoned_outputs

NUM_ROWS, NUM_COLUMNS, BLOCK_SIZE, SPARE_ROW = 9, 12, 16, 8


def _random_rows(seed: int, device: torch.device) -> RowTensors:
    torch.manual_seed(seed)
    rows = RowTensors(NUM_ROWS, NUM_COLUMNS, device)
    rows.block_table.random_(1, 100)
    rows.last_token.random_(0, 50)
    rows.num_tokens.random_(1, NUM_COLUMNS * BLOCK_SIZE)
    rows.is_live.copy_(torch.rand(NUM_ROWS) > 0.3)
    rows.is_live[SPARE_ROW] = False
    for column in (rows.temperature, rows.top_p, rows.min_p):
        column.uniform_()
    rows.top_k.random_(0, 9)
    rows.seed.random_()
    rows.sequence_index.random_(0, 4)
    rows.max_total_tokens.copy_(rows.num_tokens + torch.randint(0, 3, (NUM_ROWS,), device=device))
    rows.min_total_tokens.random_(0, 190)
    rows.stop_token_ids[:, :3] = torch.randint(0, 6, (NUM_ROWS, 3), device=device)
    return rows


def check_step_rows(seed: int, device: str) -> None:
    """Some rows dead, some ending, some with bad logits, the spare row twice."""
    plain = _random_rows(seed, torch.device(device))
    fused = copy.deepcopy(plain)
    chosen = random.Random(seed).sample(range(SPARE_ROW), 5)
    rows = torch.tensor([*chosen, SPARE_ROW, SPARE_ROW], device=device)
    inputs = decode_step_inputs(rows, plain, BLOCK_SIZE)
    positions = inputs.decode_context_lens.long()
    params = plain.sampling_tensors(rows, positions, all_greedy=False, any_filter=True)
    with poisoned_outputs():
        begun = begin(rows, rows_of(fused), BLOCK_SIZE)
    assert torch.equal(begun.input_ids, inputs.input_ids)
    assert torch.equal(begun.positions, inputs.positions)
    assert torch.equal(begun.slots, inputs.slot_mapping)
    assert torch.equal(begun.context_lens, inputs.decode_context_lens)
    assert torch.equal(begun.draw_positions, positions)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "sequence_index"):
        assert torch.equal(getattr(begun, name), getattr(params, name)), name
    for index, context in enumerate(inputs.decode_context_lens.tolist()):
        used = -(-context // BLOCK_SIZE)
        expected = inputs.decode_block_table[index, :used]
        assert torch.equal(begun.block_table[index, :used], expected)

    sampled = torch.randint(-1, 6, (len(rows),), device=device)
    events = plain.advance(
        *(rows, positions, sampled.clamp(min=0), plain.is_live[rows], sampled >= 0),
        has_wide_stop_ids=False,
    )
    with poisoned_outputs():
        drawn = end(rows, sampled, begun.draw_positions, rows_of(fused))
    assert torch.equal(drawn[0], sampled.clamp(min=0))
    assert torch.equal(drawn[1], events)
    for name in ("is_live", "last_token", "num_tokens"):
        held, kept = getattr(plain, name)[:SPARE_ROW], getattr(fused, name)[:SPARE_ROW]
        assert torch.equal(held, kept), name
