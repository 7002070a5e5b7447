"""A repository: snapshots of jobs in a store, each one a manifest over shared blobs.

```
config                     format version, hash, chunk sizes; written once
data/ab/abcd…              packs of blobs
index/<id>                 which blob lies where in which pack
snapshots/<id>             manifests; written last
locks/<id>                 who is at work
```
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torchmig.errors import (
    IntegrityError,
    ObjectMissingError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
    SnapshotUnfitError,
    TorchmigError,
)
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.blob import CHUNK_BYTES, hash_of
from torchmig.repo.fetch import fetch_all
from torchmig.repo.index import Index
from torchmig.repo.manifest import (
    SNAPSHOT_PREFIX,
    JobName,
    Manifest,
    load_manifest,
    snapshot_name,
)
from torchmig.repo.reader import DEFAULT_BUDGET_BYTES, Reader
from torchmig.repo.session import WriteSession
from torchmig.repo.writer import Writer
from torchmig.store import RetryPolicy, Store, open_store

_log = logging.getLogger(__name__)

FORMAT = "torchmig-repository"
VERSION = 1
CONFIG = "config"
NODE_MARK = "node"


@dataclass(frozen=True, slots=True)
class Summary:
    """A snapshot as a list of snapshots shows it."""

    id: str
    job: JobName
    kind: str
    created: str
    node_names: list[str]
    world_size: int
    size_bytes: int  # what a restore brings back, without holes and zeros
    tags: list[str] = field(default_factory=list)


class Repository:
    """An open repository. Cheap to open; holds no threads between uses."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url
        self._session = WriteSession(store, Index())
        self._last_loaded = ""

    @classmethod
    def open(
        cls,
        address: str,
        *,
        create: bool = False,
        make_bucket: bool = False,
        policy: RetryPolicy | None = None,
    ) -> "Repository":
        """Open the repository at an address.

        Args:
            address: a path, a `file://` or an `s3://` URL.
            create: make the repository if it is not there; on S3 in a bucket that is there.
            make_bucket: make that bucket as well, which only `torchmig init` does.
            policy: how long passing failures of the store are tried again.
        """
        store = open_store(address, policy)
        return cls.on_store(store, create=create, make_bucket=make_bucket)

    @classmethod
    def on_store(
        cls, store: Store, *, create: bool = False, make_bucket: bool = False
    ) -> "Repository":
        """Open the repository on a store; see `open`."""
        is_there = store.exists()
        config = _read_config(store) if is_there else None
        if config is None:
            may_create = create and (is_there or make_bucket or store.made_on_demand)
            if not may_create:
                raise RepositoryNotFoundError(
                    f"there is no repository at {store.url!r}; make one with 'torchmig init'"
                )
            store.create()
            config = _config_bytes()
            store.put(CONFIG, [config])  # the same bytes whoever else does this now
        _check_config(config, store.url)
        return cls(store)

    def __enter__(self) -> "Repository":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock, if there is one, and the connection."""
        self.release()
        self.store.close()

    def release(self) -> None:
        """Give up the lock that keeps prunes away between a writer's end and the commit.

        `commit` does this itself. An agent that has handed its sections to the coordinator calls it
        once the snapshot is committed or called off; if it never does, the lock runs out after
        half an hour.
        """
        self._session.release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep prunes away for the time of the `with` block.

        For the coordinator of several writing processes: around their writers and the commit, so
        that it does not matter when each of them gives up its own lock.
        """
        self._session.begin()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._session.end(failed=failed)

    def writer(self, *, budget_bytes: int | None = None, threads: int | None = None) -> Writer:
        """Return a `Writer`, to be used in a `with` block."""
        options = {} if budget_bytes is None else {"budget_bytes": budget_bytes}
        return Writer(self.store, self._session, threads=threads, **options)

    def reader(
        self, snapshot: Manifest | None = None, *, budget_bytes: int | None = None,
        threads: int | None = None, advance: Advance = unheard,
    ) -> Reader:  # fmt: skip
        """Return a `Reader`, to be used in a `with` block.

        Errors name `snapshot`, by default the one that was loaded last. `advance` is told of the
        bytes that are restored.
        """
        snapshot_id = self._last_loaded if snapshot is None else snapshot.id
        return Reader(
            self.store,
            self._session.index,
            snapshot_id,
            budget_bytes=DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes,
            threads=threads,
            advance=advance,
        )

    def is_node_folder(self) -> bool:
        """Tell whether this is a node's folder in front of another repository.

        Its snapshots may lack blobs: those of ranks on other nodes.
        """
        try:
            self.store.get(NODE_MARK)
        except ObjectMissingError:
            return False
        return True

    def mark_as_node_folder(self) -> None:
        """Say that snapshots here may lack blobs."""
        if not self.is_node_folder():
            self.store.put(NODE_MARK, [b"snapshots here may lack blobs of other nodes\n"])

    def commit(self, manifest: Manifest) -> str:
        """Make the snapshot exist and return its id; all its blobs must be stored before."""
        data = manifest.encode()
        snapshot_id = hash_of(data).hex()
        with self._session.committing() as is_unbroken:
            if not self.is_node_folder():
                self._check_blobs(manifest, deep=not is_unbroken)
            self.store.put(snapshot_name(snapshot_id), [data])
        return snapshot_id

    def snapshots(self, job: str | None = None) -> list[Summary]:
        """Return the snapshots, the newest last; damaged ones are left out with a warning."""
        summaries = [
            summarize(manifest)
            for manifest in self._manifests()
            if job is None or job in (manifest.job.name, manifest.job.id)
        ]
        summaries.sort(key=lambda summary: (summary.created, summary.id))
        return summaries

    def load(self, reference: str, job: str | None = None) -> Manifest:
        """Return the snapshot named by an id, a unique prefix of one, or "latest".

        Args:
            reference: what the user wrote.
            job: a job's name or id; "latest" is then its latest snapshot.
        """
        snapshot_id = self.resolve(reference, job)
        name = snapshot_name(snapshot_id)
        manifest = load_manifest(name, self.store.get(name))
        self._last_loaded = snapshot_id
        return manifest

    def resolve(self, reference: str, job: str | None = None) -> str:
        """Return the full id of a snapshot; see `load`."""
        if reference == "latest":
            summaries = self.snapshots(job)
            if not summaries:
                of = f" of job {job!r}" if job else ""
                raise SnapshotNotFoundError(f"there is no snapshot{of} in {self.url!r}")
            return summaries[-1].id
        ids = self.snapshot_ids()
        matching = [known for known in ids if reference and known.startswith(reference.lower())]
        if not matching:
            raise SnapshotNotFoundError(
                f"there is no snapshot {reference!r} in {self.url!r}; "
                "see 'torchmig snapshots' for those there are"
            )
        if len(matching) > 1:
            raise SnapshotNotFoundError(
                f"snapshot {reference!r} is ambiguous in {self.url!r}: {len(matching)} ids begin "
                "so; write more of it"
            )
        return matching[0]

    def index(self) -> Index:
        """Return the index as it is now."""
        self._session.index.refresh(self.store)
        return self._session.index

    def summary(self, snapshot_id: str) -> Summary:
        """Return what a list shows of one snapshot, also of one that cannot be read."""
        name = snapshot_name(snapshot_id)
        try:
            return summarize(load_manifest(name, self.store.get(name)))
        except (IntegrityError, SnapshotUnfitError):
            return Summary(snapshot_id, JobName("(unreadable)"), "unknown", "", [], 0, 0)

    def forget(self, snapshot_id: str) -> None:
        """Delete a manifest; its blobs stay until a prune."""
        self.store.delete(snapshot_name(snapshot_id))

    def retag(self, manifest: Manifest, tags: list[str]) -> str:
        """Give a snapshot other tags and return its id, which changes with them.

        The new manifest is there before the old one goes.
        """
        changed = replace(
            manifest, tags=sorted(set(tags)), original=manifest.original or manifest.id, id=""
        )
        snapshot_id = self.commit(changed)
        if snapshot_id != manifest.id:
            self.forget(manifest.id)
        return snapshot_id

    def snapshot_ids(self) -> list[str]:
        """Return the ids of all snapshots."""
        prefix = f"{SNAPSHOT_PREFIX}/"
        return sorted(entry.name.removeprefix(prefix) for entry in self.store.list(SNAPSHOT_PREFIX))

    def _manifests(self) -> Iterator[Manifest]:
        names = [snapshot_name(snapshot_id) for snapshot_id in self.snapshot_ids()]
        for name, data in fetch_all(self.store, names):
            try:
                yield load_manifest(name, data)
            except (IntegrityError, SnapshotUnfitError) as error:
                _log.warning("left out of the list: %s", error)

    def _check_blobs(self, manifest: Manifest, *, deep: bool) -> None:
        """Refuse to commit what refers to blobs that are not there.

        Args:
            manifest: what is to be committed.
            deep: look at every blob, not only at those that the manifest names itself. Needed when
                a prune may have run since the writers ended.
        """
        index = self._session.index
        wanted = {
            blob_id
            for stream in manifest.streams
            for blob_id in (*stream.trees, *(extent.blob_id for extent in stream.extents))
        }
        missing = [blob_id for blob_id in wanted if blob_id not in index]
        if deep and not missing:
            with self.reader(manifest) as reader:
                missing = [
                    row[2]
                    for stream in manifest.streams
                    for row in reader.rows(stream)
                    if row[2] not in index
                ]
        if missing:
            raise IntegrityError(
                f"cannot commit the snapshot: {len(missing)} of its blobs are not in {self.url!r}, "
                f"{missing[0].hex()[:16]!r} for one; did every node finish its writer?"
            )


