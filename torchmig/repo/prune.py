"""Pruning: delete what no snapshot uses, in an order that a crash at any point leaves valid.

1. what is still used in packs with waste, and many small packs, goes into new packs
2. a new index over all packs that stay is written
3. the old index objects are deleted
4. packs that the new index does not name are deleted

Before 3 the old index is true, after 3 the new one is. All under a lock that excludes writers.
"""

import logging
from dataclasses import dataclass, field

from torchmig.errors import IntegrityError, StoreError
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.blob import KIND_CODES, MAX_BLOB_BYTES, Decoder, Kind
from torchmig.repo.buffers import BufferPool
from torchmig.repo.fetch import fetch_all
from torchmig.repo.index import INDEX_PREFIX, decode_index, encode_index
from torchmig.repo.locks import LOCK_PREFIX, STALE_SECONDS, Lock, LockKind
from torchmig.repo.pack import (
    PACK_BYTES,
    TRAILER_BYTES,
    PackBuilder,
    PackEntry,
    SealedPack,
    pack_name,
    parse_header,
)
from torchmig.repo.repository import Repository
from torchmig.repo.usage import load_all_or_refuse, used_blobs

_log = logging.getLogger(__name__)
PACKS_PER_INDEX = 1024
_SMALL_BYTES = PACK_BYTES // 8
_MANY_SMALL = 16
_TREE = KIND_CODES[Kind.TREE]


@dataclass(slots=True)
class PruneReport:
    """What a prune did, or would do."""

    kept_packs: int = 0
    deleted_packs: int = 0
    repacked_packs: int = 0
    unknown_packs: int = 0  # of `deleted_packs`: in no index, left by uploads that died
    used_bytes: int = 0  # stored size of blobs in use
    unused_bytes: int = 0  # stored size of the others, before
    freed_bytes: int = 0
    dry_run: bool = False


@dataclass(slots=True)
class _Pack:
    pack_id: bytes
    header: bytes
    used: list[PackEntry] = field(default_factory=list)
    used_bytes: int = 0
    size_bytes: int = 0

    @property
    def unused_bytes(self) -> int:
        return self.size_bytes - self.used_bytes - len(self.header) - TRAILER_BYTES


def prune(
    repo: Repository, *, dry_run: bool = False, max_unused: float = 0.05,
    wait_seconds: float = 0.0, advance: Advance = unheard,
) -> PruneReport:  # fmt: skip
    """Delete what no snapshot uses.

    Args:
        repo: where.
        dry_run: only tell what would be done.
        max_unused: how much waste may stay in packs that are partly used, as a share of the used
            bytes; less waste means more copying.
        wait_seconds: how long to wait for uploads to end.
        advance: told of bytes as they are copied.
    """
    if dry_run:
        return _Prune(repo, advance).run(max_unused, dry_run=True)
    kind = LockKind.EXCLUSIVE
    with Lock.acquire(repo.store, kind, "prune", wait_seconds=wait_seconds) as lock:
        try:
            return _Prune(repo, advance, lock).run(max_unused, dry_run=False)
        finally:
            lock.release()


