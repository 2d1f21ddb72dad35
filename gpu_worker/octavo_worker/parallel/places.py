"""Which rank a process is, and where it finds the others.

In the words of torchrun's environment: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
Rank 0 sets them for the ranks that it starts itself; torchrun does for ranks on several
machines. Must not know: tensors, sockets. Entry point: `Place`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ConfigurationError
from octavo_worker.parallel.shares import Share

# The secret that rank 0 gives to the ranks that it starts.
KEY = "OCTAVO_RANK_KEY"


@dataclass(frozen=True, slots=True)
class Place:
    """A process's rank, and its number on its machine. `is_alone`: nobody else starts ranks."""

    share: Share
    local_rank: int
    num_local: int
    is_alone: bool

    @classmethod
    def of(cls, environ: Mapping[str, str], size: int) -> "Place":
        """This process's, of `size` ranks. Raises ConfigurationError naming the variable."""
        if "RANK" not in environ:
            return cls(Share(0, size), local_rank=0, num_local=size, is_alone=True)
        world_size = _number(environ, "WORLD_SIZE")
        if world_size != size:
            raise ConfigurationError(
                f"OCTAVO_TENSOR_PARALLEL={size}, but WORLD_SIZE={world_size}: one process for "
                "every rank is needed",
                param="tensor_parallel",
            )
        rank = _number(environ, "RANK")
        if rank >= size:
            raise ConfigurationError(f"RANK={rank}: must be below WORLD_SIZE={size}")
        return cls(
            Share(rank, size),
            local_rank=_number(environ, "LOCAL_RANK"),
            num_local=_number(environ, "LOCAL_WORLD_SIZE"),
            is_alone=False,
        )

    @classmethod
    def here(cls, size: int) -> "Place":
        """By this process's environment."""
        return cls.of(os.environ, size)

    def environment_of(self, rank: int, port: int, key: str) -> dict[str, str]:
        """What places a rank that rank 0 starts beside itself."""
        assert self.is_alone
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.share.size),
            "LOCAL_WORLD_SIZE": str(self.share.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            KEY: key,
        }


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text!r}: RANK is set, so this must be a number, as torchrun sets it"
        )
    return int(text)
