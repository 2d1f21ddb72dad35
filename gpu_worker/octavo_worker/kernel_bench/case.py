"""A kernel on one shape: what it must move and compute, and how to make it run.

Entry points: `Case`, `Measured`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Call = Callable[[], object]
# Twice and more what a card's cache holds: calls that take turns on so much find it cold.
_COLD_BYTES = 192 << 20
_MAX_SETS = 32


@dataclass(frozen=True, slots=True)
class Case:
    """`name`: kernel and shape, "paged_decode gqa 64 x 2048". `num_bytes`: each input read once,
    each output written once. `flops`: multiply and add count two. `make`: allocates inputs on the
    card and returns calls that do the same on different ones (`num_sets` of them)."""

    name: str
    num_bytes: int
    flops: int
    make: Callable[[], Sequence[Call]]


def num_sets(num_bytes: int) -> int:
    """How many sets of inputs keep the card's cache cold."""
    return min(_MAX_SETS, max(1, -(-_COLD_BYTES // num_bytes)))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card reached in this run: bytes read a second, bf16 operations a second."""

    bytes_s: float
    flops_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one call, median and 99th percentile."""

    case: Case
    us: float
    us_p99: float
    ceilings: Ceilings

    @property
    def gb_s(self) -> float:
        return self.case.num_bytes / self.us / 1e3

    @property
    def tflop_s(self) -> float:
        return self.case.flops / self.us / 1e6

    @property
    def floor_us(self) -> float:
        """What the ceilings allow: the larger of memory's time and the tensor cores'."""
        return 1e6 * max(
            self.case.num_bytes / self.ceilings.bytes_s, self.case.flops / self.ceilings.flops_s
        )

    @property
    def fraction(self) -> float:
        """Of the ceiling that binds."""
        return self.floor_us / self.us

    @property
    def is_memory_bound(self) -> bool:
        memory_s = self.case.num_bytes / self.ceilings.bytes_s
        return memory_s >= self.case.flops / self.ceilings.flops_s
