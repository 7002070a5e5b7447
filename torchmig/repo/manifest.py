"""The manifest: the one object whose presence makes a snapshot exist.

It is msgpack with sorted keys, named by the hash of its bytes. Decoding trusts nothing: every field
is checked for type and range, unknown versions are refused by name, and no stream name can lead out
of the folder that it is restored into.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import msgpack

from torchmig.errors import IntegrityError, SnapshotUnfitError, TorchmigError
from torchmig.repo.blob import ID_BYTES, Kind, hash_of
from torchmig.repo.extents import MAX_OFFSET, Extent, check_extents

VERSION = 1
SNAPSHOT_PREFIX = "snapshots"
SNAPSHOT_KINDS = ("suspend", "checkpoint")
MAX_NAME_BYTES = 4096

Document: TypeAlias = dict[str, Any]
"""Free-form data that msgpack can hold: None, bool, int, float, str, bytes, lists, dicts."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One file, image or block as stored: its bytes are in blobs, the rest of it is zero."""

    name: str
    kind: str
    mode: int
    size_bytes: int
    data_bytes: int = 0  # without holes and zero chunks
    extent_count: int = 0
    extents: tuple[Extent, ...] = ()  # all of them if they are few …
    trees: tuple[bytes, ...] = ()  # … else the tree blobs that hold them

    def to_dict(self) -> Document:
        """Return the form that goes into a manifest."""
        document: Document = {
            "data_bytes": self.data_bytes,
            "extent_count": self.extent_count,
            "kind": str(self.kind),
            "mode": self.mode,
            "name": self.name,
            "size_bytes": self.size_bytes,
        }
        if self.extents:
            document["extents"] = [list(extent) for extent in self.extents]
        if self.trees:
            document["trees"] = list(self.trees)
        return document

    @classmethod
    def from_dict(cls, document: object) -> "Stream":
        """Return the stream of a manifest; raise `IntegrityError` on anything unexpected."""
        fields = _Fields(document, "stream")
        name = check_stream_name(fields.text("name", MAX_NAME_BYTES))
        kind = fields.text("kind")
        if kind not in list(Kind):
            raise IntegrityError(f"stream {name!r} is of the unknown kind {kind!r}")
        size_bytes = fields.number("size_bytes", MAX_OFFSET)
        extents = tuple(_extent(item) for item in fields.items("extents", optional=True))
        check_extents(extents, size_bytes)
        trees = tuple(_blob_id(item) for item in fields.items("trees", optional=True))
        extent_count = fields.number("extent_count", MAX_OFFSET)
        if not trees and extent_count != len(extents):
            raise IntegrityError(f"stream {name!r} lacks some of its {extent_count} extents")
        return cls(
            name=name,
            kind=kind,
            mode=fields.number("mode", 0o7777),
            size_bytes=size_bytes,
            data_bytes=fields.number("data_bytes", size_bytes),
            extent_count=extent_count,
            extents=extents,
            trees=trees,
        )


@dataclass(frozen=True, slots=True)
class RankSection:
    """What one rank put into the snapshot."""

    rank: int
    node: str
    pid: int
    streams: list[Stream] = field(default_factory=list)
    state: Document = field(default_factory=dict)

    def to_dict(self) -> Document:
        """Return the form that goes into a manifest and over the wire between agents."""
        return {
            "node": self.node,
            "pid": self.pid,
            "rank": self.rank,
            "state": self.state,
            "streams": [stream.to_dict() for stream in self.streams],
        }

    @classmethod
    def from_dict(cls, document: object) -> "RankSection":
        """Return the section of a manifest; raise `IntegrityError` on anything unexpected."""
        fields = _Fields(document, "rank")
        return cls(
            rank=fields.number("rank"),
            node=fields.text("node"),
            pid=fields.number("pid"),
            streams=[Stream.from_dict(item) for item in fields.items("streams")],
            state=fields.mapping("state"),
        )


