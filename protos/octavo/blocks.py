"""Block hashes: the identity of a full KV block, the same function in every service.

Spec (version 1). All digests are BLAKE2b with 16 bytes; integers are little-endian.

    root     = H("root", field(version) field(model) field(revision) field(block_size)
                         field(kv_scheme) adapter salt)
    block i  = H("block", parent (16 bytes) || ids of the block as u32)
    field(x) = u32 length || UTF-8 bytes of x (integers in decimal)
    adapter  = 0x00, or 0x01 || field(adapter)
    salt     = 0x00, or 0x02 || field(salt)

H(kind, data) uses BLAKE2b's `person` parameter ("octavo.kv.root", "octavo.kv.block"), so a
root can never be taken for a block. Fields are length-prefixed and adapter and salt carry
different kind bytes: no two different tuples give one message. The first full block's parent
is the root; a partial block has no hash. The salt is the tenant (unless tenants share) and
the request's `cache_salt`, joined by `salt_of`.

Must not know: services, tensors. Entry points: `BlockHashRoot.digest`, `chain`.
"""

import struct
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_VERSION = 1
HASH_BYTES = 16
_ROOT_PERSON = b"octavo.kv.root"
_BLOCK_PERSON = b"octavo.kv.block"
_NO_FIELD = b"\x00"
_ADAPTER_KIND = b"\x01"
_SALT_KIND = b"\x02"


def _field(value: str | int) -> bytes:
    data = str(value).encode()
    return struct.pack("<I", len(data)) + data


@dataclass(frozen=True, slots=True)
class BlockHashRoot:
    """Everything that two requests must agree on before their KV blocks may be shared.

    `adapter` and `salt`: None means absent, which differs from the empty string.
    """

    model: str
    revision: str
    block_size: int
    kv_scheme: str
    adapter: str | None = None
    salt: str | None = None

    def digest(self) -> bytes:
        """The 16-byte parent of the first block."""
        fields = (HASH_VERSION, self.model, self.revision, self.block_size, self.kv_scheme)
        data = b"".join(map(_field, fields))
        data += _NO_FIELD if self.adapter is None else _ADAPTER_KIND + _field(self.adapter)
        data += _NO_FIELD if self.salt is None else _SALT_KIND + _field(self.salt)
        return blake2b(data, digest_size=HASH_BYTES, person=_ROOT_PERSON).digest()


def salt_of(tenant: str | None, cache_salt: str | None) -> str | None:
    """One salt from the tenant and the request's own; injective, None if both are absent."""
    if tenant is None and cache_salt is None:
        return None
    parts = [("t", tenant), ("c", cache_salt)]
    return "".join(f"{kind}{len(text)}:{text}" for kind, text in parts if text is not None)


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """Hash of one full block: `token_ids` are its packed little-endian u32 ids."""
    return blake2b(parent + token_ids, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()


def chain(root: bytes, token_ids: npt.NDArray[np.uint32], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` [T] (u32), in order; floor(T / block_size)."""
    data = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    stride = 4 * block_size
    hashes: list[bytes] = []
    parent = root
    for end in range(stride, len(data) + 1, stride):
        parent = block_hash(parent, data[end - stride : end])
        hashes.append(parent)
    return hashes
