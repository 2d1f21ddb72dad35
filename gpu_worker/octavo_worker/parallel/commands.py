"""What rank 0 tells the others: everything that its runner is told, in the same order.

A follower's runner then has the same rows in the same states: it launches the same steps, with
the same shapes, as rank 0's. Plans travel pickled (they are plain data). Must not know: sockets,
runners. Entry points: `encode`, `decode`.
"""

import pickle
from enum import IntEnum
from typing import NamedTuple

from octavo_worker.plan import Plan


class Kind(IntEnum):
    """Methods of the runner; END: there is nothing more to do."""

    SUBMIT = 0
    RESET = 1
    CAPTURE = 2
    END = 3


class Command(NamedTuple):
    """`num_read`: outcomes to read first, as rank 0 has since its last command."""

    kind: Kind
    num_read: int = 0
    plan: Plan | None = None


def encode(command: Command) -> bytes:
    return pickle.dumps((int(command.kind), command.num_read, command.plan), protocol=5)


def decode(message: bytes) -> Command:
    """Only of what comes through a `Link`: unpickling runs what it is told."""
    kind, num_read, plan = pickle.loads(message)
    return Command(Kind(kind), num_read, plan)