@dataclass(frozen=True, slots=True)
class JobName:
    """Which job a snapshot belongs to: the name for people, the id for one run of it."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed snapshot of a whole job."""

    job: JobName
    kind: str  # one of SNAPSHOT_KINDS
    created: str = field(default_factory=lambda: now_rfc3339())
    launch: Document = field(default_factory=dict)
    environment: Document = field(default_factory=dict)
    nodes: list[Document] = field(default_factory=list)
    ranks: list[RankSection] = field(default_factory=list)
    store_keys: Document = field(default_factory=dict)
    report: Document = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    original: str = ""  # the id of the snapshot that this one differs from only in tags
    version: int = VERSION
    id: str = ""  # the hash of the encoded form; empty before commit

    @property
    def streams(self) -> list[Stream]:
        """Return the streams of all ranks."""
        return [stream for rank in self.ranks for stream in rank.streams]

    def encode(self) -> bytes:
        """Return the bytes that are stored; equal manifests give equal bytes."""
        document = {
            "created": self.created,
            "environment": self.environment,
            "job": {"id": self.job.id, "name": self.job.name},
            "kind": self.kind,
            "launch": self.launch,
            "nodes": self.nodes,
            "original": self.original,
            "ranks": [rank.to_dict() for rank in self.ranks],
            "report": self.report,
            "store_keys": self.store_keys,
            "tags": sorted(set(self.tags)),
            "version": self.version,
        }
        try:
            data: bytes = msgpack.packb(
                _sorted(document), use_bin_type=True, unicode_errors="surrogateescape"
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise TorchmigError(f"cannot record the snapshot: {error}") from error
        decode_manifest(data, "the new manifest")  # never commit what could not be read back
        return data

    def with_id(self, snapshot_id: str) -> "Manifest":
        """Return the same manifest with its id known."""
        return replace(self, id=snapshot_id)


def decode_manifest(data: bytes, what: str) -> Manifest:
    """Return the manifest in `data`; `what` names it in errors."""
    try:
        document = msgpack.unpackb(
            data, raw=False, strict_map_key=True, unicode_errors="surrogateescape"
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise IntegrityError(f"{what} is damaged: it is no msgpack ({error!r})") from error
    try:
        return _manifest(document)
    except SnapshotUnfitError as error:
        raise SnapshotUnfitError(f"cannot read {what}: {error}") from error
    except IntegrityError as error:
        raise IntegrityError(f"{what} is damaged: {error}") from error


def load_manifest(name: str, data: bytes) -> Manifest:
    """Return the manifest stored under `name`, after checking its bytes against that name."""
    snapshot_id = hash_of(data).hex()
    if name != snapshot_name(snapshot_id):
        raise IntegrityError(
            f"snapshot {Path(name).name[:8]!r} is damaged: the bytes of {name!r} do not match "
            "its name; restore from another snapshot"
        )
    return decode_manifest(data, f"snapshot {snapshot_id[:8]!r}").with_id(snapshot_id)


def snapshot_name(snapshot_id: str) -> str:
    """Return the object name of a snapshot's manifest."""
    return f"{SNAPSHOT_PREFIX}/{snapshot_id}"


def now_rfc3339() -> str:
    """Return the time now in UTC, in the one form that manifests use; it sorts as text."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> datetime:
    """Return the time that a manifest gives."""
    example = "2026-01-31T12:00:00.000000Z"
    try:
        if len(text) == len(example):
            return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        pass
    raise IntegrityError(f"{text!r} is not a time such as {example}")


def check_stream_name(name: str) -> str:
    """Return `name` if it stays inside whatever folder it is joined to; raise otherwise."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise IntegrityError(f"stream name {name!r} leads out of its folder")
    return name


def target_path(folder: Path, name: str) -> Path:
    """Return where a stream of this name belongs below `folder`, and nowhere else.

    Symbolic links on the way are refused, because they could lead out of the folder.
    """
    path = folder
    for part in check_stream_name(name).split("/"):
        if path != folder and path.is_symlink():
            raise IntegrityError(f"cannot restore {name!r}: {str(path)!r} is a symbolic link")
        path = path / part
    return path


def _manifest(document: object) -> Manifest:
    fields = _Fields(document, "manifest")
    version = fields.number("version")
    if version != VERSION:
        raise SnapshotUnfitError(
            f"it is of version {version}, but this torchmig reads version {VERSION}; "
            "upgrade torchmig"
        )
    kind = fields.text("kind")
    if kind not in SNAPSHOT_KINDS:
        raise IntegrityError(f"kind {kind!r} is unknown")
    created = fields.text("created")
    parse_time(created)
    job = _Fields(fields.mapping("job"), "job")
    tags = fields.items("tags")
    if not all(isinstance(tag, str) for tag in tags):
        raise IntegrityError("a tag is no text")
    nodes = fields.items("nodes")
    if not all(isinstance(node, dict) for node in nodes):
        raise IntegrityError("a node is no mapping")
    return Manifest(
        job=JobName(job.text("name", MAX_NAME_BYTES), job.text("id", MAX_NAME_BYTES)),
        kind=kind,
        created=created,
        launch=fields.mapping("launch"),
        environment=fields.mapping("environment"),
        nodes=nodes,
        ranks=[RankSection.from_dict(item) for item in fields.items("ranks")],
        store_keys=fields.mapping("store_keys"),
        report=fields.mapping("report"),
        tags=tags,
        original=fields.text("original"),
        version=version,
    )


class _Fields:
    """Reads typed fields out of a decoded mapping and says which one is wrong."""

    def __init__(self, document: object, what: str) -> None:
        if not isinstance(document, dict):
            raise IntegrityError(f"its {what} is no mapping")
        self._document = document
        self._what = what

    def number(self, key: str, maximum: int = (1 << 64) - 1) -> int:
        value = self._get(key, lambda value: isinstance(value, int) and not isinstance(value, bool))
        if not 0 <= value <= maximum:
            raise IntegrityError(f"{key!r} of its {self._what} is out of range: {value}")
        return int(value)

    def text(self, key: str, maximum_bytes: int = 1024) -> str:
        value: str = self._get(key, lambda value: isinstance(value, str))
        if len(value.encode("utf-8", "surrogatepass")) > maximum_bytes:
            raise IntegrityError(f"{key!r} of its {self._what} is too long")
        return value

    def mapping(self, key: str) -> Document:
        value: Document = self._get(key, lambda value: isinstance(value, dict))
        return value

    def items(self, key: str, *, optional: bool = False) -> list[Any]:
        if optional and key not in self._document:
            return []
        value: list[Any] = self._get(key, lambda value: isinstance(value, list))
        return value

    def _get(self, key: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self._document:
            raise IntegrityError(f"its {self._what} lacks {key!r}")
        value = self._document[key]
        if not fits(value):
            raise IntegrityError(
                f"{key!r} of its {self._what} is of the wrong type {type(value).__name__}"
            )
        return value


def _extent(item: object) -> Extent:
    if not isinstance(item, list) or [type(part) for part in item] != [int, int, bytes]:
        raise IntegrityError("an extent is of another form")
    return Extent(item[0], item[1], item[2])


def _blob_id(item: object) -> bytes:
    if not isinstance(item, bytes) or len(item) != ID_BYTES:
        raise IntegrityError("a tree is named by something that is no hash")
    return item


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str | bytes)]
        if bad:
            raise TypeError(f"key {bad[0]!r} of a mapping is neither text nor bytes")
        keys = sorted(value, key=lambda key: (isinstance(key, bytes), key))
        return {key: _sorted(value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