def summarize(manifest: Manifest) -> Summary:
    """Return what a list of snapshots shows of one."""
    return Summary(
        id=manifest.id,
        job=manifest.job,
        kind=manifest.kind,
        created=manifest.created,
        node_names=sorted({rank.node for rank in manifest.ranks}),
        world_size=len(manifest.ranks),
        size_bytes=sum(stream.data_bytes for stream in manifest.streams),
        tags=list(manifest.tags),
    )


def _config_bytes() -> bytes:
    document = {
        "chunk_bytes": {str(kind): size_bytes for kind, size_bytes in CHUNK_BYTES.items()},
        "format": FORMAT,
        "hash": "blake3",
        "version": VERSION,
    }
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def _read_config(store: Store) -> bytes | None:
    try:
        return store.get(CONFIG)
    except ObjectMissingError:
        return None


def _check_config(data: bytes, url: str) -> None:
    try:
        document = json.loads(data)
        format_name, version = document["format"], document["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"the config of repository {url!r} is damaged") from error
    if format_name != FORMAT:
        raise IntegrityError(f"{url!r} holds something else: its format is {format_name!r}")
    if version != VERSION:
        raise TorchmigError(
            f"repository {url!r} is of version {version!r}, but this torchmig reads version "
            f"{VERSION}; upgrade torchmig"
        )
    if data != _config_bytes():
        raise IntegrityError(f"the config of repository {url!r} is damaged")
