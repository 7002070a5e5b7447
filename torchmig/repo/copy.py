"""Copying a snapshot from one repository to another, blob by blob in the stored form.

A blob is checked against its hash on the way, so that damage does not spread, but it is not
compressed again. The manifest goes last and keeps its id.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchmig.errors import DeadlineMissedError
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.blob import Kind
from torchmig.repo.manifest import Manifest, Stream
from torchmig.repo.plan import Wanted
from torchmig.repo.reader import Reader
from torchmig.repo.repository import Repository
from torchmig.repo.writer import Writer
from torchmig.store import Buffer

_STEP_BLOBS = 1024  # how much is sent between two looks at the clock


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
    advance: Advance = unheard,
) -> CopyReport:
    """Copy one snapshot; does nothing if the target has it."""
    manifest = source.load(snapshot_id)
    if snapshot_id in target.snapshot_ids():
        return CopyReport(was_there=True)
    with target.hold():
        report = copy_streams(source, target, manifest, manifest.streams, advance)
        copied = target.commit(replace(manifest, id=""))
    if copied != snapshot_id:  # the same bytes have the same name
        raise AssertionError(f"snapshot {snapshot_id} became {copied}")
    return report


def copy_streams(
    source: Repository,
    target: Repository,
    manifest: Manifest,
    streams: Iterable[Stream],
    advance: Advance = unheard,
) -> CopyReport:
    """Copy the blobs of some streams of a snapshot that the target lacks.

    What is sent is indexed also if `advance`, which may raise, ends the copy early.
    """
    report = CopyReport()
    stopped: Exception | None = None
    with source.reader(manifest) as reader, target.writer() as writer:
        try:
            for stream in streams:
                report.sent_blobs += _copy_stream(reader, writer, stream, advance)
        except DeadlineMissedError as error:
            stopped = error  # the writer ends in good order first
    report.sent_bytes = writer.stats.stored_bytes
    if stopped is not None:
        raise stopped
    return report


def _copy_stream(reader: Reader, writer: Writer, stream: Stream, advance: Advance) -> int:
    rows = reader.rows(stream)
    sent = 0
    for kind, wanted in ((Kind.TREE, reader.tree_rows(stream)), (Kind(stream.kind), rows)):
        missing = {row[2]: row for row in wanted if not writer.has(row[2])}

        def send(blob: Wanted, data: Buffer, payload: memoryview, kind: Kind = kind) -> None:
            writer.add_stored(kind, blob.blob_id, blob.size_bytes, blob.codec, payload)

        todo = list(missing.values())
        for start in range(0, len(todo), _STEP_BLOBS):
            part = todo[start : start + _STEP_BLOBS]
            reader.for_each_stored(stream, part, send)
            advance(sum(row[1] for row in part) if kind is not Kind.TREE else 0)
        sent += len(missing)
        if kind is not Kind.TREE:
            advance(sum(row[1] for row in rows) - sum(row[1] for row in todo))
    return sent
