"""What a drawn token did to its row: values of worker.proto's RowEvent, as columns hold them.

Must not know: any service. Entry point: `RowEvent`.
"""

from enum import IntEnum


class RowEvent(IntEnum):
    """ALIVE: the row lives on. After ERROR the token id means nothing."""

    ALIVE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3
