"""Checking: does everything that snapshots promise exist, and does it match its hash.

Without reading data: config, index, manifests, trees, and that every pack is there in full length.
With it: every byte of every object, or of a part of the packs. Damage is named by object and by the
snapshots that it hits.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchmig.errors import (
    IntegrityError,
    ObjectMissingError,
    StoreError,
    TorchmigError,
    UsageError,
)
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.blob import Decoder
from torchmig.repo.index import INDEX_PREFIX, decode_index
from torchmig.repo.locks import LOCK_PREFIX, check_lock
from torchmig.repo.manifest import SNAPSHOT_PREFIX, Manifest
from torchmig.repo.pack import TRAILER_BYTES, header_length, pack_name, parse_header
from torchmig.repo.pool import Pool, default_threads
from torchmig.repo.repository import CONFIG, NODE_MARK, Repository
from torchmig.repo.usage import load_all

_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage: an object, what is wrong with it, and the snapshots that need it."""

    name: str
    reason: str
    snapshot_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        hit = ", ".join(repr(snapshot_id[:8]) for snapshot_id in self.snapshot_ids)
        return f"{self.name!r}: {self.reason}" + (f" (hits snapshot {hit})" if hit else "")


@dataclass(slots=True)
class CheckReport:
    """What a check found."""

    snapshots: int = 0
    packs: int = 0
    blobs: int = 0
    read_packs: int = 0
    read_bytes: int = 0
    unused_objects: list[str] = field(default_factory=list)  # no damage: prune deletes them
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Subset:
    """Which packs are read: all, a random share, or the n-th of t equal parts."""

    share: float = 1.0
    part: int = 1
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> "Subset":
        """Return the subset that `5%` or `2/7` means."""
        try:
            if text.endswith("%") and 0 < float(text[:-1]) <= 100:
                return cls(share=float(text[:-1]) / 100)
            part, _, parts = text.partition("/")
            if 1 <= int(part) <= int(parts):
                return cls(part=int(part), parts=int(parts))
        except ValueError:
            pass
        raise UsageError(f"cannot read the subset {text!r}: write a share as 5% or a part as 2/7")

    def choose(self, pack_ids: list[bytes]) -> list[bytes]:
        """Return the chosen ones of `pack_ids`; parts are the same every time."""
        if self.parts > 1:
            return [
                pack_id
                for pack_id in pack_ids
                if int.from_bytes(pack_id[:8], "big") % self.parts == self.part - 1
            ]
        count = max(1, round(self.share * len(pack_ids))) if pack_ids else 0
        return random.sample(pack_ids, count)


