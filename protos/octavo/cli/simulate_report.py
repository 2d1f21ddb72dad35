"""Tables and plots of `octavo bench simulate`.

Must not know: how anything was simulated. Entry points: `runs_table`, `flood_table`,
`write_plots`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

_DPI = 130
_CAPTION = (
    "8 workers. Hits: prompt tokens found in a cache, and their share of what one cache over all "
    "workers' memory would hit. TTFT in seconds. Busiest: tokens that the busiest worker computed "
    "over the mean. All but octavo route to single workers and may see what no router sees for "
    "free: live requests, backlogs or caches of this very moment."
)


def runs_table(workload: str, runs: Sequence[Mapping[str, Any]]) -> Table:
    """One row a run of this workload."""
    table = Table(title=f"simulated · {workload}", box=SIMPLE, caption=_CAPTION)
    table.add_column("policy")
    for name in ("routers", "cells", "hits", "of ceiling", "mean", "p50", "p99", "busiest"):
        table.add_column(name, justify="right")
    for run in runs:
        if run["workload"] != workload:
            continue
        table.add_row(
            run["policy"],
            str(run["routers"]),
            f"{run['cells']} x {run['workers_per_cell']}",
            f"{100 * run['hit_share']:.1f} %",
            f"{100 * run['ceiling_share']:.1f} %",
            *(f"{run[f'ttft_{name}_s']:.2f}" for name in ("mean", "p50", "p99")),
            f"{run['imbalance']:.2f}",
        )
    return table


def flood_table(floods: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Two tenants: what one gets while the other sends more and more."""
    table = Table(title="simulated · two tenants, each at half the capacity", box=SIMPLE)
    table.add_column("one sends")
    for tenant in ("the other's", "its own"):
        for name in ("p50", "p99", "longest", "refused"):
            table.add_column(f"{tenant} {name}", justify="right")
    for factor, tenants in floods.items():
        cells = [
            text
            for told in (tenants["calm"], tenants["loud"])
            for text in (
                *(f"{told[f'ttft_{name}_s']:.2f}" for name in ("p50", "p99", "max")),
                f"{100 * told['refused'] / told['requests']:.0f} %",
            )
        ]
        table.add_row(f"x {factor}", *cells)
    return table


def write_plots(folder: Path, findings: Sequence[Any]) -> list[Path]:
    """A PNG a workload: hits against time to first token, and how those times spread."""
    # Not pyplot: no global state, no display.
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for workload in dict.fromkeys(run.workload for run in findings):
        figure = Figure(figsize=(11, 5), layout="constrained")
        trade, spread = figure.subplots(1, 2)
        for run in findings:
            if run.workload != workload:
                continue
            label = f"{run.shape.policy}, {run.shape}"
            marker = "o" if run.shape.policy == "octavo" else "x"
            trade.plot(100 * run.ceiling_share, run.mean_ttft_s, marker, label=label)
            ttfts_s = sorted(run.ttfts_s)
            shares = [(rank + 1) / len(ttfts_s) for rank in range(len(ttfts_s))]
            spread.step(ttfts_s, shares, where="post", label=label)
        trade.set(
            title=workload,
            xlabel="hits, % of one pooled cache's",
            ylabel="mean time to first token, s",
        )
        spread.set(title="time to first token", xlabel="s", ylabel="share at most", xscale="log")
        trade.legend(fontsize="x-small")
        for axis in (trade, spread):
            axis.grid(alpha=0.3)
        paths.append(folder / f"simulate_{workload}.png")
        figure.savefig(paths[-1], dpi=_DPI)
    return paths
