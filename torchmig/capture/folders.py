"""Folders that a process tree stands in or has a socket in: they must be there at a restore.

Temporary ones, such as those of multiprocessing, are gone once the job that made them has ended,
and were never on another host.
"""

import contextlib
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchmig.capture.process.descriptors import descriptors
from torchmig.errors import SnapshotUnfitError, TorchmigError

Folder = dict[str, Any]  # path, mode: as a manifest holds it


def look(pids: Iterable[int]) -> list[Folder]:
    """Return the folders that the processes, which must not run meanwhile, need."""
    found: dict[str, Folder] = {}
    for pid in pids:
        for path in _folders(pid):
            try:
                mode = Path(f"/proc/{pid}/root{path}").stat().st_mode
            except OSError:
                continue  # removed: CRIU deals with it or says so
            if stat.S_ISDIR(mode):
                found[path] = {"path": path, "mode": stat.S_IMODE(mode)}
    return [found[path] for path in sorted(found)]


def make(folders: Iterable[Folder]) -> None:
    """Make the folders that are missing.

    Raises:
        SnapshotUnfitError: A path is none that a process could have had.
        TorchmigError: A folder cannot be made.
    """
    for folder in folders:
        path = Path(folder["path"])
        if not path.is_absolute() or ".." in path.parts:
            raise SnapshotUnfitError(f"'{path}' in the snapshot is no absolute path")
        if path.is_dir():
            continue
        try:
            path.mkdir(parents=True)
            path.chmod(folder["mode"])
        except OSError as error:
            raise TorchmigError(f"cannot make the job's folder '{path}': {error}") from error


def _folders(pid: int) -> set[str]:
    sockets = _bound_sockets(pid)
    paths = set()
    for number, target in descriptors(pid):
        if target.startswith("socket:["):
            bound = sockets.get(target[len("socket:[") : -1])
            if bound is not None:
                paths.add(str(Path(bound).parent))
        elif target.startswith("/") and Path(f"/proc/{pid}/fd/{number}").is_dir():
            paths.add(target)
    with contextlib.suppress(OSError):  # it has ended
        paths.add(str(Path(f"/proc/{pid}/cwd").readlink()))
    return paths


def _bound_sockets(pid: int) -> dict[str, str]:
    """Return the path of each unix socket that has one in the file system, by inode."""
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    except OSError:
        return {}
    fields = [line.split(maxsplit=7) for line in lines]
    return {field[6]: field[7] for field in fields if len(field) == 8 and field[7][0] == "/"}
