"""When a child that exited is started again: back-off, and an end to crash loops. No I/O."""

from dataclasses import dataclass

# A process that ran this long was well: its exit starts a new count.
_HEALTHY_S = 60.0
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
MAX_FAST_EXITS = 5
# The exit status of a configuration mistake: trying again can't help.
CONFIGURATION_STATUS = 2


@dataclass(slots=True)
class RestartPolicy:
    """Counts a process's exits in a row. Not shared between processes."""

    num_fast_exits: int = 0

    def delay_s(self, *, status: int, lived_s: float, was_ready: bool) -> float | None:
        """Seconds to wait before the next start after this exit; None = give up."""
        if status == CONFIGURATION_STATUS and not was_ready:
            return None
        self.num_fast_exits = 1 if lived_s >= _HEALTHY_S else self.num_fast_exits + 1
        if self.num_fast_exits >= MAX_FAST_EXITS:
            return None
        return min(_FIRST_DELAY_S * 2 ** (self.num_fast_exits - 1), _LONGEST_DELAY_S)
