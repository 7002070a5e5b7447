"""Making the index anew from the packs, for when an index object is damaged or lost.

Every pack carries its own header, so that the index is never more than a shortcut.
"""

from dataclasses import dataclass, field

from torchmig.errors import IntegrityError
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.blob import hash_of
from torchmig.repo.index import INDEX_PREFIX, encode_index
from torchmig.repo.locks import Lock, LockKind
from torchmig.repo.pack import TRAILER_BYTES, header_length, parse_header
from torchmig.repo.prune import PACKS_PER_INDEX
from torchmig.repo.repository import Repository

_TAIL_BYTES = 64 << 10  # holds the header of most packs, so that one read is enough


@dataclass(slots=True)
class RebuildReport:
    """What was found."""

    packs: int = 0
    blobs: int = 0
    skipped: list[str] = field(default_factory=list)  # why packs are not in the new index


def rebuild_index(
    repo: Repository, *, wait_seconds: float = 0.0, advance: Advance = unheard
) -> RebuildReport:
    """Write an index over all packs that are whole, then delete the old one."""
    report = RebuildReport()
    store = repo.store
    kind = LockKind.EXCLUSIVE
    with Lock.acquire(store, kind, "rebuild the index", wait_seconds=wait_seconds) as lock:
        try:
            packs: list[tuple[bytes, bytes]] = []
            for entry in store.list("data"):
                try:
                    pack_id, header, blobs = _read_header(repo, entry.name, entry.size_bytes)
                except IntegrityError as error:
                    report.skipped.append(str(error))
                    continue
                packs.append((pack_id, header))
                report.packs += 1
                report.blobs += blobs
                advance(entry.size_bytes)
            old = {entry.name for entry in store.list(INDEX_PREFIX)}
            new = set()
            for start in range(0, len(packs), PACKS_PER_INDEX):
                name, data = encode_index(packs[start : start + PACKS_PER_INDEX])
                store.put(name, [data])
                new.add(name)
            for name in old - new:
                store.delete(name)
        finally:
            lock.release()
    return report


def _read_header(repo: Repository, name: str, size_bytes: int) -> tuple[bytes, bytes, int]:
    tail_bytes = min(size_bytes, _TAIL_BYTES)
    tail = repo.store.get(name, size_bytes - tail_bytes, tail_bytes)
    length = header_length(tail[-TRAILER_BYTES:], name) + TRAILER_BYTES
    if length > size_bytes:
        raise IntegrityError(f"{name!r} is damaged: its header would be longer than itself")
    if length > tail_bytes:
        tail = repo.store.get(name, size_bytes - length, length)
    header = tail[-length:-TRAILER_BYTES]
    pack_id = hash_of(header)
    if not name.endswith(pack_id.hex()):
        raise IntegrityError(f"{name!r} is damaged: its header does not match its name")
    entries = list(parse_header(header, pack_id))
    if sum(entry.stored_bytes for entry in entries) + length != size_bytes:
        raise IntegrityError(f"{name!r} is damaged: it has not the length that its header says")
    return pack_id, header, len(entries)
