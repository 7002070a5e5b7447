"""Packs: objects that hold many blobs, so that a store is not asked once for every 64 KiB.

```
blob | blob | … | header | header length (4 bytes, little endian) | "TMIGPK01"
header = for each blob: id (32) kind (1) codec (1) size (4) stored size (4), little endian
```
A pack is named by the hash of its header. The blobs lie in the header's order without gaps.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchmig.errors import IntegrityError
from torchmig.repo.blob import KIND_CODES, MAX_BLOB_BYTES, Encoded, Kind, hash_of
from torchmig.store import Buffer

PACK_BYTES = 32 << 20
ENTRY = struct.Struct("<32sBBII")
_TRAILER = struct.Struct("<I8s")
_MAGIC = b"TMIGPK01"
TRAILER_BYTES = _TRAILER.size


@dataclass(frozen=True, slots=True)
class PackEntry:
    """Where one blob lies inside its pack."""

    blob_id: bytes
    kind: int
    codec: int
    size_bytes: int
    stored_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class SealedPack:
    """A pack that is ready to be stored."""

    pack_id: bytes
    header: bytes
    parts: list[Buffer]
    size_bytes: int

    @property
    def name(self) -> str:
        """Return the object's name in the store."""
        return pack_name(self.pack_id)


@dataclass(slots=True)
class PackBuilder:
    """Collects blobs until there is enough for a pack; not thread-safe."""

    payloads: list[Buffer] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, kind: Kind, blob_id: bytes, size_bytes: int, encoded: Encoded) -> None:
        """Append one blob."""
        self.add_stored(KIND_CODES[kind], blob_id, size_bytes, encoded.codec, encoded.payload)

    def add_stored(
        self, kind: int, blob_id: bytes, size_bytes: int, codec: int, payload: Buffer
    ) -> None:
        """Append one blob in its stored form, as it comes out of another pack."""
        self.entries.append(ENTRY.pack(blob_id, kind, codec, size_bytes, len(payload)))
        self.payloads.append(payload)
        self.size_bytes += len(payload)

    def seal(self) -> SealedPack:
        """Return the finished pack."""
        header = b"".join(self.entries)
        parts = [*self.payloads, header, _TRAILER.pack(len(header), _MAGIC)]
        size_bytes = self.size_bytes + len(header) + TRAILER_BYTES
        return SealedPack(hash_of(header), header, parts, size_bytes)


def pack_name(pack_id: bytes) -> str:
    """Return the object name of a pack."""
    text = pack_id.hex()
    return f"data/{text[:2]}/{text}"


def parse_header(header: bytes, pack_id: bytes) -> Iterator[PackEntry]:
    """Yield the entries of a pack's header after checking it against the pack's name."""
    if hash_of(header) != pack_id or len(header) % ENTRY.size:
        raise IntegrityError(f"the header of pack {pack_name(pack_id)!r} does not match its name")
    offset_bytes = 0
    for blob_id, kind, codec, size_bytes, stored_bytes in ENTRY.iter_unpack(header):
        if size_bytes > MAX_BLOB_BYTES or stored_bytes > MAX_BLOB_BYTES:
            raise IntegrityError(f"pack {pack_name(pack_id)!r} names a blob of {size_bytes} bytes")
        yield PackEntry(blob_id, kind, codec, size_bytes, stored_bytes, offset_bytes)
        offset_bytes += stored_bytes


def header_length(trailer: bytes, name: str) -> int:
    """Return the length of the header from the last bytes of a pack."""
    if len(trailer) == TRAILER_BYTES:
        length, magic = _TRAILER.unpack(trailer)
        if magic == _MAGIC:
            return int(length)
    raise IntegrityError(f"{name!r} does not end as a pack does; it is damaged or cut short")


__all__ = [
    "ENTRY",
    "PACK_BYTES",
    "TRAILER_BYTES",
    "PackBuilder",
    "PackEntry",
    "SealedPack",
    "header_length",
    "pack_name",
    "parse_header",
]