class Checker:
    """One check of a repository."""

    def __init__(self, repo: Repository) -> None:
        self._repo = repo
        self._store = repo.store
        self._headers: dict[bytes, bytes] = {}
        self._report = CheckReport()
        self._may_lack_blobs = repo.is_node_folder()
        self._damaged: dict[bytes, list[tuple[str, str]]] = defaultdict(list)

    def run(self, read: Subset | None = None, advance: Advance = unheard) -> CheckReport:
        """Check everything; `read` says which packs are read in full."""
        report = self._report
        # The index first: a pack is there before the index names it, so that uploads at the same
        # time do not look like damage.
        for prefix in (INDEX_PREFIX, LOCK_PREFIX):
            self._check_small([entry.name for entry in self._store.list(prefix)])
        stored = {entry.name: entry.size_bytes for entry in self._store.list("")}
        self._note_unknown(stored)
        self._check_packs(stored)
        if read is not None:
            self._read_packs(read.choose(sorted(self._present(stored))), advance)
        manifests, errors = load_all(self._repo)
        for error in errors:
            self._add(Problem(SNAPSHOT_PREFIX, str(error)))
        report.snapshots = len(manifests)
        hit: dict[bytes, set[str]] = defaultdict(set)
        for manifest in manifests:
            self._check_snapshot(manifest, hit)
        for blob_id, found in self._damaged.items():
            for name, reason in found:
                hits = tuple(sorted(hit.get(blob_id, ())))
                self._add(Problem(name, reason, hits))
        return report

    def _check_small(self, names: list[str]) -> None:
        """Check index objects or locks."""
        for name in names:
            try:
                data = self._store.get(name)
                if name.startswith(LOCK_PREFIX):
                    check_lock(name, data)
                    continue
                for pack_id, header in decode_index(name, data):
                    self._headers[pack_id] = header
            except ObjectMissingError:
                continue  # a lock given up or an index replaced meanwhile
            except TorchmigError as error:
                self._add(Problem(name, str(error)))

    def _note_unknown(self, stored: dict[str, int]) -> None:
        known = ("data", INDEX_PREFIX, LOCK_PREFIX, SNAPSHOT_PREFIX, CONFIG, NODE_MARK)
        self._report.unused_objects += [
            name for name in sorted(stored) if name.partition("/")[0] not in known
        ]

    def _add(self, problem: Problem) -> None:
        if problem not in self._report.problems:
            self._report.problems.append(problem)

    def _check_packs(self, stored: dict[str, int]) -> None:
        self._report.packs = len(self._headers)
        names = set()
        for pack_id, header in list(self._headers.items()):
            name = pack_name(pack_id)
            names.add(name)
            try:
                entries = list(parse_header(header, pack_id))
            except IntegrityError as error:
                self._add(Problem(name, str(error)))
                del self._headers[pack_id]
                continue
            self._report.blobs += len(entries)
            size_bytes = sum(entry.stored_bytes for entry in entries)
            size_bytes += len(header) + TRAILER_BYTES
            if stored.get(name) == size_bytes:
                continue
            reason = (
                "is missing"
                if name not in stored
                else f"has {stored[name]} bytes where the index says {size_bytes}"
            )
            for entry in entries:
                self._damaged[entry.blob_id].append((name, reason))
        self._report.unused_objects += sorted(
            name for name in stored if name.startswith("data/") and name not in names
        )

    def _present(self, stored: dict[str, int]) -> Iterator[bytes]:
        return (pack_id for pack_id in self._headers if pack_name(pack_id) in stored)

    def _read_packs(self, pack_ids: list[bytes], advance: Advance) -> None:
        with Pool("check", default_threads(), _MEMORY_BYTES) as pool:
            for pack_id in pack_ids:
                header = self._headers[pack_id]
                size_bytes = sum(e.stored_bytes for e in parse_header(header, pack_id))

                def task(pack_id: bytes = pack_id, header: bytes = header) -> None:
                    advance(self._read_pack(pack_id, header))

                pool.submit(task, size_bytes)
            pool.wait_idle()

    def _read_pack(self, pack_id: bytes, header: bytes) -> int:
        name = pack_name(pack_id)
        entries = list(parse_header(header, pack_id))
        try:
            data = memoryview(self._store.get(name))
        except StoreError as error:
            for entry in entries:
                self._damaged[entry.blob_id].append((name, str(error)))
            return 0
        decoder = Decoder()
        for entry in entries:
            payload = data[entry.offset_bytes : entry.offset_bytes + entry.stored_bytes]
            try:
                decoder.decode(entry.blob_id, entry.codec, payload, entry.size_bytes)
            except IntegrityError as error:
                reason = f"blob {entry.blob_id.hex()[:16]!r} at {entry.offset_bytes}: {error}"
                self._damaged[entry.blob_id].append((name, reason))
        try:
            length = header_length(bytes(data[-TRAILER_BYTES:]), name)
            if data[-TRAILER_BYTES - length : -TRAILER_BYTES] != header:
                self._add(Problem(name, "its own header does not match its name"))
        except IntegrityError as error:
            self._add(Problem(name, str(error)))
        self._report.read_packs += 1
        self._report.read_bytes += len(data)
        return len(data)

    def _check_snapshot(self, manifest: Manifest, hit: dict[bytes, set[str]]) -> None:
        """Check that all blobs of a snapshot are known, and which damaged ones it needs."""
        name = f"{SNAPSHOT_PREFIX}/{manifest.id}"
        with self._repo.reader(manifest) as reader:
            for stream in manifest.streams:
                for tree in stream.trees:
                    if tree in self._damaged:
                        hit[tree].add(manifest.id)
                if self._may_lack_blobs and not reader.has(stream):
                    continue  # a stream of another node
                try:
                    for row in reader.rows(stream):
                        if row[2] in self._damaged:
                            hit[row[2]].add(manifest.id)
                        reader.locate(stream, row)
                except TorchmigError as error:
                    self._add(Problem(name, str(error), (manifest.id,)))
