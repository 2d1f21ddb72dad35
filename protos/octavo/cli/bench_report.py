"""What `octavo bench` keeps of a measurement: its JSON record, written and shown at once.

Must not know: how anything was measured, tables. Entry point: `BenchReport`.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from octavo.cli.bench_cases import Measured
from octavo.cli.bench_options import BenchOptions
from octavo.cli.bench_profile import add_clients, report
from octavo.cli.bench_table import HEAD, one_table, row_of
from octavo.cli.limits import knows_weights, limit_s, quant_method
from octavo.cli.measurement import append_record, make_record, package_version


class BenchReport:
    """Takes in what is measured; each is recorded and shown at once."""

    def __init__(self, options: BenchOptions) -> None:
        self._options = options
        # Of each case, the bare loop's seconds: what the stack's are held against.
        self._bare_s: dict[str, float] = {}
        self._num_rows = 0

    def add(self, measured: Measured) -> None:
        """Record and show one more."""
        options, run = self._options, measured.best
        record = make_record(run, self._facts(measured), self._limit_s(measured))
        if options.profile is not None:
            record |= report(options.profile)
            add_clients(options.profile, run)
        name = measured.case.name
        if measured.protocol is None:
            self._bare_s[name] = run.wall_s
        elif name in self._bare_s:
            record["split_ratio"] = round(self._bare_s[name] / run.wall_s, 4)
        line = json.dumps(record)
        append_record(options.record, line)
        if not sys.stdout.isatty():
            # On a terminal the table says it all.
            print(line, flush=True)
        self._show(record)

    def _show(self, record: Mapping[str, Any]) -> None:
        if self._options.num_measurements == 1:
            Console(stderr=True).print(one_table(record))
            return
        if self._num_rows == 0:
            device = record["gpu"] or "CPU"
            print(f"{record['model']} {record['dtype']} on {device}", file=sys.stderr)
            print(HEAD, file=sys.stderr)
        self._num_rows += 1
        print(row_of(record), file=sys.stderr, flush=True)

    def _facts(self, measured: Measured) -> dict[str, Any]:
        """What ran."""
        options, stack, is_stack = self._options, self._options.stack, measured.protocol is not None
        worker = stack.worker
        quant = quant_method(options.config)
        return {
            "gpu": options.gpu,
            "torch": package_version("torch"),
            "triton": package_version("triton"),
            "model": options.model,
            "dtype": options.dtype,
            "quant": quant if worker.quantization == "auto" else worker.quantization,
            "kv_cache_dtype": worker.kv_cache_dtype,
            "workload": measured.case.workload.name,
            "scale": options.scale,
            "sampled": measured.case.is_sampled,
            "path": "stack" if is_stack else "worker",
            "protocol": measured.protocol,
            "routers": stack.num_routers if is_stack else 0,
            "clients": options.num_clients if is_stack else 0,
            "workers": stack.num_workers if is_stack else 1,
            "tensor_parallel": worker.tensor_parallel,
            "preset": stack.scheduler.preset if is_stack else None,
            "runs_s": [round(run.wall_s, 4) for run in measured.runs],
        }

    def _limit_s(self, measured: Measured) -> float | None:
        """None where the card, or what its memory holds, isn't known."""
        options, worker = self._options, self._options.stack.worker
        # Weights that are rounded at load: their bytes are not the folder's.
        is_stored = worker.quantization == "auto" and knows_weights(options.config)
        if options.gpu is None or not is_stored:
            return None
        kv_dtype = options.dtype if worker.kv_cache_dtype == "auto" else worker.kv_cache_dtype
        least_s = limit_s(options.config, options.dtype, measured.case.requests, kv_dtype)
        # As if the cards' exchange took no time.
        return least_s / worker.tensor_parallel
