"""From the extents that are wanted to the reads that bring them: few, long, and none twice.

Blobs that lie near one another in a pack come in one request; a blob that is wanted at several
places is read and checked once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchmig.errors import IntegrityError
from torchmig.repo.extents import Row
from torchmig.repo.index import Index, Location
from torchmig.repo.pack import pack_name

_GAP_BYTES = 256 << 10  # reading over a gap this long costs less than a second request


class Wanted(NamedTuple):
    """A blob that a read brings, and the stream offsets that it goes to."""

    blob_id: bytes
    offset_bytes: int  # in the pack
    stored_bytes: int
    size_bytes: int
    codec: int
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Read:
    """One ranged read of a pack and the blobs that lie in it."""

    name: str
    offset_bytes: int
    size_bytes: int
    blobs: list[Wanted]

    @property
    def weight_bytes(self) -> int:
        """Return the memory that this read takes until its blobs are used."""
        return self.size_bytes + max(blob.size_bytes for blob in self.blobs)


def locate(index: Index, blob_id: bytes, size_bytes: int) -> Location:
    """Return where a blob lies that is to have this size."""
    location = index.find(blob_id)
    if location is None:
        raise IntegrityError(
            f"blob {blob_id.hex()[:16]!r} is in no index of the repository; run 'torchmig check'"
        )
    if location.size_bytes != size_bytes:
        raise IntegrityError(
            f"blob {blob_id.hex()[:16]!r} has {location.size_bytes} bytes, not {size_bytes}"
        )
    return location


def plan_reads(index: Index, extents: Iterable[Row], max_read_bytes: int) -> list[Read]:
    """Return the reads for `extents`, ordered by the first stream offset that each one serves."""
    # Plain tuples of plain values: the garbage collector does not look at those again and again.
    by_pack: dict[bytes, list[tuple[int, int, bytes, int, int, int]]] = defaultdict(list)
    for start, size_bytes, blob_id in extents:
        pack_id, offset, stored_bytes, _, codec = locate(index, blob_id, size_bytes)
        by_pack[pack_id].append((offset, start, blob_id, stored_bytes, size_bytes, codec))
    reads: list[Read] = []
    for pack_id, rows in by_pack.items():
        rows.sort()
        members: list[Wanted] = []
        last = -1
        for offset, start, blob_id, stored_bytes, size_bytes, codec in rows:
            if offset == last:  # the same blob once more
                members[-1].offsets.append(start)
            else:
                members.append(Wanted(blob_id, offset, stored_bytes, size_bytes, codec, [start]))
                last = offset
        reads += _cut(pack_name(pack_id), members, max_read_bytes)
    reads.sort(key=lambda read: min(blob.offsets[0] for blob in read.blobs))
    return reads


def _cut(name: str, members: list[Wanted], max_read_bytes: int) -> Iterator[Read]:
    """Yield reads of neighbouring blobs, none longer than allowed unless by a single blob."""
    first = 0
    start = end = members[0].offset_bytes
    for number, wanted in enumerate(members):
        offset, stored_bytes = wanted.offset_bytes, wanted.stored_bytes
        is_far = offset - end > _GAP_BYTES
        is_long = offset + stored_bytes - start > max_read_bytes
        if number > first and (is_far or is_long):
            yield Read(name, start, end - start, members[first:number])
            first, start = number, offset
        end = offset + stored_bytes
    yield Read(name, start, end - start, members[first:])