class _Prune:
    def __init__(self, repo: Repository, advance: Advance, lock: Lock | None = None) -> None:
        self._repo = repo
        self._store = repo.store
        self._advance = advance
        self._lock = lock
        self._report = PruneReport()
        self._decoder = Decoder()

    def run(self, max_unused: float, *, dry_run: bool) -> PruneReport:
        report = self._report
        report.dry_run = dry_run
        old_index, packs = self._read_index()
        stored = {entry.name: entry.size_bytes for entry in self._store.list("data")}
        manifests = load_all_or_refuse(self._repo, "prune")
        wanted = set(used_blobs(self._repo, manifests))
        self._assign(packs, wanted, stored)
        kept, repacked, emptied = _choose(list(packs.values()), max_unused)
        names = {pack_name(pack.pack_id) for pack in packs.values()}
        unknown = [name for name in stored if name not in names]
        doomed = [pack_name(pack.pack_id) for pack in (*repacked, *emptied)] + unknown
        doomed = [name for name in doomed if name in stored]
        report.kept_packs = len(kept)
        report.deleted_packs = len(doomed)
        report.repacked_packs = len(repacked)
        report.unknown_packs = len(unknown)
        report.used_bytes = sum(pack.used_bytes for pack in packs.values())
        report.unused_bytes = sum(pack.unused_bytes for pack in packs.values())
        report.unused_bytes += sum(stored[name] for name in unknown)
        report.freed_bytes = sum(stored[name] for name in doomed)
        report.freed_bytes -= sum(pack.used_bytes for pack in repacked)
        if dry_run:
            return report
        if repacked or emptied or len(old_index) > 1 + len(packs) // PACKS_PER_INDEX:
            new = self._repack(repacked)
            new_index = self._write_index([*[(p.pack_id, p.header) for p in kept], *new])
            self._still_locked()
            for name in old_index - new_index:
                self._store.delete(name)
            # A repacked pack that got the name of an old one stays.
            staying = {pack_name(pack_id) for pack_id, _ in new}
            doomed = [name for name in doomed if name not in staying]
        self._still_locked()
        for name in doomed:
            self._store.delete(name)
        self._clean_up()
        return report

    def _read_index(self) -> tuple[set[str], dict[bytes, _Pack]]:
        names = {entry.name for entry in self._store.list(INDEX_PREFIX)}
        packs: dict[bytes, _Pack] = {}
        for name, data in fetch_all(self._store, sorted(names)):
            for pack_id, header in decode_index(name, data):
                packs[pack_id] = _Pack(pack_id, header)
        return names, packs

    def _assign(
        self, packs: dict[bytes, _Pack], wanted: set[bytes], stored: dict[str, int]
    ) -> None:
        """Give each wanted blob to one pack; other copies of it count as waste."""
        missing = set(wanted)
        for pack in packs.values():
            pack.size_bytes = stored.get(pack_name(pack.pack_id), 0)
            if not pack.size_bytes:
                continue  # an index may name a pack that a prune that died has deleted
            for entry in parse_header(pack.header, pack.pack_id):
                if entry.blob_id in missing:
                    missing.discard(entry.blob_id)
                    pack.used.append(entry)
                    pack.used_bytes += entry.stored_bytes
        if missing and not self._repo.is_node_folder():
            raise IntegrityError(
                f"cannot prune: {len(missing)} blobs that snapshots use are missing, "
                f"{next(iter(missing)).hex()[:16]!r} for one; run 'torchmig check'"
            )

    def _repack(self, packs: list[_Pack]) -> list[tuple[bytes, bytes]]:
        """Copy what is used of packs into new ones and return their ids and headers."""
        buffers = BufferPool(PACK_BYTES + MAX_BLOB_BYTES)
        builders: dict[bool, PackBuilder] = {}
        new: list[tuple[bytes, bytes]] = []

        def put(sealed: SealedPack) -> None:
            self._store.put(sealed.name, sealed.parts)
            new.append((sealed.pack_id, sealed.header))
            buffers.give(sealed.buffer)

        for pack in packs:
            name = pack_name(pack.pack_id)
            data = memoryview(self._store.get(name))
            for entry in pack.used:
                payload = data[entry.offset_bytes : entry.offset_bytes + entry.stored_bytes]
                try:
                    self._decoder.decode(entry.blob_id, entry.codec, payload, entry.size_bytes)
                except IntegrityError as error:
                    raise IntegrityError(
                        f"cannot prune: blob {entry.blob_id.hex()[:16]!r} in {name!r} is damaged: "
                        f"{error}; run 'torchmig check --read-data'"
                    ) from error
                is_tree = entry.kind == _TREE
                if is_tree not in builders:
                    builders[is_tree] = PackBuilder(buffers.take())
                builder = builders[is_tree]
                builder.add(entry.kind, entry.blob_id, entry.size_bytes, entry.codec, payload)
                if builder.size_bytes >= PACK_BYTES:
                    put(builder.seal())
                    del builders[is_tree]
            self._advance(pack.used_bytes)
        for builder in builders.values():
            put(builder.seal())
        return new

    def _write_index(self, packs: list[tuple[bytes, bytes]]) -> set[str]:
        names = set()
        for start in range(0, len(packs), PACKS_PER_INDEX):
            name, data = encode_index(packs[start : start + PACKS_PER_INDEX])
            self._store.put(name, [data])
            names.add(name)
        return names

    def _still_locked(self) -> None:
        if self._lock is not None and not self._lock.refresh():
            raise StoreError(
                f"stopped pruning {self._store.url!r}: somebody has removed its lock; "
                "nothing is lost, prune again"
            )

    def _clean_up(self) -> None:
        self._report.freed_bytes += self._store.sweep(STALE_SECONDS)
        for entry in self._store.list(LOCK_PREFIX):
            if not entry.size_bytes:  # a look at the locks that was broken off
                self._store.delete(entry.name)


def _choose(packs: list[_Pack], max_unused: float) -> tuple[list[_Pack], list[_Pack], list[_Pack]]:
    """Return the packs to keep as they are, to repack, and to delete."""
    emptied = [pack for pack in packs if not pack.used]
    partly = [pack for pack in packs if pack.used and pack.unused_bytes > 0]
    kept = [pack for pack in packs if pack.used and pack.unused_bytes <= 0]
    allowed = max_unused * sum(pack.used_bytes for pack in packs)
    # The least wasteful ones first: they may keep their waste as long as it is allowed.
    partly.sort(key=lambda pack: pack.unused_bytes / pack.size_bytes)
    repacked: list[_Pack] = []
    for pack in partly:
        if pack.unused_bytes <= allowed and not repacked:
            allowed -= pack.unused_bytes
            kept.append(pack)
        else:
            repacked.append(pack)
    # Each upload ends with packs that are not full; together they fill few.
    small = [pack for pack in kept if pack.size_bytes < _SMALL_BYTES]
    if len(small) > _MANY_SMALL:
        repacked += small
        kept = [pack for pack in kept if pack.size_bytes >= _SMALL_BYTES]
    return kept, repacked, emptied
