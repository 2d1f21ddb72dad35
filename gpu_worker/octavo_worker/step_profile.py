"""When each step's plan came, was launched, ran on the device, was read and handed on.

The worker's rows of a Chrome trace (`octavo.chrome_trace`): with them one sees whether the
device ever waits for a plan, for the launch, or for nobody. Nothing is kept without a profile.
Must not know: what a step computes. Entry points: `StepProfile`,
`write_profile`.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.chrome_trace import Lane, Span, write_trace
from octavo.errors import ConfigurationError
from octavo_worker.pending_step import PendingStep

# Steps kept, the newest: some minutes of a small model's decode.
_MAX_STEPS = 50_000
_LANES = ("plan waits", "launch", "device", "read", "emit")


@dataclass(slots=True)
class _Times:
    """One step, in ns by perf_counter; `device_ns` its begin and end on the device."""

    name: str
    arrived_ns: int | None
    launch_ns: tuple[int, int]
    device_ns: tuple[int, int]
    read_ns: int
    emitted_ns: int


class StepProfile:
    """Collects steps in the engine's thread; `lanes` may be asked for when no step runs."""

    def __init__(self) -> None:
        self._steps: deque[_Times] = deque(maxlen=_MAX_STEPS)
        # A device event and the host's time when it happened: relates the two clocks.
        self._origin: tuple[torch.cuda.Event, int] | None = None

    def clear(self) -> None:
        """Forget the steps so far."""
        self._steps.clear()

    def note(self, step: PendingStep) -> None:
        """A step was read just now."""
        read_ns = time.perf_counter_ns()
        work = step.work
        kind = "plan" if step.repeat == 0 else "repeat"
        name = f"{kind} {step.step}: {work.num_prefill_tokens}+{len(work.decode_rows)} tokens"
        launch_ns = (step.launched_ns, step.left_ns)
        device_ns = self._on_device(step) or launch_ns
        times = _Times(name, step.arrived_ns, launch_ns, device_ns, read_ns, read_ns)
        self._steps.append(times)

    def note_emitted(self) -> None:
        """The step that was noted last is on its way to the leader."""
        if self._steps:
            self._steps[-1].emitted_ns = time.perf_counter_ns()

    def _on_device(self, step: PendingStep) -> tuple[int, int] | None:
        if step.began is None or step.done is None:
            return None
        if self._origin is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._origin = (event, time.perf_counter_ns())
        event, host_ns = self._origin
        # The origin may lie behind the first steps: their times are then negative.
        begin_ns = host_ns + int(1e6 * event.elapsed_time(step.began))
        return begin_ns, begin_ns + int(1e6 * step.began.elapsed_time(step.done))

    def lanes(self) -> Iterator[Lane]:
        """The rows of the trace, in the order in which a step passes through them."""
        rows: dict[str, list[Span]] = {name: [] for name in _LANES}
        for times in self._steps:
            if times.arrived_ns is not None:
                rows["plan waits"].append(Span(times.name, times.arrived_ns, times.launch_ns[0]))
            rows["launch"].append(Span(times.name, *times.launch_ns))
            rows["device"].append(Span(times.name, *times.device_ns))
            # Steps are read late on purpose; the time from their end on the device is shown.
            done_ns = min(times.device_ns[1], times.read_ns)
            rows["read"].append(Span(times.name, done_ns, times.read_ns))
            rows["emit"].append(Span(times.name, times.read_ns, times.emitted_ns))
        return (Lane(name, tuple(spans)) for name, spans in rows.items())


def write_profile(path: str, worker_id: str, profile: StepProfile | None) -> None:
    """Write the trace. Raises ConfigurationError if the file can't be written."""
    assert profile is not None, "made when the setting is there"
    try:
        write_trace(Path(path), worker_id, profile.lanes())
    except OSError as error:
        raise ConfigurationError(f"OCTAVO_PROFILE={path}: {error}", param="profile") from error
