"""Where a job's snapshots go: a repository, and perhaps a folder on each node in front of it.

The agents of a job ask for a writer, a reader or a commit, and need not know which of both it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmig.errors import SnapshotNotFoundError
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.cache import LocalCache, UploadReport
from torchmig.repo.manifest import Manifest, RankSection
from torchmig.repo.reader import Reader
from torchmig.repo.repository import Repository
from torchmig.repo.writer import Writer
from torchmig.store import RetryPolicy

_RETRY_SECONDS = 300.0
_LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Depot:
    """An address, and the folder on each node that is written to first, if there is one."""

    address: str
    cache: str | None = None
    cache_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the form that goes to other agents."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "Depot":
        """Return the depot that another agent named."""
        return cls(**document)

    @property
    def first(self) -> str:
        """The address of the repository that blobs are written to first."""
        return self.cache or self.address

    def prepare(self) -> None:
        """Make the repository that is written to first, or see that it can be reached.

        Before anything is frozen, so that what is wrong with it costs the job nothing.
        """
        with Repository.open(self.first, create=True) as repo:
            if self.cache is not None:
                repo.mark_as_node_folder()

    @contextmanager
    def writing(self, threads: int | None = None) -> Iterator[Writer]:
        """Give a writer; what it wrote is durable here once the `with` block is left."""
        folder = self.cache or self.address
        with (
            Repository.open(folder, create=self.cache is not None) as repo,
            repo.writer(threads=threads) as writer,
        ):
            yield writer

    @contextmanager
    def reading(
        self, manifest: Manifest, advance: Advance = unheard, threads: int | None = None
    ) -> Iterator[Reader]:
        """Give a reader that takes what is at hand and fetches the rest.

        Args:
            manifest: The snapshot that is to be read.
            advance: Told of the bytes of streams as they are restored.
            threads: How many read, check and unpack; by default as many as there are cores.
        """
        if self.cache is None:
            with (
                Repository.open(self.address) as repo,
                repo.reader(manifest, threads=threads, advance=advance) as reader,
            ):
                yield reader
            return
        with (
            self._cached() as cache,
            cache.reader(manifest, threads=threads, advance=advance) as nearest,
        ):
            yield nearest

    @contextmanager
    def holding(self) -> Iterator[Repository]:
        """Give the repository that is committed to first, with prunes kept away from it."""
        with Repository.open(self.cache or self.address, create=True) as repo:
            if self.cache is not None:
                repo.mark_as_node_folder()
            with repo.hold():
                yield repo

    def load(self, reference: str, job: str | None = None) -> Manifest:
        """Return a snapshot by its id, the beginning of one, or "latest"."""
        if self.cache is None:
            with Repository.open(self.address) as repo:
                return repo.load(reference, job)
        # With something at hand nobody waits long for a server that is away.
        patience = None
        with Repository.open(self.cache, create=True) as near, suppress(SnapshotNotFoundError):
            near.resolve(reference, job)
            patience = _LOOK_SECONDS
        with self._cached(patience) as cache:
            return cache.load(reference, job)

    def keep(self, manifest: Manifest) -> str:
        """Commit to the folder of this node, which may lack blobs of other nodes."""
        with self._cached() as cache:
            return cache.keep(manifest)

    def upload(
        self, manifest: Manifest, sections: list[RankSection],
        deadline_seconds: float | None = None, advance: Advance = unheard,
    ) -> UploadReport:  # fmt: skip
        """Send the blobs of some ranks from this node's folder; see `LocalCache.upload`."""
        ranks = [section.rank for section in sections]
        with self._cached(deadline_seconds) as cache:
            return cache.upload(manifest, ranks, deadline_seconds=deadline_seconds, advance=advance)

    @contextmanager
    def delivering(self, deadline_seconds: float | None = None) -> Iterator[LocalCache]:
        """Hold the distant repository for uploads of all nodes and the commit that ends them."""
        with self._cached(deadline_seconds) as cache, cache.distant.hold():
            yield cache

    def _cached(self, deadline_seconds: float | None = None) -> LocalCache:
        assert self.cache is not None
        patience = _RETRY_SECONDS
        if deadline_seconds is not None:
            patience = max(0.0, min(patience, deadline_seconds))
        policy = RetryPolicy(deadline_seconds=patience)
        return LocalCache(
            lambda: Repository.open(self.address, create=True, policy=policy),
            Path(self.cache),
            self.cache_bytes,
        )
