"""How long `octavo serve` takes from its command line to a ready API, part by part.

    python -m tests.bench.cold_start FOLDER [--model-shape llama8b] [--starts 2] [--record FILE]

A checkpoint of the shape is written to FOLDER if there is none, and read once: it lies in the page
cache then. Each start is a whole one, all services as processes; its parts are what their log says.
The first start may compile kernels, later ones find them in Triton's cache.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from octavo.cli.measurement import commit
from octavo.cli.ports import free_ports
from octavo.cli.workloads import load_shapes
from octavo.errors import ConfigurationError
from tests.bench.random_checkpoint import read_once, write_checkpoint

_READY = "Octavo serves "
_STOP_S = 20.0
# Name of a part, and how the line begins at which it is over: service, message. Those of a service
# follow one another; the services start side by side.
_MARKS = (
    ("scheduler ready", "scheduler", "ready: scheduler"),
    ("router listens", "router", "ready: router"),
    ("worker: imports, device", "worker", "loading "),
    ("worker: weights", "worker", "weights: "),
    ("worker: kernels", "worker", "kernels ready"),
    ("worker: mixed graphs", "worker", "mixed graphs: "),
    ("worker: graphs", "worker", "captured "),
    ("worker ready", "worker", "ready: worker"),
    ("worker is led", "scheduler", "leading worker"),
    ("router has a session", "router", "scheduler scheduler at"),
)


@dataclass
class Start:
    """One start: seconds since its command, by mark, and what the services said at these."""

    marks: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    ready_s: float = 0.0
    first_token_s: float = 0.0

    def note(self, line: str, at_s: float) -> bool:
        """Take in a line of the log that came after `at_s`; whether it says that all is ready."""
        if line.startswith(_READY):
            self.ready_s = at_s
            return True
        if not line.startswith("{"):
            return False
        record = json.loads(line)
        for name, service, beginning in _MARKS:
            is_it = record["service"] == service and record["message"].startswith(beginning)
            if is_it and name not in self.marks:
                self.marks[name], self.said[name] = at_s, record["message"]
                break
        return False

    def table(self) -> str:
        rows = sorted(self.marks.items(), key=lambda mark: mark[1])
        lines = [f"{at_s:7.2f} s  {name:<24} {self.said[name]}" for name, at_s in rows]
        lines.append(f"{self.ready_s:7.2f} s  ready")
        lines.append(f"{self.first_token_s:7.2f} s  first token")
        return "\n".join(lines)


def start(folder: Path, flags: Iterable[str], timeout_s: float) -> Start:
    """Start everything on `folder`, have one token drawn, stop. Raises ConfigurationError."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "octavo", "serve", str(folder), "--port", str(port)]
    begun, began_s = Start(), time.perf_counter()
    process = subprocess.Popen(
        [*command, "--log-format", "json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Its own group, so that nothing of it can stay behind.
        start_new_session=True,
    )
    too_long = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
    too_long.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if begun.note(line, time.perf_counter() - began_s):
                break
        else:
            raise ConfigurationError(f"it ended or took too long:\n{''.join(lines[-30:])}")
        # Its pipe is read on: a full one would hold it up.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        _draw_one(port, line.removeprefix(_READY).split(":", 1)[0])
        begun.first_token_s = time.perf_counter() - began_s
    finally:
        too_long.cancel()
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return begun


def _draw_one(port: int, model: str) -> None:
    body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the checkpoint; written if it isn't there")
    parser.add_argument("--model-shape", default="llama8b", help="one of octavo bench [llama8b]")
    parser.add_argument("--starts", type=int, default=2, help="one after the other [2]")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest start [300]")
    parser.add_argument("--record", type=Path, help="append one JSON line to this file")
    arguments, flags = parser.parse_known_args(argv)
    began_s = time.perf_counter()
    shape = load_shapes()[arguments.model_shape]
    num_bytes = write_checkpoint(arguments.folder, arguments.model_shape, shape)
    written_s = time.perf_counter()
    read_once(arguments.folder)
    read_s = time.perf_counter() - written_s
    print(
        f"{arguments.model_shape}: {num_bytes / 1e9:.2f} GB, there after "
        f"{written_s - began_s:.1f} s, read in {read_s:.1f} s",
        flush=True,
    )
    starts: list[Start] = []
    for number in range(arguments.starts):
        begun = start(arguments.folder, flags, arguments.timeout_s)
        starts.append(begun)
        print(f"\nstart {number + 1} of {arguments.starts}\n{begun.table()}", flush=True)
    if arguments.record:
        record = {
            "bench": "cold_start",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "model_shape": arguments.model_shape,
            "gigabytes": round(num_bytes / 1e9, 2),
            "flags": flags,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "starts": [vars(begun) for begun in starts],
        }
        with arguments.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
