"""A Bloom filter over block hashes: "which of these blocks might that cell hold?"

Block hashes are 16 bytes of a cryptographic digest, so they need no more hashing: the two
halves give all positions (Kirsch and Mitzenmacher, "Less Hashing, Same Performance", 2006),

    position i = (low + i * (high | 1) mod 2**64) mod num_bits,    i = 0 .. num_probes - 1

with low and high the halves as little-endian integers. Serialized, little-endian:

    magic "OBF1" | u8 hash version | u8 num_probes | u16 0 | u64 num_bits | u64 num_items | bits

Bit b is bit b % 8 of byte b // 8. Shape legend: N hashes, P probes. Must not know: services,
Redis. Entry points: `build_filter`, `BloomFilter.from_bytes`, `BloomFilter.leading_run`.
"""

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.blocks import HASH_BYTES, HASH_VERSION

_MAGIC = b"OBF1"
_HEADER = struct.Struct("<4sBBHQQ")
_MAX_PROBES = 30
# Hashes looked up at once: most runs are short. The largest step stays within a core's cache,
# and gives other threads the interpreter back within a millisecond.
_FIRST_STEP, _LARGEST_STEP = 64, 1 << 12


class BloomFilter:
    """A set that answers "no" for certain and "yes" with a small chance of error."""

    def __init__(self, num_bits: int, num_probes: int) -> None:
        """Empty. `num_bits` is rounded up to whole bytes."""
        assert num_bits > 0
        assert 0 < num_probes <= _MAX_PROBES
        self._bits = np.zeros((num_bits + 7) // 8, dtype=np.uint8)
        self._probes = np.arange(num_probes, dtype=np.uint64)
        self.num_items = 0

    @classmethod
    def sized(cls, num_items: int, false_positive_rate: float = 0.01) -> "BloomFilter":
        """Empty, with room for `num_items` at that chance of a wrong "yes", in (0, 1)."""
        assert 0 < false_positive_rate < 1
        bits_per_item = -math.log(false_positive_rate) / math.log(2) ** 2
        num_probes = min(_MAX_PROBES, max(1, round(bits_per_item * math.log(2))))
        return cls(max(64, math.ceil(num_items * bits_per_item)), num_probes)

    @classmethod
    def from_bytes(cls, data: bytes) -> "BloomFilter":
        """The inverse of `to_bytes`. Raises ValueError for anything else."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a filter has at least {_HEADER.size} bytes, not {len(data)}")
        magic, version, num_probes, reserved, num_bits, num_items = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != HASH_VERSION or reserved:
            raise ValueError(f"no filter over hashes of version {HASH_VERSION}")
        is_whole = 0 < num_bits == 8 * (len(data) - _HEADER.size)
        if not is_whole or not 0 < num_probes <= _MAX_PROBES:
            raise ValueError(f"{num_bits} bits and {num_probes} probes in {len(data)} bytes")
        made = cls(num_bits, num_probes)
        made._bits = np.frombuffer(data, dtype=np.uint8, offset=_HEADER.size).copy()
        made.num_items = num_items
        return made

    @property
    def num_bits(self) -> int:
        """A multiple of 8."""
        return 8 * len(self._bits)

    @property
    def num_probes(self) -> int:
        """Bits that one item sets."""
        return len(self._probes)

    def to_bytes(self) -> bytes:
        """Header and bits."""
        fields = (_MAGIC, HASH_VERSION, self.num_probes, 0, self.num_bits, self.num_items)
        return _HEADER.pack(*fields) + self._bits.tobytes()

    def add(self, hashes: Sequence[bytes]) -> None:
        """Add 16-byte hashes; about 0.15 µs each."""
        for start in range(0, len(hashes), _LARGEST_STEP):
            positions = self._positions(hashes[start : start + _LARGEST_STEP]).ravel()
            masks = np.left_shift(np.uint8(1), (positions & np.uint64(7)).astype(np.uint8))
            np.bitwise_or.at(self._bits, positions >> np.uint64(3), masks)
        self.num_items += len(hashes)

    def holds(self, block_hash: bytes) -> bool:
        """False: certainly not added. True: probably."""
        return self.leading_run((block_hash,)) == 1

    def leading_run(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, counted from the first, are held without a gap."""
        start, step = 0, _FIRST_STEP
        while start < len(hashes):
            positions = self._positions(hashes[start : start + step])
            shifts = (positions & np.uint64(7)).astype(np.uint8)
            bits = self._bits[positions >> np.uint64(3)] >> shifts
            is_held = (bits & np.uint8(1)).all(axis=1)
            if not is_held.all():
                return start + int(is_held.argmin())
            start, step = start + step, min(2 * step, _LARGEST_STEP)
        return len(hashes)

    def _positions(self, hashes: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """Bit positions [N, P]."""
        data = b"".join(hashes)
        assert len(data) == HASH_BYTES * len(hashes), "a hash has 16 bytes"
        halves = np.frombuffer(data, dtype="<u8").reshape(-1, 2).astype(np.uint64, copy=False)
        strides = halves[:, 1] | np.uint64(1)
        # Sums and products wrap at 2**64, as the definition above says.
        return (halves[:, :1] + strides[:, None] * self._probes) % np.uint64(self.num_bits)


def build_filter(hashes: Sequence[bytes], false_positive_rate: float = 0.01) -> bytes:
    """A serialized filter that holds `hashes` (16 bytes each, repeats allowed)."""
    made = BloomFilter.sized(len(hashes), false_positive_rate)
    made.add(hashes)
    return made.to_bytes()
