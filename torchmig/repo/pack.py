"""Packs: objects that hold many blobs, so that a store is not asked once for every 64 KiB.

```
blob | blob | … | header | header length (4 bytes, little endian) | "TMIGPK01"
header = for each blob: id (32) kind (1) codec (1) size (4) stored size (4), little endian
```
A pack is named by the hash of its header. The blobs lie in the header's order without gaps.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from torchmig.errors import IntegrityError
from torchmig.repo.blob import MAX_BLOB_BYTES, hash_of
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
    buffer: bytearray  # what the parts are views of; may be used again once the pack is stored

    @property
    def name(self) -> str:
        """Return the object's name in the store."""
        return pack_name(self.pack_id)


class PackBuilder:
    """Collects blobs in a buffer until there is enough for a pack; not thread-safe."""

    def __init__(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._entries: list[bytes] = []
        self.size_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to store."""
        return not self._entries

    def has_room(self, stored_bytes: int) -> bool:
        """Tell whether a blob of that stored size can be added."""
        return self.size_bytes + stored_bytes <= len(self._buffer)

    def add(self, kind: int, blob_id: bytes, size_bytes: int, codec: int, payload: Buffer) -> None:
        """Append one blob in its stored form; the payload is copied."""
        end = self.size_bytes + len(payload)
        self._view[self.size_bytes : end] = payload
        self._entries.append(ENTRY.pack(blob_id, kind, codec, size_bytes, len(payload)))
        self.size_bytes = end

    def seal(self) -> SealedPack:
        """Return the finished pack."""
        header = b"".join(self._entries)
        trailer = _TRAILER.pack(len(header), _MAGIC)
        size_bytes = self.size_bytes + len(header) + TRAILER_BYTES
        parts: list[Buffer] = [self._view[: self.size_bytes], header, trailer]
        return SealedPack(hash_of(header), header, parts, size_bytes, self._buffer)


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
