"""Which cell gets a prompt: pure choice, no I/O, so that a simulator runs the same code.

One cell: no choice. Several: each cell's published filter says how much of the prompt it holds.
Cells that hold a quarter are *warm* and come first, the longest leading run before others; the
rest, and cold prompts, are ranked by rendezvous hashing of the hash at the largest of 64 / 256 /
1,024 tokens that the prompt has, so that routers that never talk to one another agree. The first
cell of that ranking gets the prompt, unless its first token would come much later there than
elsewhere: then the prompt spills to the next, which will hold the prefix too. A prompt under one
block goes where the least waits. Must not know: sessions, Redis, time.
Entry point: `choose_cell`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.succession import rendezvous_weight

ANCHOR_TOKENS = (1024, 256, 64)
# Share of the prompt from which on a cell counts as warm.
WARM_SHARE = 0.25
# How much later than in the fastest cell a first token may come: in a warm cell, for the work
# that it saves the fleet, and in a cold one, for the sake of agreement between routers.
WARM_SLACK_S, COLD_SLACK_S = 1.0, 0.1
# Assumed while a cell has not measured its rate yet.
DEFAULT_PREFILL_TOKENS_PER_S = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheduler as the choice sees it.

    `backlog_tokens` of prompts wait or are being computed. `leading_run`: how many of some block
    hashes, from the first, its filter holds; None = no filter is known.
    """

    cell_id: str
    backlog_tokens: int = 0
    prefill_tokens_per_s: int = 0
    is_draining: bool = False
    leading_run: Callable[[Sequence[bytes]], int] | None = None

    def ttft_s(self, num_tokens: int) -> float:
        """Expected time to the first token of a prompt with this many tokens to compute."""
        rate = self.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        return (self.backlog_tokens + num_tokens) / rate


class CellChoice(NamedTuple):
    """The chosen cell and why: `hit_blocks` by its filter, `is_spilled` past a fuller one."""

    cell_id: str
    hit_blocks: int
    is_spilled: bool


def choose_cell(
    cells: Sequence[Cell], block_hashes: Sequence[bytes], block_size: int
) -> CellChoice | None:
    """The cell for a prompt with these block hashes; None if every cell is draining.

    With filters about 0.3 us a block and cell: call it in a thread.
    """
    open_cells = [cell for cell in cells if not cell.is_draining]
    if not open_cells:
        return None
    if len(open_cells) == 1:
        return CellChoice(open_cells[0].cell_id, 0, False)
    if not block_hashes:
        least = min(open_cells, key=lambda cell: (cell.backlog_tokens, cell.cell_id))
        return CellChoice(least.cell_id, 0, False)
    num_blocks = len(block_hashes)
    anchor = _anchor(block_hashes, block_size)
    runs = {
        cell.cell_id: 0 if cell.leading_run is None else cell.leading_run(block_hashes)
        for cell in open_cells
    }
    ttfts_s = {
        cell.cell_id: cell.ttft_s((num_blocks - runs[cell.cell_id]) * block_size)
        for cell in open_cells
    }

    def is_warm(cell: Cell) -> bool:
        return runs[cell.cell_id] >= WARM_SHARE * num_blocks

    def rank(cell: Cell) -> tuple[int, bytes]:
        run = runs[cell.cell_id] if is_warm(cell) else 0
        return run, rendezvous_weight(cell.cell_id, anchor)

    least_s = min(ttfts_s.values())
    ranked = sorted(open_cells, key=rank, reverse=True)
    for cell in ranked:
        slack_s = WARM_SLACK_S if is_warm(cell) else COLD_SLACK_S
        if ttfts_s[cell.cell_id] <= least_s + slack_s:
            return CellChoice(cell.cell_id, runs[cell.cell_id], cell is not ranked[0])
    raise AssertionError("the fastest cell is within its own slack")


def _anchor(block_hashes: Sequence[bytes], block_size: int) -> bytes:
    """The hash that names a prompt's family."""
    for num_tokens in ANCHOR_TOKENS:
        if len(block_hashes) * block_size >= num_tokens:
            return block_hashes[num_tokens // block_size - 1]
    return block_hashes[-1]
