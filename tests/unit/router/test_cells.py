"""The choice of a cell: pure, deterministic, the same in every router."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.blocks import BlockHashRoot, chain
from octavo.bloom import BloomFilter, build_filter
from octavo_router.cells import COLD_SLACK_S, WARM_SLACK_S, Cell, choose_cell

BLOCK = 16


def hashes(*token_ids: int) -> list[bytes]:
    root = BlockHashRoot("m", "r", BLOCK, "fp32").digest()
    return chain(root, np.array(token_ids, dtype=np.uint32), BLOCK)


def prompt(seed: int, num_tokens: int) -> list[bytes]:
    return hashes(*(seed * 1_000_003 + i for i in range(num_tokens)))


def cells(count: int, **options: int) -> list[Cell]:
    return [Cell(f"cell-{i}", **options) for i in range(count)]


def chosen(candidates: list[Cell], block_hashes: list[bytes]) -> str:
    choice = choose_cell(candidates, block_hashes, BLOCK)
    assert choice is not None
    return choice.cell_id


def filter_of(block_hashes: list[bytes]) -> Callable[[Sequence[bytes]], int]:
    data = build_filter(block_hashes, false_positive_rate=1e-6)
    return BloomFilter.from_bytes(data).leading_run


def test_one_cell_is_no_choice() -> None:
    full = Cell("only", backlog_tokens=10**9)
    assert chosen([full], prompt(1, 100)) == "only"
    assert chosen([full], []) == "only"


def test_draining_cells_take_nothing() -> None:
    draining = Cell("a", is_draining=True)
    assert choose_cell([], [], BLOCK) is None
    assert choose_cell([draining], prompt(1, 64), BLOCK) is None
    assert chosen([draining, Cell("b")], prompt(1, 64)) == "b"


def test_the_longest_leading_run_wins() -> None:
    known = prompt(1, 200)
    short = Cell("short", leading_run=filter_of(known[:3]))
    long = Cell("long", leading_run=filter_of(known[:5]))
    # Later blocks without the first ones are worth nothing.
    late = Cell("late", leading_run=filter_of(known[1:]))
    choice = choose_cell([late, short, long, Cell("none")], known, BLOCK)
    assert choice is not None
    assert (choice.cell_id, choice.hit_blocks, choice.is_spilled) == ("long", 5, False)


def test_a_prompt_under_one_block_goes_where_the_least_waits() -> None:
    waiting = [
        Cell("a", backlog_tokens=5),
        Cell("b", backlog_tokens=2),
        Cell("c", backlog_tokens=9),
    ]
    assert chosen(waiting, []) == "b"


def test_a_slow_cell_spills_to_the_next_by_weight() -> None:
    block_hashes = prompt(3, 300)
    order: list[str] = []
    candidates = cells(4, prefill_tokens_per_s=1000)
    for _ in range(4):
        choice = choose_cell(candidates, block_hashes, BLOCK)
        assert choice is not None
        order.append(choice.cell_id)
        assert choice.is_spilled == (len(order) > 1)
        late = round(1000 * COLD_SLACK_S) + 1
        candidates = [
            Cell(c.cell_id, late if c.cell_id in order else c.backlog_tokens, 1000)
            for c in candidates
        ]
    assert sorted(order) == [cell.cell_id for cell in candidates]
    # All are late, by as much: the first again. One of them less than the rest: that one.
    assert chosen(candidates, block_hashes) == order[0]
    full = [Cell(f"cell-{i}", 9000 + 200 * i, 1000) for i in (2, 0, 1)]
    assert chosen(full, block_hashes) == "cell-0"


def test_slack_is_time_by_each_cells_own_rate() -> None:
    block_hashes = prompt(3, 300)
    first = chosen(cells(2), block_hashes)
    other = next(cell.cell_id for cell in cells(2) if cell.cell_id != first)
    late = round(9_000 * COLD_SLACK_S) + 1
    fast = [Cell(first, late, 10_000), Cell(other, 0, 10_000)]
    slow = [Cell(first, late, 9_000), Cell(other, 0, 9_000)]
    assert (chosen(fast, block_hashes), chosen(slow, block_hashes)) == (first, other)


def test_a_warm_cell_is_worth_a_longer_wait_than_its_hits_save() -> None:
    known = prompt(1, 160)
    warm = filter_of(known[:5])

    def home(backlog_tokens: int) -> str:
        return chosen([Cell("warm", backlog_tokens, 1000, False, warm), Cell("b", 0, 1000)], known)

    saved = 5 * BLOCK
    assert home(saved + round(1000 * WARM_SLACK_S)) == "warm"
    assert home(saved + round(1000 * WARM_SLACK_S) + 1) == "b"


def test_a_run_below_a_quarter_of_the_prompt_does_not_rank() -> None:
    known = prompt(1, 20 * BLOCK)
    home = chosen(cells(4), known)
    for cell in cells(4):
        few = Cell(cell.cell_id, leading_run=filter_of(known[:4]))
        others = [c for c in cells(4) if c.cell_id != cell.cell_id]
        assert chosen([few, *others], known) == home
        enough = Cell(cell.cell_id, leading_run=filter_of(known[:5]))
        assert chosen([enough, *others], known) == cell.cell_id


def test_prompts_of_one_family_share_a_cell_and_families_spread() -> None:
    candidates = cells(4)
    counts: Counter[str] = Counter()
    for family in range(200):
        base = prompt(family, 256)
        home = chosen(candidates, base)
        counts[home] += 1
        # Longer prompts of the family, up to the next anchor, find the same cell.
        longer = hashes(*(family * 1_000_003 + i for i in range(256)), *range(500))
        assert chosen(candidates, longer) == home
    assert min(counts.values()) >= 25


def test_a_shared_first_block_does_not_gather_everything() -> None:
    candidates = cells(4)
    homes = Counter(
        chosen(candidates, hashes(*range(16), *(seed * 977 + i for i in range(300))))
        for seed in range(200)
    )
    assert min(homes.values()) >= 25


@given(st.integers(2, 8), st.integers(0, 1000), st.integers(16, 1500), st.randoms())
def test_order_does_not_matter_and_losing_a_cell_moves_only_its_prompts(
    count: int, seed: int, num_tokens: int, random: object
) -> None:
    candidates = cells(count)
    block_hashes = prompt(seed, num_tokens)
    home = chosen(candidates, block_hashes)
    shuffled = candidates[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert chosen(shuffled, block_hashes) == home
    for lost in candidates:
        rest = [cell for cell in candidates if cell is not lost]
        if lost.cell_id != home:
            assert chosen(rest, block_hashes) == home
