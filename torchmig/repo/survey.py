"""Looking into a repository: what a snapshot holds, what two share, what all of it takes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchmig.repo.manifest import Manifest
from torchmig.repo.repository import Repository


@dataclass(slots=True)
class Holding:
    """What one rank holds of one kind."""

    rank: int
    kind: str
    streams: int = 0
    size_bytes: int = 0  # without holes and zeros
    shared_bytes: int = 0  # of which another rank of the snapshot has the same
    stored_bytes: int = 0  # compressed size of the blobs that no earlier row has


@dataclass(slots=True)
class Difference:
    """What one rank (None: all of them) has of one kind in two snapshots."""

    rank: int | None
    kind: str
    removed_bytes: int = 0  # only in the first
    added_bytes: int = 0  # only in the second
    common_bytes: int = 0


@dataclass(slots=True)
class Count:
    """What some snapshots take."""

    snapshots: int = 0
    restore_bytes: int = 0
    unique_bytes: int = 0
    stored_bytes: int = 0
    blobs: int = 0
    objects: int = 0  # of the whole repository
    repository_bytes: int = 0

    @property
    def deduplication_ratio(self) -> float:
        """Return how many bytes are restored for one different byte."""
        return self.restore_bytes / self.unique_bytes if self.unique_bytes else 1.0

    @property
    def compression_ratio(self) -> float:
        """Return how many different bytes there are for one stored byte."""
        return self.unique_bytes / self.stored_bytes if self.stored_bytes else 1.0


Owned = dict[tuple[int, str], list[tuple[bytes, int]]]


def holdings(repo: Repository, manifest: Manifest) -> list[Holding]:
    """Return what a snapshot holds for each rank and kind."""
    owned = _owned(repo, manifest)
    ranks_of: dict[bytes, int] = {}  # the one rank that has a blob, or -1 for several
    for (rank, _), blobs in owned.items():
        for blob_id, _ in blobs:
            ranks_of[blob_id] = rank if ranks_of.get(blob_id, rank) == rank else -1
    index = repo.index()
    counted: set[bytes] = set()
    found = []
    streams: dict[tuple[int, str], int] = defaultdict(int)
    for section in manifest.ranks:
        for stream in section.streams:
            streams[section.rank, stream.kind] += 1
    for (rank, kind), blobs in sorted(owned.items()):
        holding = Holding(rank, kind, streams[rank, kind])
        for blob_id, size_bytes in blobs:
            holding.size_bytes += size_bytes
            if ranks_of[blob_id] == -1:
                holding.shared_bytes += size_bytes
            if blob_id not in counted:
                counted.add(blob_id)
                location = index.find(blob_id)
                holding.stored_bytes += location.stored_bytes if location else 0
        found.append(holding)
    return found


def compare(repo: Repository, first: Manifest, second: Manifest) -> list[Difference]:
    """Return for each rank and kind what only one snapshot has; the last row is the total."""
    before, after = _owned(repo, first), _owned(repo, second)
    known_before = {blob_id for blobs in before.values() for blob_id, _ in blobs}
    known_after = {blob_id for blobs in after.values() for blob_id, _ in blobs}
    found = []
    total = Difference(None, "all")
    for key in sorted(before.keys() | after.keys()):
        row = Difference(*key)
        for blob_id, size_bytes in before.get(key, []):
            if blob_id not in known_after:
                row.removed_bytes += size_bytes
        for blob_id, size_bytes in after.get(key, []):
            if blob_id in known_before:
                row.common_bytes += size_bytes
            else:
                row.added_bytes += size_bytes
        total.removed_bytes += row.removed_bytes
        total.added_bytes += row.added_bytes
        total.common_bytes += row.common_bytes
        found.append(row)
    return [*found, total]


def count(repo: Repository, manifests: Iterable[Manifest]) -> Count:
    """Return what snapshots restore to and what is stored for that."""
    found = Count()
    index = repo.index()
    counted: set[bytes] = set()
    for manifest in manifests:
        found.snapshots += 1
        for blobs in _owned(repo, manifest).values():
            for blob_id, size_bytes in blobs:
                found.restore_bytes += size_bytes
                if blob_id in counted:
                    continue
                counted.add(blob_id)
                found.unique_bytes += size_bytes
                location = index.find(blob_id)
                found.stored_bytes += location.stored_bytes if location else 0
    found.blobs = len(counted)
    for entry in repo.store.list(""):
        found.objects += 1
        found.repository_bytes += entry.size_bytes
    return found


def _owned(repo: Repository, manifest: Manifest) -> Owned:
    owned: Owned = defaultdict(list)
    with repo.reader(manifest) as reader:
        for section in manifest.ranks:
            for stream in section.streams:
                owned[section.rank, stream.kind] += [
                    (blob_id, size_bytes) for _, size_bytes, blob_id in reader.rows(stream)
                ]
    return owned
