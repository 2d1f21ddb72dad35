"""What a routing decision takes, and what an index of a million blocks weighs.

    python -m tests.bench.routing [--record FILE]

`decision`: hashing a prompt's blocks and choosing among 4 cells whose filters hold 100,000 blocks
each, one of them all of the prompt. Budget: 100 µs and 2 µs a block. `index`: the scheduler's
block pool with every block sealed, and the filter that is published of it, per million blocks.
"""

import argparse
import json
import sys
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import numpy as np

from octavo.blocks import BlockHashRoot, chain
from octavo.bloom import BloomFilter, build_filter
from octavo.cli.measurement import commit
from octavo_router.cells import Cell, choose_cell
from octavo_scheduler.block_pool import BlockPool
from tests.bench.scheduler_step import cpu_name, percentiles

BLOCK_SIZE = 16
PROMPT_TOKENS = (1_000, 32_000, 128_000)
_NUM_CELLS = 4
_CELL_BLOCKS = 100_000
_INDEX_BLOCKS = 1_000_000


def measure_decision(num_tokens: int, repeats: int) -> dict[str, float]:
    """Hashing and choosing, by the clock of this thread."""
    rng = Random(0)
    ids = np.arange(num_tokens, dtype=np.uint32)
    root = BlockHashRoot("m", "1", BLOCK_SIZE, "fp32").digest()
    known = chain(root, ids, BLOCK_SIZE)
    cells: list[Cell] = []
    for i in range(_NUM_CELLS):
        others = [rng.randbytes(16) for _ in range(_CELL_BLOCKS)]
        held = BloomFilter.from_bytes(build_filter(others + known * (i == 0)))
        cells.append(Cell(f"cell-{i}", 1000 * i, 10_000, leading_run=held.leading_run))
    hashing: list[float] = []
    choosing: list[float] = []
    for _ in range(repeats):
        started = time.thread_time()
        hashes = chain(root, ids, BLOCK_SIZE)
        hashed = time.thread_time()
        choice = choose_cell(cells, hashes, BLOCK_SIZE)
        chosen = time.thread_time()
        assert choice is not None
        assert choice.hit_blocks == len(known)
        hashing.append(hashed - started)
        choosing.append(chosen - hashed)
    return {
        "budget_us": 100 + 2 * (num_tokens // BLOCK_SIZE),
        **{f"hash_{name}": value for name, value in percentiles(hashing).items()},
        **{f"choose_{name}": value for name, value in percentiles(choosing).items()},
    }


def measure_index() -> dict[str, float]:
    """Megabytes of a pool of a million blocks, empty and sealed, and of its filter."""
    rng = Random(0)
    tracemalloc.start()
    pool = BlockPool(_INDEX_BLOCKS + 1)
    empty_bytes = tracemalloc.get_traced_memory()[0]
    blocks = pool.allocate(_INDEX_BLOCKS)
    for block in blocks:
        pool.index(block, rng.randbytes(16))
    pool.free(blocks)
    del blocks
    sealed_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    started = time.thread_time()
    data = build_filter(pool.hashes_of(slice(None)))
    return {
        "empty_mb": round(empty_bytes / 1e6, 1),
        "sealed_mb": round(sealed_bytes / 1e6, 1),
        "filter_mb": round(len(data) / 1e6, 2),
        "filter_build_s": round(time.thread_time() - started, 2),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, help="append one JSON line to this file")
    arguments = parser.parse_args(argv)
    record = {
        "bench": "routing",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "cells": _NUM_CELLS,
    }
    for num_tokens in PROMPT_TOKENS:
        times = measure_decision(num_tokens, 200 if num_tokens < 10_000 else 30)
        record[f"prompt{num_tokens}"] = times
        share = (times["hash_p50_us"] + times["choose_p50_us"]) / times["budget_us"]
        print(
            f"{num_tokens:7} tokens: hash {times['hash_p50_us']:.0f} µs, choose "
            f"{times['choose_p50_us']:.0f} µs (p50), {share:.0%} of the budget"
        )
    index = record["index"] = measure_index()
    print(
        f"1,000,000 blocks: pool {index['empty_mb']} MB empty, {index['sealed_mb']} MB sealed; "
        f"filter {index['filter_mb']} MB, built in {index['filter_build_s']} s"
    )
    if arguments.record:
        with arguments.record.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
