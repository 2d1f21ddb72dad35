"""JSON lines that tell what was measured, where and when. Entry point: `append`."""

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

from octavo.cli.measurement import commit
from tests.bench.scheduler_step import cpu_name

RESULTS = Path(__file__).parents[1] / "bench/results"


def append(file_name: str, bench: str, measured: dict[str, Any]) -> None:
    """Add a line to a file of `RESULTS`."""
    line = {
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **measured,
    }
    with (RESULTS / file_name).open("a") as lines:
        lines.write(json.dumps(line) + "\n")
