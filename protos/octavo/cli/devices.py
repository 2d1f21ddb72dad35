"""Which device and how many threads each worker of one machine gets."""

import os
import subprocess
from collections import Counter
from collections.abc import Sequence

_DEVICES = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"


def worker_environments(num_workers: int, backend: str, num_ranks: int = 1) -> list[dict[str, str]]:
    """The environment of each worker of `num_ranks` ranks: CPU threads shared out, cards dealt
    round, one for each rank."""
    devices = [] if backend == "cpu" else visible_devices()
    threads = max(1, num_cores() // (num_workers * num_ranks))
    environments: list[dict[str, str]] = []
    for index in range(num_workers):
        environment = {} if _THREADS in os.environ else {_THREADS: str(threads)}
        if devices:
            dealt = range(index * num_ranks, (index + 1) * num_ranks)
            # Fewer cards than ranks: the worker says so, in its own words.
            own = dict.fromkeys(devices[number % len(devices)] for number in dealt)
            environment[_DEVICES] = ",".join(own)
        environments.append(environment)
    return environments


def workers_per_device(environments: Sequence[dict[str, str]]) -> int:
    """How many of these workers share one device's memory, at most."""
    counts = Counter(
        device
        for environment in environments
        for device in environment.get(_DEVICES, "cpu").split(",")
    )
    return max(counts.values())


def visible_devices() -> list[str]:
    """The cards that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(_DEVICES)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    try:
        # Not through torch: the parent of the services stays small.
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    cards = [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(cards))]


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
