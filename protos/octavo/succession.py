"""Who takes over: rendezvous hashing over ids, the same answer in every router and scheduler.

Whoever sees the same live scheduler ids names the same successor of a lost cell, so that its
requests and its workers meet again without anybody telling anybody. Must not know: services,
Redis. Entry points: `successor`, `choose`.
"""

from collections.abc import Iterable
from hashlib import blake2b


def rendezvous_weight(candidate_id: str, key: bytes) -> bytes:
    """Highest-random-weight hashing (Thaler and Ravishankar, 1998): the largest wins."""
    return blake2b(key + candidate_id.encode(), digest_size=8).digest()


def choose(candidate_ids: Iterable[str], key: bytes) -> str | None:
    """The candidate with the largest weight for `key`; None without candidates.

    One that comes or goes changes the choice only for the keys that it wins or won.
    """
    return max(candidate_ids, key=lambda name: rendezvous_weight(name, key), default=None)


def successor(scheduler_ids: Iterable[str], lost_scheduler_id: str) -> str | None:
    """Who of the live schedulers takes over the requests and the workers of a lost one."""
    others = (name for name in scheduler_ids if name != lost_scheduler_id)
    return choose(others, lost_scheduler_id.encode())
