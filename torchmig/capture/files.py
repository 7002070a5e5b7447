"""Files that a rank tree has open for writing, by content, and those that it needs to be there."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmig.capture.process.descriptors import descriptors
from torchmig.errors import SnapshotUnfitError, TorchmigError
from torchmig.repo import Kind, Reader, Stream, Writer

FILES = "files/"
_CHUNK_BYTES = 8 << 20
_ACCESS_MODE = 0o3
# Not files of a disk, or not the job's.
_NEVER = ("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV")


@dataclass(frozen=True)
class WrittenFile:
    """A file that a tree may have changed: goes with the snapshot.

    `sparse` files come back with their length and no content: the rank's standard streams, which
    the agent has passed on already.
    """

    path: str
    size_bytes: int
    mode: int
    modified_ns: int
    sparse: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the form that goes into a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "WrittenFile":
        """Return the file of a manifest."""
        return cls(**document)


@dataclass(frozen=True)
class NeededFile:
    """A file that a tree has open or mapped without writing: must be on the target as it was."""

    path: str
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the form that goes into a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "NeededFile":
        """Return the file of a manifest."""
        return cls(**document)


def look(pids: Iterable[int], sparse: Iterable[str]) -> tuple[list[WrittenFile], list[NeededFile]]:
    """Return what the processes, which must not run meanwhile, write and need."""
    streams = set(sparse)
    written: dict[str, WrittenFile] = {}
    needed: dict[str, NeededFile] = {}
    for pid in pids:
        for path, writable in _open_files(pid):
            status = _status(pid, path)
            if status is None:
                continue
            if writable:
                written[path] = WrittenFile(
                    path,
                    status.st_size,
                    stat.S_IMODE(status.st_mode),
                    status.st_mtime_ns,
                    path in streams,
                )
            else:
                needed[path] = NeededFile(path, status.st_size)
    return (
        sorted(written.values(), key=lambda file: file.path),
        sorted((f for f in needed.values() if f.path not in written), key=lambda file: file.path),
    )


def copy_files(files: list[WrittenFile], folder: Path) -> None:
    """Copy the files, by number, into a folder, so that the tree may go on meanwhile."""
    for number, written in enumerate(files):
        if not written.sparse:
            shutil.copyfile(written.path, folder / str(number))


def store_files(
    writer: Writer, files: list[WrittenFile], folder: Path, prefix: str
) -> list[Stream]:
    """Write the copies of the files into the repository, one stream each, named by number."""
    streams = []
    for number, written in enumerate(files):
        if written.sparse:
            continue
        stream = writer.stream(f"{prefix}{FILES}{number}", Kind.FILE, written.mode)
        with (folder / str(number)).open("rb") as file:
            offset = 0
            while piece := file.read(_CHUNK_BYTES):
                stream.write(offset, piece)
                offset += len(piece)
        streams.append(stream.close(offset))
    return streams


def check_needed(files: Iterable[NeededFile], what: str) -> None:
    """Refuse if a file that a snapshot needs is not here as it was.

    Raises:
        SnapshotUnfitError: Names the first one, and how many more there are.
    """
    missing = []
    for needed in files:
        try:
            size = Path(needed.path).stat().st_size
        except OSError:
            missing.append(f"'{needed.path}' is missing")
            continue
        if size != needed.size_bytes:
            missing.append(
                f"'{needed.path}' has {size} bytes and had {needed.size_bytes} in the snapshot"
            )
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise SnapshotUnfitError(
            f"cannot restore {what} on this host: {missing[0]}{more}; "
            "put the same files in the same places, or restore where they are"
        )


def restore_files(
    reader: Reader, streams: list[Stream], files: list[WrittenFile], prefix: str
) -> None:
    """Put the files back as they were.

    Raises:
        TorchmigError: A file cannot be written.
    """
    by_name = {stream.name: stream for stream in streams}
    for number, written in enumerate(files):
        path = Path(written.path)
        if not path.is_absolute() or ".." in path.parts:
            raise SnapshotUnfitError(f"'{path}' in the snapshot is no absolute path")
        temporary = path.with_name(f".{path.name}.torchmig-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            if written.sparse:
                with temporary.open("xb") as file:
                    file.truncate(written.size_bytes)
            else:
                reader.restore(by_name[f"{prefix}{FILES}{number}"], temporary)
            temporary.chmod(written.mode)
            os.utime(temporary, ns=(written.modified_ns, written.modified_ns))
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise TorchmigError(f"cannot put the job's file '{path}' back: {error}") from error


def _open_files(pid: int) -> Iterator[tuple[str, bool]]:
    """Yield (path, whether it may be written) of each regular file, through fds and mappings."""
    for name, path in descriptors(pid):
        if path.startswith("/") and _is_disk_file(path):
            flags = 0
            for line in _read(f"/proc/{pid}/fdinfo/{name}").splitlines():
                if line.startswith("flags:"):
                    flags = int(line.split()[1], 8)
            yield path, flags & _ACCESS_MODE != os.O_RDONLY
    for line in _read(f"/proc/{pid}/maps").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            path = fields[5]
            if _is_disk_file(path):
                yield path, fields[1][1] == "w" and fields[1][3] == "s"


def _is_disk_file(path: str) -> bool:
    return not path.startswith(_NEVER) and not path.endswith(" (deleted)")


def _status(pid: int, path: str) -> os.stat_result | None:
    try:
        status = Path(f"/proc/{pid}/root{path}").stat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
