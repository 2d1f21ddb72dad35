"""The tables of `octavo bench ablation`: what was measured, beside what was published.

Published figures are other systems' on other hardware: they say what to expect, not what to reach.
Must not know: how anything was run. Entry points: `runs_table`, `gains_table`.
"""

from typing import Any

from rich.box import SIMPLE
from rich.table import Table

# Share of KV memory that holds tokens: Kwon et al. 2023, figure 2 (Orca's reservations, vLLM).
_PUBLISHED_UTILIZATION = {
    "continuous, max": "20.4 %",
    "continuous, pow2": "26.8 %",
    "continuous, oracle": "38.2 %",
    "continuous, paged": "96.3 %",
}
# Orca: Yu et al. 2022, GPT-3 175B against FasterTransformer. The rest: Kwon et al. 2023, OPT-13B
# on ShareGPT (sequences at once; request rate at equal latency) and shared few-shot prefixes.
_GAINS = {
    "continuous_over_static": ("continuous / static batching", "36.9 × rate (Orca)"),
    "paged_over_contiguous_max": (
        "paged / contiguous, longest",
        "4.3 × sequences, 2.7-8 × rate (vLLM)",
    ),
    "paged_over_contiguous_pow2": ("paged / contiguous, power of two", "3.1 × sequences (vLLM)"),
    "paged_over_contiguous_oracle": (
        "paged / contiguous, true length",
        "2.2 × sequences, 1.7-2.7 × rate (vLLM)",
    ),
    "continuous_and_paged_over_neither": ("continuous and paged / neither", "22 × rate (vLLM)"),
    "prefix_cache_on_over_off": ("prefix cache / none", "1.67-3.58 × rate (vLLM)"),
}

_RUNS_CAPTION = (
    "Reserved when a row is admitted: max = the longest request there may be, pow2 = its output "
    "rounded up to a power of two, oracle = its true length; paged: nothing. tokens/s counts all "
    "computed, useful/s those generated and asked for. Sequences and KV: means while requests wait."
)
_CPU_CAPTION = (
    "Times are of one CPU thread, whatever else the machine does. There a step's time grows with "
    "its rows, so more sequences at once pay less than on a card, where it hardly depends on them: "
    "what costs then is the number of steps."
)


def runs_table(record: dict[str, Any]) -> Table:
    """One row a twin."""
    where = record["gpu"] if record["backend"] != "cpu" else "CPU"
    memory = f"KV memory for {record['kv_slots']:,} tokens"
    table = Table(title=f"ablation · {record['model']} · {where} · {memory}", box=SIMPLE)
    table.add_column("scheduler")
    for name in ("tokens/s", "useful/s", "sequences", "KV used", "published"):
        table.add_column(name, justify="right")
    for name in ("TTFT p50 / p99", "steps", "time"):
        table.add_column(name, justify="right")
    workload = record["runs"][0]["workload"]
    for run in record["runs"]:
        if run["workload"] != workload:
            table.add_section()
            workload = run["workload"]
        is_mixed = workload == "mixed"
        table.add_row(
            run["twin"] if is_mixed else f"{run['twin']} ({workload})",
            f"{run['computed_tok_s']:,.0f}",
            f"{run['useful_tok_s']:,.0f}",
            f"{run['mean_sequences']:.1f}, max {run['max_sequences']}",
            f"{100 * run['kv_utilization']:.1f} %",
            _PUBLISHED_UTILIZATION.get(run["twin"], "") if is_mixed else "",
            f"{run['ttft_ms']['p50'] / 1e3:.2f} / {run['ttft_ms']['p99'] / 1e3:.2f} s",
            f"{run['steps']:,}",
            f"{run['time_s']:.2f} s",
        )
    table.caption = _RUNS_CAPTION
    return table


def gains_table(record: dict[str, Any]) -> Table:
    """One row an idea: how many times better with it than without."""
    table = Table(title="with / without, all else equal", box=SIMPLE)
    table.add_column("idea")
    for name in ("useful/s", "sequences", "fewer steps", "TTFT"):
        table.add_column(name, justify="right")
    table.add_column("published")
    for name, (label, published) in _GAINS.items():
        gain = record["ratios"][name]
        measures = ("useful_tok_s", "sequences", "fewer_steps", "ttft_p50")
        table.add_row(label, *(f"{gain[measure]:.2f} ×" for measure in measures), published)
    if record["backend"] == "cpu":
        table.caption = _CPU_CAPTION
    return table
