"""Extents: which blob lies at which offset of a stream.

A stream of a few extents keeps them in the manifest. A long one keeps them in tree blobs, named in
the manifest, so that manifests stay small and are read fast however many bytes a snapshot has.

Tree blob: `count (4) | offsets (8 each) | sizes (4 each) | ids (32 each)`, little endian.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from torchmig.errors import IntegrityError
from torchmig.repo.blob import ID_BYTES, MAX_BLOB_BYTES

INLINE_EXTENTS = 8
TREE_EXTENTS = 4096
_COUNT = struct.Struct("<I")
_EXTENT_BYTES = 8 + 4 + ID_BYTES
MAX_OFFSET = (1 << 63) - 1  # what a file offset can be


Row: TypeAlias = tuple[int, int, bytes]
"""An extent as a plain tuple, for lists of millions."""


class Extent(NamedTuple):
    """`size_bytes` bytes at `offset_bytes` of a stream are the blob `blob_id`."""

    offset_bytes: int
    size_bytes: int
    blob_id: bytes


def encode_trees(extents: Sequence[Row]) -> Iterator[bytes]:
    """Yield the tree blobs of extents that are sorted by offset."""
    for start in range(0, len(extents), TREE_EXTENTS):
        part = extents[start : start + TREE_EXTENTS]
        count = len(part)
        yield b"".join(
            [
                _COUNT.pack(count),
                struct.pack(f"<{count}Q", *[extent[0] for extent in part]),
                struct.pack(f"<{count}I", *[extent[1] for extent in part]),
                *[extent[2] for extent in part],
            ]
        )


def decode_tree(data: bytes | bytearray | memoryview) -> list[Row]:
    """Return the extents of one tree blob."""
    if len(data) < _COUNT.size:
        raise IntegrityError("a tree blob is too short")
    (count,) = _COUNT.unpack_from(data)
    if len(data) != _COUNT.size + count * _EXTENT_BYTES:
        raise IntegrityError(f"a tree blob of {len(data)} bytes cannot hold {count} extents")
    offsets = struct.unpack_from(f"<{count}Q", data, _COUNT.size)
    sizes = struct.unpack_from(f"<{count}I", data, _COUNT.size + 8 * count)
    ids = bytes(data[_COUNT.size + 12 * count :])
    blob_ids = [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]
    return list(zip(offsets, sizes, blob_ids, strict=True))


def check_extents(extents: Iterable[Row], size_bytes: int) -> None:
    """Raise `IntegrityError` unless extents are in order, apart and inside the stream."""
    end = 0
    for offset_bytes, length, blob_id in extents:
        if offset_bytes < end or not 0 < length <= MAX_BLOB_BYTES or len(blob_id) != ID_BYTES:
            raise IntegrityError(f"extents overlap or are out of order at offset {offset_bytes}")
        end = offset_bytes + length
    if end > size_bytes:
        raise IntegrityError(f"an extent ends at {end}, beyond the stream's {size_bytes} bytes")
