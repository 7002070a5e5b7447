"""A repository on this node in front of a distant one.

A suspend under a deadline must be durable soon, and the nearest disk is the soonest. So snapshots
are written into a folder on the node first, a whole repository of its own, and copied to the
distant one afterwards. At every moment it can be said which of the two holds a snapshot; an upload
that was broken off goes on from where it was, also by `torchmig copy`. A restore reads what is at
hand and fetches the rest.

Several nodes: each one's folder holds the blobs of its own ranks and the manifest; each one uploads
its ranks, then the coordinator commits to the distant repository.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from torchmig.errors import (
    DeadlineMissedError,
    RepositoryLockedError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
    StoreError,
)
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.copy import copy_streams
from torchmig.repo.extents import MAX_OFFSET, Row
from torchmig.repo.manifest import Manifest, Stream
from torchmig.repo.memory import MappedFile
from torchmig.repo.prune import prune
from torchmig.repo.reader import Mapping, Reader
from torchmig.repo.repository import Repository, Summary
from torchmig.repo.writer import Writer

_log = logging.getLogger(__name__)


class Reached(StrEnum):
    """Where a snapshot is durable."""

    NOWHERE = "nowhere"
    NODE = "node"  # in the folder of this node only
    REPOSITORY = "repository"  # in the distant repository


@dataclass(slots=True)
class UploadReport:
    """What an upload sent."""

    sent_blobs: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


class LocalCache:
    """A folder on this node in front of a repository."""

    def __init__(
        self, open_distant: Callable[[], Repository], folder: Path, size_bytes: int | None = None
    ) -> None:
        self._open_distant = open_distant
        self._distant: Repository | None = None
        self.near = Repository.open(str(folder), create=True)
        self.near.mark_as_node_folder()
        self._size_bytes = size_bytes

    def __enter__(self) -> "LocalCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def distant(self) -> Repository:
        """The distant repository; contacted when first asked for."""
        if self._distant is None:
            self._distant = self._open_distant()
        return self._distant

    def close(self) -> None:
        """Give up locks and connections of both."""
        self.near.close()
        if self._distant is not None:
            self._distant.close()

    def writer(self, *, budget_bytes: int | None = None, threads: int | None = None) -> Writer:
        """Return a writer into the folder; what it wrote is durable on this node."""
        return self.near.writer(budget_bytes=budget_bytes, threads=threads)

    def keep(self, manifest: Manifest) -> str:
        """Commit to the folder of this node and return the id.

        Blobs of ranks on other nodes need not be here.
        """
        return self.near.commit(manifest)

    def upload(
        self, manifest: Manifest, ranks: Iterable[int] | None = None, *,
        deadline_seconds: float | None = None, advance: Advance = unheard,
    ) -> UploadReport:  # fmt: skip
        """Send the blobs of some ranks, by default all, to the distant repository.

        Raises:
            DeadlineMissedError: Not done in time; what was sent stays, and the next call goes on.
            StoreError: The distant repository cannot be reached.
        """
        begun = time.monotonic()
        chosen = None if ranks is None else set(ranks)
        streams = [
            stream
            for section in manifest.ranks
            if chosen is None or section.rank in chosen
            for stream in section.streams
        ]

        def advance_in_time(size_bytes: int) -> None:
            spent = time.monotonic() - begun
            if deadline_seconds is not None and spent > deadline_seconds:
                raise DeadlineMissedError(
                    f"the upload to {self.distant.url!r} was not done within "
                    f"{deadline_seconds:g} s: the snapshot is durable on this node only, in "
                    f"{self.near.url!r}; 'torchmig copy' from there goes on"
                )
            advance(size_bytes)

        copied = copy_streams(self.near, self.distant, manifest, streams, advance_in_time)
        self.trim()
        return UploadReport(copied.sent_blobs, copied.sent_bytes, time.monotonic() - begun)

    def commit(self, manifest: Manifest) -> str:
        """Commit to the distant repository, once all nodes have uploaded, and make room here."""
        snapshot_id = self.distant.commit(manifest)
        self.trim()
        return snapshot_id

    def reached(self, snapshot_id: str) -> Reached:
        """Tell where a snapshot is durable by now."""
        if snapshot_id in self.distant.snapshot_ids():
            return Reached.REPOSITORY
        return Reached.NODE if snapshot_id in self.near.snapshot_ids() else Reached.NOWHERE

    def pending(self) -> list[Summary]:
        """Return the snapshots that only this node has, the oldest first."""
        there = set(self.distant.snapshot_ids())
        return [summary for summary in self.near.snapshots() if summary.id not in there]

    def load(self, reference: str, job: str | None = None) -> Manifest:
        """Return a snapshot of either; "latest" is the later one of both.

        If the distant repository cannot be reached, what this node has is all there is.
        """
        found: list[Manifest] = []
        with suppress(SnapshotNotFoundError):
            found.append(self.near.load(reference, job))
        try:
            found.append(self.distant.load(reference, job))
        except SnapshotNotFoundError:
            pass
        except (StoreError, RepositoryNotFoundError) as error:
            if not found:
                raise
            _log.warning("looking on this node only: %s", error)
        if not found:
            raise SnapshotNotFoundError(
                f"there is no snapshot {reference!r} in {self.distant.url!r} nor in "
                f"{self.near.url!r}"
            )
        if len({manifest.id for manifest in found}) > 1 and reference != "latest":
            raise SnapshotNotFoundError(f"snapshot {reference!r} is ambiguous; write more of it")
        return max(found, key=lambda manifest: manifest.created)

    @contextmanager
    def reader(
        self, manifest: Manifest, *, budget_bytes: int | None = None, threads: int | None = None,
        advance: Advance = unheard,
    ) -> Iterator["Nearest"]:  # fmt: skip
        """Give a reader that takes each stream from the folder if all of it is there."""
        with ExitStack() as stack:

            def open_in(repo: Repository) -> Reader:
                reader = repo.reader(
                    manifest, budget_bytes=budget_bytes, threads=threads, advance=advance
                )
                return stack.enter_context(reader)

            yield Nearest(open_in(self.near), lambda: open_in(self.distant))

    def trim(self) -> int:
        """Forget the oldest snapshots here that the distant repository has, down to the size.

        Returns:
            How many bytes that freed.
        """
        if self._size_bytes is None:
            return 0
        before = self._used_bytes()
        safe = set(self.distant.snapshot_ids())
        summaries = [summary for summary in self.near.snapshots() if summary.id in safe]
        while self._used_bytes() > self._size_bytes and summaries:
            self.near.forget(summaries.pop(0).id)
            try:
                prune(self.near, max_unused=0)
            except RepositoryLockedError as error:
                _log.info("the folder %r is trimmed next time: %s", self.near.url, error)
                break
        return before - self._used_bytes()

    def _used_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.near.store.list(""))


class Nearest(Reader):
    """Reads each stream from where it is nearest."""

    def __init__(self, near: Reader, open_distant: Callable[[], Reader]) -> None:
        # Nothing of its own: every method passes on to one of two readers.
        self._near = near
        self._open_distant = open_distant
        self._distant: Reader | None = None
        self._lock = threading.Lock()

    def restore(
        self,
        stream: Stream,
        target: int | str | Path | MappedFile,
        mapping: Sequence[Mapping] | None = None,
        extents: list[Row] | None = None,
    ) -> None:
        self._for(stream).restore(stream, target, mapping, extents)

    def read(self, stream: Stream) -> bytes:
        return self._for(stream).read(stream)

    def chunks(
        self, stream: Stream, start_bytes: int = 0, stop_bytes: int = MAX_OFFSET
    ) -> Iterator[tuple[int, memoryview]]:
        return self._for(stream).chunks(stream, start_bytes, stop_bytes)

    def read_range(self, stream: Stream, offset_bytes: int, size_bytes: int) -> bytes:
        return self._for(stream).read_range(stream, offset_bytes, size_bytes)

    def verify(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            self._for(stream).verify([stream])

    def rows(self, stream: Stream) -> list[Row]:
        return self._for(stream).rows(stream)

    def has(self, stream: Stream) -> bool:
        return self._for(stream).has(stream)

    def _for(self, stream: Stream) -> Reader:
        if self._near.has(stream):
            return self._near
        with self._lock:
            if self._distant is None:
                self._distant = self._open_distant()
            return self._distant
