"""Why a router gives up on a sequence: values of scheduler.proto's CancelReason.

Must not know: any service. Entry point: `CancelReason`.
"""

from enum import IntEnum


class CancelReason(IntEnum):
    """STOP: a stop string was found, so that the sequence counts as finished by stop."""

    CLIENT = 1
    STOP = 2
    DEADLINE = 3
