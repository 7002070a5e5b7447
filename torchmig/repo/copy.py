"""Copying a snapshot from one repository to another, blob by blob in the stored form.

A blob is checked against its hash on the way, so that damage does not spread, but it is not
compressed again. The manifest goes last and keeps its id.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchmig.repo.blob import Kind
from torchmig.repo.manifest import Manifest
from torchmig.repo.plan import Wanted
from torchmig.repo.repository import Repository
from torchmig.store import Buffer

Advance = Callable[[int], None]


@dataclass(slots=True)
class CopyReport:
    """What one copy sent."""

    was_there: bool = False
    sent_blobs: int = 0
    sent_bytes: int = 0


def copy_snapshot(
    source: Repository,
    target: Repository,
    snapshot_id: str,
    advance: Advance = lambda size_bytes: None,
) -> CopyReport:
    """Copy one snapshot; does nothing if the target has it."""
    report = CopyReport()
    manifest = source.load(snapshot_id)
    if snapshot_id in target.snapshot_ids():
        report.was_there = True
        return report
    with source.reader(manifest) as reader, target.writer() as writer:
        for stream in manifest.streams:
            extents = reader.rows(stream)
            for kind, wanted in (
                (Kind.TREE, reader.tree_rows(stream)),
                (Kind(stream.kind), extents),
            ):
                missing = {row[2]: row for row in wanted if not writer.has(row[2])}

                def send(
                    blob: Wanted, data: Buffer, payload: memoryview, kind: Kind = kind
                ) -> None:
                    writer.add_stored(kind, blob.blob_id, blob.size_bytes, blob.codec, payload)

                reader.for_each_stored(stream, list(missing.values()), send)
                report.sent_blobs += len(missing)
            advance(sum(row[1] for row in extents))
    report.sent_bytes = writer.stats.stored_bytes
    _commit(target, manifest)
    return report


def _commit(target: Repository, manifest: Manifest) -> None:
    copied = target.commit(manifest)
    if copied != manifest.id:  # the same bytes have the same name
        raise AssertionError(f"snapshot {manifest.id} became {copied}")
