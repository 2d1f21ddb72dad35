"""Which cell gets a prompt: pure choice, no I/O, so that a simulator runs the same code.

One cell: no choice. Several: the cell whose published filter covers the longest leading run of
the prompt's block hashes; ties and cold prompts by rendezvous hashing of the hash at the
largest of 64 / 256 / 1,024 tokens that the prompt has, so that routers that never talk to one
another agree. A cell with too long a backlog passes the prompt to the next one. A prompt under
one block goes where the least waits. Must not know: sessions, Redis, time.
Entry point: `choose_cell`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.succession import rendezvous_weight

ANCHOR_TOKENS = (1024, 256, 64)
# A cell spills when its backlog exceeds this many seconds of its prefill rate.
SPILL_S = 4.0
# Assumed while a cell has not measured its rate yet.
DEFAULT_PREFILL_TOKENS_PER_S = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheduler as the choice sees it.

    `leading_run`: how many of some block hashes, from the first, its filter holds; None = no
    filter is known.
    """

    cell_id: str
    backlog_tokens: int = 0
    prefill_tokens_per_s: int = 0
    is_draining: bool = False
    leading_run: Callable[[Sequence[bytes]], int] | None = None

    @property
    def is_full(self) -> bool:
        rate = self.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        return self.backlog_tokens > SPILL_S * rate


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
    anchor = _anchor(block_hashes, block_size)
    runs = {
        cell.cell_id: 0 if cell.leading_run is None else cell.leading_run(block_hashes)
        for cell in open_cells
    }
    ranked = sorted(
        open_cells,
        key=lambda cell: (runs[cell.cell_id], rendezvous_weight(cell.cell_id, anchor)),
        reverse=True,
    )
    for cell in ranked:
        if not cell.is_full:
            return CellChoice(cell.cell_id, runs[cell.cell_id], cell is not ranked[0])
    least = min(ranked, key=lambda cell: cell.backlog_tokens)
    return CellChoice(least.cell_id, runs[least.cell_id], least is not ranked[0])


def _anchor(block_hashes: Sequence[bytes], block_size: int) -> bytes:
    """The hash that names a prompt's family."""
    for num_tokens in ANCHOR_TOKENS:
        if len(block_hashes) * block_size >= num_tokens:
            return block_hashes[num_tokens // block_size - 1]
    return block_hashes[-1]
