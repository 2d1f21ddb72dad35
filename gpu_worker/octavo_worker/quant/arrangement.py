"""Codes in the order that kernels want: equal groups of inputs, one after the other.

Act-order leaves neighbours in different groups, a rank's share of such a layer has groups of any
size, and a last group may be short. So inputs are sorted by group, and where the groups then
aren't alike, cut into runs of fewer inputs, the last run of a group filled up. Must not know:
formats, kernels. Entry point: `arrange`.

N outputs, K inputs, G groups; K' and G' after arranging.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_worker.quant.codes import Codes

# Whole groups first, then what kernels can scale by; 32 is filled up.
_RUNS = (128, 64, 32)


class Arranged(NamedTuple):
    """`values` [N, K'], `scales` and `zeros` [N, G'], K' = G' * group_size.

    `order` int64 [K']: the input that belongs to each column; None = all, in their order. A
    column that only fills a run up names input 0 and holds the zero point, so it adds 0.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    order: Tensor | None


def arrange(codes: Codes) -> Arranged:
    """Bring codes into equal groups of neighbours. Synchronises with the device."""
    num_inputs = codes.values.shape[1]
    order = torch.argsort(codes.groups, stable=True)
    groups, counts = torch.unique_consecutive(codes.groups[order], return_counts=True)
    size = _run_size(counts.tolist())
    runs = -(-counts // size)
    group_of_run = groups.repeat_interleave(runs)
    num_columns = size * len(group_of_run)
    is_filled = num_columns > num_inputs
    values = codes.values
    scales, zeros = codes.scales[:, group_of_run], codes.zeros[:, group_of_run]
    if is_filled:
        starts = ((runs.cumsum(0) - runs) * size).repeat_interleave(counts)
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = starts + torch.arange(num_inputs, device=starts.device) - firsts
        filled = zeros.repeat_interleave(size, dim=1)
        filled[:, places] = values[:, order]
        columns = torch.zeros(num_columns, dtype=torch.int64, device=order.device)
        columns[places] = order
        return Arranged(filled, scales, zeros, size, columns)
    if torch.equal(order, torch.arange(num_inputs, device=order.device)):
        return Arranged(values, scales, zeros, size, None)
    return Arranged(values[:, order], scales, zeros, size, order)


def _run_size(counts: list[int]) -> int:
    """The groups' own size if all are alike, else the largest run that cuts them into whole ones;
    32 if none does."""
    first = counts[0]
    if len(counts) == 1 or (len(set(counts)) == 1 and (first in _RUNS or first % _RUNS[0] == 0)):
        return first
    whole = (run for run in _RUNS if all(count % run == 0 for count in counts))
    return next(whole, _RUNS[-1])
