"""What a benchmark measured: times of requests, and the record that is kept of a run.

Must not know: how requests were sent. Entry points: `RequestTiming`, `make_record`,
`append_record`.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import octavo
from octavo.cli.percentiles import percentiles
from octavo.cli.step_report import StepReport


@dataclass(slots=True)
class RequestTiming:
    """One request. Times in seconds by one clock; a frame is what arrived together."""

    num_prompt_tokens: int
    submitted_s: float
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list[float])

    def frame(self, now_s: float) -> None:
        """A frame with new tokens arrived."""
        if self.first_s:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of a workload, once.

    `steps`: what the workers say of it. `cores`: the CPU seconds per second of the busiest process
    of each kind; one that reaches 1 of what has a single thread is what was measured.
    """

    timings: tuple[RequestTiming, ...]
    steps: StepReport | None = None
    cores: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def wall_s(self) -> float:
        """From the first submit to the last token."""
        first = min(timing.submitted_s for timing in self.timings)
        return max(timing.last_s for timing in self.timings) - first

    @property
    def num_prompt_tokens(self) -> int:
        return sum(timing.num_prompt_tokens for timing in self.timings)

    @property
    def num_output_tokens(self) -> int:
        return sum(timing.num_output_tokens for timing in self.timings)

    @property
    def num_cached_tokens(self) -> int:
        return sum(timing.num_cached_tokens for timing in self.timings)

    @property
    def num_frames(self) -> int:
        return sum(len(timing.gaps_s) + 1 for timing in self.timings)

    @property
    def ttft_ms(self) -> dict[str, float]:
        """Percentiles of the time from submit to first token."""
        return percentiles([1e3 * (item.first_s - item.submitted_s) for item in self.timings])

    @property
    def itl_ms(self) -> dict[str, float]:
        """Percentiles of the time between a stream's frames."""
        return percentiles([1e3 * gap for timing in self.timings for gap in timing.gaps_s])


def make_record(run: Run, facts: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
    """The JSON line of a run: `facts` say what ran, the rest what came of it."""
    wall_s = run.wall_s
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        **facts,
        "wall_s": round(wall_s, 4),
        "in_tok": run.num_prompt_tokens,
        "out_tok": run.num_output_tokens,
        "out_tok_s": round(run.num_output_tokens / wall_s, 2),
        "in_tok_s": round(run.num_prompt_tokens / wall_s, 2),
        "cached_tok": run.num_cached_tokens,
        "ttft_ms": run.ttft_ms,
        "itl_ms": run.itl_ms,
        "tok_per_frame": round(run.num_output_tokens / run.num_frames, 3),
        **({} if run.steps is None else run.steps.to_record()),
        **({"cores": dict(run.cores)} if run.cores else {}),
        "limit_fraction": None if limit_s is None else round(limit_s / wall_s, 4),
    }


def append_record(path: str | Path | None, *lines: str) -> None:
    """Append JSON lines to the file of records, if one is wanted."""
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def commit() -> str:
    """`$OCTAVO_COMMIT`, the checkout's commit ("+" if it has changes), or else the version."""
    if given := os.environ.get("OCTAVO_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return octavo.__version__


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """The first card's name; None without one."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout.strip()
