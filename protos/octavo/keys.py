"""Every Redis key of Octavo, in one place.

The fleet's name is the hash tag (`{fleet}`), so all keys of a fleet lie in one slot of a Redis
Cluster and scripts may touch several of them. Must not know: clients, records. Entry points:
`FleetKeys`, `bucket_key`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from octavo.errors import ConfigurationError

_MAX_FLEET_CHARS = 200


class MemberKind(Enum):
    """What an entry of the fleet's members is; the value is its prefix."""

    WORKER = "worker"
    USAGE = "usage"
    SCHEDULER = "scheduler"


class Member(NamedTuple):
    """An entry of the fleet's members."""

    kind: MemberKind
    id: str


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """The keys of one fleet. Raises ConfigurationError for a name that can't be a hash tag."""

    fleet: str

    def __post_init__(self) -> None:
        if not self.fleet or len(self.fleet) > _MAX_FLEET_CHARS or set(self.fleet) & set("{}"):
            raise ConfigurationError(
                f"OCTAVO_FLEET={self.fleet!r}: must have 1 to {_MAX_FLEET_CHARS} characters, "
                "none of them a brace",
                param="fleet",
            )

    def worker(self, worker_id: str) -> str:
        """Hash, written by the worker: WorkerRecord."""
        return self._key("worker", worker_id)

    def usage(self, worker_id: str) -> str:
        """Hash, written by the worker's leader: UsageRecord."""
        return self._key("usage", worker_id)

    def scheduler(self, scheduler_id: str) -> str:
        """Hash, written by the scheduler: SchedulerRecord."""
        return self._key("scheduler", scheduler_id)

    def filter(self, scheduler_id: str) -> str:
        """String, written by the scheduler: version (8 bytes) and Bloom filter of its blocks."""
        return self._key("filter", scheduler_id)

    @property
    def members(self) -> str:
        """Sorted set of members by the server's time of their last sign of life, in ms."""
        return f"octavo:{{{self.fleet}}}:members"

    def of_member(self, member: Member) -> str:
        """The hash that `member` stands for."""
        return self._key(member.kind.value, member.id)

    def _key(self, kind: str, name: str) -> str:
        return f"octavo:{{{self.fleet}}}:{kind}:{name}"


def bucket_key(tenant: str) -> str:
    """Hash, written by routers' script: what is left of the tenant's quotas, over all fleets."""
    return f"octavo:{{{tenant}}}:bucket"


def format_member(member: Member) -> str:
    """`worker:w1`."""
    return f"{member.kind.value}:{member.id}"


def parse_member(text: str) -> Member | None:
    """The inverse of `format_member`; None for kinds that only a newer version knows."""
    kind, _, name = text.partition(":")
    try:
        return Member(MemberKind(kind), name)
    except ValueError:
        return None
