"""Rolling upgrades: neighbours whose wire versions differ by at most one work together.

Every handshake carries the version of each side, and each side checks the other's. Must not
know: messages, services. Entry point: `check_wire_version`.
"""

from octavo import WIRE_VERSION
from octavo.errors import FailedPreconditionError


def check_wire_version(peer: str, version: int) -> None:
    """Raise FailedPreconditionError unless `peer` is at most one version away.

    `peer`: what it is and where, for the message.
    """
    if abs(version - WIRE_VERSION) > 1:
        older = peer if version < WIRE_VERSION else "this process"
        raise FailedPreconditionError(
            f"{peer} speaks wire version {version}, this process {WIRE_VERSION}: neighbours may "
            f"differ by one; upgrade {older}"
        )
