"""Who leads this worker: one scheduler at a time, and the worker alone decides.

    nobody --attach--> ATTACHED --open_stream--> LIVE --close_stream, release--> nobody
                          |                        |
                          +------ silent for too long: another may attach ------+

Every attach raises the epoch; what carries an older epoch is refused, so a superseded leader
can do no harm however late its messages come. No stream resumes: after a break its scheduler
attaches anew. Pure: time is an argument (seconds of any monotonic clock). Must not know: gRPC,
the engine. Entry point: `Leadership`.
"""

from enum import Enum

from octavo.errors import FailedPreconditionError


class Seat(Enum):
    """State of the leader's seat."""

    EMPTY = "empty"
    ATTACHED = "attached"  # attached, its Steps stream has yet to come
    LIVE = "live"


class Leadership:
    """The state machine. Illegal moves raise FailedPreconditionError and change nothing."""

    def __init__(self, boot_id: str, silence_s: float) -> None:
        self.boot_id = boot_id
        self.epoch = 0
        self.leader_id = ""
        # Who led last, or leads: stays when the seat is empty.
        self.last_leader_id = ""
        self.seat = Seat.EMPTY
        self._silence_s = silence_s
        self._heard_at = 0.0

    def attach(self, scheduler_id: str, expected_epoch: int, now: float) -> int:
        """Make `scheduler_id` the leader; returns the new epoch."""
        if not scheduler_id:
            raise FailedPreconditionError("scheduler_id is empty; a leader needs a name")
        if self._is_held_against(scheduler_id, now):
            raise FailedPreconditionError(
                f"led by {self.leader_id!r} in epoch {self.epoch}, which is let go when it breaks "
                f"off or is silent for {self._silence_s:g} s"
            )
        if expected_epoch != self.epoch:
            raise FailedPreconditionError(
                f"expected_epoch is {expected_epoch}, but this worker's epoch is {self.epoch}; "
                "describe it again"
            )
        self.epoch += 1
        self.leader_id = self.last_leader_id = scheduler_id
        self.seat = Seat.ATTACHED
        self._heard_at = now
        return self.epoch

    def _is_held_against(self, scheduler_id: str, now: float) -> bool:
        if self.seat is Seat.EMPTY or now - self._heard_at > self._silence_s:
            return False
        # One that lost the answer to its attach may ask again; a live stream is no such case.
        return self.seat is Seat.LIVE or scheduler_id != self.leader_id

    def open_stream(self, boot_id: str, epoch: int, now: float) -> None:
        """The leader's Steps stream begins."""
        if boot_id != self.boot_id:
            raise FailedPreconditionError(
                f"boot_id is {boot_id!r}, but this process is {self.boot_id!r}; attach again"
            )
        if epoch != self.epoch or self.seat is Seat.EMPTY:
            raise FailedPreconditionError(
                f"epoch {epoch} is not led any more (now {self.epoch}, {self.seat.value}); "
                "attach again"
            )
        if self.seat is Seat.LIVE:
            raise FailedPreconditionError(f"epoch {epoch} has a live stream already")
        self.seat = Seat.LIVE
        self._heard_at = now

    def hear(self, epoch: int, now: float) -> None:
        """A message of `epoch`'s leader came in, or its attach went on."""
        if epoch == self.epoch:
            self._heard_at = now

    def close_stream(self, epoch: int) -> None:
        """The stream of `epoch` broke, ended, or released the worker."""
        if epoch == self.epoch and self.seat is Seat.LIVE:
            self.seat = Seat.EMPTY
            self.leader_id = ""
